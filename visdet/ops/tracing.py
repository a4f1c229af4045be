"""A function that tells whether a call is eager."""

import torch

__all__ = ["is_traced"]


def is_traced() -> bool:
    """Return whether calls are recorded by ``torch.compile``, an export, a trace or ``torch.func``.

    These support registered operators and plain torch, but not every ``torch.autograd.Function``.
    """
    return (
        torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    )

"""Whether a call is eager."""

import torch

__all__ = ["is_traced"]


def is_traced() -> bool:
    """Return whether somebody records what is called: ``torch.compile``, an export, a trace or ``torch.func``.

    They see through registered operators and plain torch, not through every ``torch.autograd.Function``.
    """
    return (
        torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()
    )

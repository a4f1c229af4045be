"""Finds out whether torchvision's compiled operators serve a device. torchvision is imported at the first use."""

import torch
from torch import Tensor

__all__ = ["problem", "serves", "serves_gradients"]

_problems: dict[str, str | None] = {}


def problem(device_type: str) -> str | None:
    """Return None if torchvision's operators run on devices of this type, and otherwise the reason."""
    if device_type not in _problems:
        _problems[device_type] = _find_problem(device_type)
    return _problems[device_type]


def _find_problem(device_type: str) -> str | None:
    try:
        import torchvision
    except Exception as error:  # A torchvision that was built for another torch fails in many ways.
        return f"torchvision does not import ({type(error).__name__}: {error})"
    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}.get(device_type)
    if key is None:
        return f"torchvision's operators are not known to run on {device_type}"
    for name in ("nms", "roi_align", "deform_conv2d"):
        try:
            is_there = torch._C._dispatch_has_kernel_for_dispatch_key(f"torchvision::{name}", key)
        except RuntimeError:  # The operator is not declared, because its library was not loaded.
            is_there = False
        if not is_there:
            return f"torchvision {torchvision.__version__} has no {name} for {device_type}: not built, or not loaded"
    return None


def serves(device_type: str) -> bool:
    """Return whether torchvision's operators run on devices of this type. torch.compile treats it as a constant."""
    return problem(device_type) is None


# This is what the decorator torch.compiler.assume_constant_result sets. The decorator imports torch._dynamo, and that
# would make the import of visdet.ops take as long as torch's own.
serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def serves_gradients(*tensors: Tensor | None) -> bool:
    """Return whether torchvision's operator and its backward may run on ``tensors``, which are on one device.

    On CUDA the backwards of roi_align and deform_conv2d use atomic additions. Under deterministic algorithms they raise
    an error, or they compile a slow replacement.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    has_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    must_be_ordered = has_gradients and given[0].is_cuda and torch.are_deterministic_algorithms_enabled()
    return serves(given[0].device.type) and not must_be_ordered

"""Weighted sums of bilinear samples of an image, which need no tensor of samples."""

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared

__all__ = ["sample_sum", "sample_sum_reference"]


@declared(images="floating", samples="real", weights="real")
def sample_sum(
    images: Tensor,  # Float[Tensor, "B C H W"]
    samples: Tensor,  # Float[Tensor, "B Q D 2"] (x, y) in -1..1
    weights: Tensor,  # Float[Tensor, "B G Q D"]
) -> Tensor:  # Float[Tensor, "B G Q C"]
    """Return ``out[b, g, q] = sum_d weights[b, g, q, d] * grid_sample(images[b], samples[b, q, d])``.

    Sampling is that of ``grid_sample(mode="bilinear", padding_mode="zeros", align_corners=False)``: (-1, -1) is the
    outer corner of the first pixel, a corner outside the image counts as zero, and a sample with NaN contributes
    nothing.

    Args:
        images: [B, C, H, W], float64, float32, float16 or bfloat16, NCHW or channels last. The kernels read channels
            last: an NCHW image costs one copy.
        samples: [B, Q, D, 2] (x, y) in -1..1. The samples' positions, float32 (float64 for float64 images). Other types
            are converted.
        weights: [B, G, Q, D]. Any numbers, usually a softmax over D; they are converted to the type of ``samples``.

    Returns:
        [B, G, Q, C]. The sums, taken in the type of ``samples``, in the type of ``images``. Sizes of 0 give empty or
        zero results.

    It is differentiable once with respect to everything; the gradient of ``images`` has their layout. The inputs are
    saved for the backward. It is deterministic on the CPU for any number of threads; on CUDA the forward always is, the
    backward under ``torch.use_deterministic_algorithms(True)``. Under autocast every tensor keeps its type.

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: The operator is that of fused_sample_ops (attention over samples of an image); the kernels are visdet's own.
    """
    samples, weights = (widened(one, images) for one in (samples, weights))
    return _sample_sum(images, samples, weights)


def sample_sum_reference(images: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    """Return what ``sample_sum`` returns, in plain torch: the definition kernels are tested against."""
    taken = sampled(images, samples)  # [B, C, Q, D]
    return torch.einsum("bcqd,bgqd->bgqc", taken, weights.to(taken)).to(images)


def sampled(images: Tensor, samples: Tensor) -> Tensor:
    """Return the samples [B, C, Q, D] of images, in the type of ``samples``. Samples with NaN are zero."""
    is_number = samples.isfinite().all(-1, keepdim=True)
    grid = torch.where(is_number, samples, -3.0)
    return F.grid_sample(images.to(samples), grid, padding_mode="zeros", align_corners=False)


_sample_sum = _registration.differentiable(
    "sample_sum",
    "images [B, G, Q, C]",
    layouts={"images": "[B, C, H, W]", "weights": "[B, G, Q, D]"},
    wide="samples",
    channels_last=("images",),
    elsewhere=sample_sum_reference,
)

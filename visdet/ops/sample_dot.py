"""Dot products of queries with bilinear samples of an image, which need no tensor of samples."""

import math

import torch
from torch import Tensor

from . import _registration
from ._arguments import widened
from ._declared import declared
from .sample_sum import sampled

__all__ = ["sample_dot", "sample_dot_reference"]


@declared(
    images="floating",
    samples="real",
    queries="real",
    depths="real",
    num_octaves="integer, at least 0, at most 30",
)
def sample_dot(
    images: Tensor,  # Float[Tensor, "B C H W"]
    samples: Tensor,  # Float[Tensor, "B Q D 2"] (x, y) in -1..1
    queries: Tensor,  # Float[Tensor, "B G Q C-2*num_octaves"]
    depths: Tensor,  # Float[Tensor, "B Q D"]
    num_octaves: int = 0,
) -> Tensor:  # Float[Tensor, "B G Q D"]
    """Return the dot product of each sample with its query, extended by an encoding of the sample's depth.

    The last ``2 * num_octaves`` channels of the images are multiplied by ``sin(2 pi 2^k depth + phase pi / 2)`` at
    channel ``2 k + phase``; the channels before them are multiplied by the query. Sampling is that of ``sample_sum``.

    Args:
        images: [B, C, H, W], float64, float32, float16 or bfloat16, NCHW or channels last. The kernels read channels
            last: an NCHW image costs one copy.
        samples: [B, Q, D, 2] (x, y) in -1..1. The samples' positions, float32 (float64 for float64 images). Other types
            are converted.
        queries: [B, G, Q, C - 2 * num_octaves]. Any numbers; they are converted to the type of ``samples``.
        depths: [B, Q, D]. The samples' depths, in units whose octaves matter; they are converted to the type of
            ``samples``. They are not read with ``num_octaves=0``.
        num_octaves: A number from 0 to 30.

    Returns:
        [B, G, Q, D]. The products, summed in the type of ``samples``, in the type of ``images``. A sample outside the
        image gives 0.

    It is differentiable once with respect to all tensors; the gradient of ``images`` has their layout. The inputs are
    saved for the backward. It is deterministic on the CPU for any number of threads; on CUDA the forward always is, the
    backward under ``torch.use_deterministic_algorithms(True)``. Under autocast every tensor keeps its type.

    Raises:
        RuntimeError: A shape, size or device does not fit. The message names the argument.
        ValueError: A type does not fit. The message names the argument.
        NotBuiltError: The library for the device is not built.

    Source: The operator is that of fused_sample_ops; the kernels are visdet's own.
    """
    samples, queries, depths = (widened(one, images) for one in (samples, queries, depths))
    return _sample_dot(images, samples, queries, depths, num_octaves)


def sample_dot_reference(
    images: Tensor, samples: Tensor, queries: Tensor, depths: Tensor, num_octaves: int = 0
) -> Tensor:
    """Return what ``sample_dot`` returns, in plain torch: the definition kernels are tested against."""
    taken = sampled(images, samples)  # [B, C, Q, D]
    channels = images.shape[1] - 2 * num_octaves
    dots = torch.einsum("bcqd,bgqc->bgqd", taken[:, :channels], queries.to(taken))
    octaves = 2.0 ** torch.arange(num_octaves, dtype=taken.dtype, device=taken.device)
    angles = 2 * math.pi * depths.to(taken)[..., None] * octaves  # [B, Q, D, num_octaves]
    encoding = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
    dots = dots + torch.einsum("bcqd,bqdc->bqd", taken[:, channels:], encoding)[:, None]
    return dots.to(images)


_sample_dot = _registration.differentiable(
    "sample_dot",
    "images [B, G, Q, D]",
    layouts={"queries": "[B, G, Q, C]", "samples": "[B, Q, D, 2]"},
    wide="samples",
    channels_last=("images",),
    elsewhere=sample_dot_reference,
)

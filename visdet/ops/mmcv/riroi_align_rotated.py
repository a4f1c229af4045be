"""Rotation-invariant RoIAlign, which also turns the orientation channels of a rotation-equivariant map."""

import math

import torch
from torch import Tensor

from .._arguments import check_that, constant, numbers_to, pair
from .._declared import declared
from .._modules import OperatorModule
from .._roi_sampling import MAP, ROTATED
from ..roi_align_rotated import roi_align_rotated

__all__ = ["RiRoIAlignRotated", "riroi_align_rotated"]


@declared(
    features=MAP,
    rois=ROTATED,
    out_size="1 or 2 integers, at least 1",
    spatial_scale="number, above 0",
    num_samples="integer",
    num_orientations="integer, at least 1",
)
def riroi_align_rotated(
    features: Tensor,  # [B, C * G, H, W]
    rois: Tensor,  # [N, 6] (batch index, x, y, w, h, angle)
    out_size: int | tuple[int, int],
    spatial_scale: float,
    num_samples: int = 0,
    num_orientations: int = 8,
    clockwise: bool = False,
) -> Tensor:  # [N, C * G, PH, PW]
    """Return ``roi_align_rotated(..., aligned=False)`` with the orientations of each region turned by its angle.

    Args:
        features: [B, C * G, H, W]. A map of G orientations for each of C channels, one after another.
        rois: [N, 6] (batch index, x, y, w, h, angle). As of ``roi_align_rotated``. They are not differentiated.
        out_size: (height, width) in bins, or one number for both.
        spatial_scale: The number of pixels of the map per pixel of the image.
        num_samples: The sampling_ratio of ``roi_align_rotated``.
        num_orientations: G.
        clockwise: As of ``roi_align_rotated``. The orientations turn by the angle as it is given.

    Returns:
        [N, C * G, PH, PW]. With t = angle * G / 2 pi, orientation o of the result is interpolated between the
        orientations o - floor(t) and o - floor(t) + 1 of the regions, with the weights 1 - f and f, f = t - floor(t).
        Orientations are counted modulo G, for any angle.

    It is differentiable once with respect to ``features``. Its types and determinism are those of
    ``roi_align_rotated``.

    Raises:
        ValueError: An argument does not fit. The message names it.

    Source: ReDet, arXiv 2103.07733; the signature is mmcv's, whose counting of orientations leaves the map for angles
    below -2 pi.
    """
    C = features.shape[1]
    G = num_orientations
    expected = "divide the channels of features"
    check_that(C % G == 0, "riroi_align_rotated", "num_orientations", expected, f"{G} for {C}")
    pooled = roi_align_rotated(features, rois, out_size, spatial_scale, num_samples, False, clockwise)
    turn = constant(rois[:, 5], features) * (G / (2 * math.pi))
    turn = turn.nan_to_num(0, 0, 0)  # Such a region is 0.
    start = turn.floor()
    fraction = (turn - start)[:, None, None, None, None].to(pooled)
    first = (numbers_to(G, rois) - start[:, None]).remainder(G).long()  # [N, G]
    oriented = pooled.unflatten(1, (-1, G))

    def take(orientation: Tensor) -> Tensor:
        return oriented.gather(2, orientation[:, None, :, None, None].expand_as(oriented))

    return torch.lerp(take(first), take((first + 1) % G), fraction).flatten(1, 2)


class RiRoIAlignRotated(OperatorModule):
    """A module that calls ``riroi_align_rotated`` with its settings."""

    operator = staticmethod(riroi_align_rotated)

    def __init__(
        self,
        out_size: int | tuple[int, int],
        spatial_scale: float,
        num_samples: int = 0,
        num_orientations: int = 8,
        clockwise: bool = False,
    ) -> None:
        super().__init__(
            out_size=pair(out_size),
            spatial_scale=float(spatial_scale),
            num_samples=int(num_samples),
            num_orientations=int(num_orientations),
            clockwise=clockwise,
        )

    def forward(self, features: Tensor, rois: Tensor) -> Tensor:
        return self._call(features, rois)

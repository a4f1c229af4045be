"""The 3-D key points at which an anchor samples features, and the motion of anchors from one frame to another."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, xavier_init
from torch import Tensor, nn

from visdet.ops import box_key_points
from visdet.registry import MODELS

from ..layers.precision import at_least_float32, in_full_precision
from .boxes.box3d import MAX_LOG_SIZE, SIN_YAW, VX, W, X


class KeyPointsGenerator(BaseModule):
    """The base class of the generators, some of whose points a linear layer may place."""

    learnable_fc: nn.Linear | None

    def init_weights(self) -> None:
        """Initialise the linear layer of the learnable points."""
        fc = self.learnable_fc
        if fc is not None:
            xavier_init(fc, distribution="uniform", bias=0.0)


@MODELS.register_module()
class SparseBox3DKeyPointsGenerator(KeyPointsGenerator):
    """Generates key points of box anchors. Some are fixed within the box, others depend on the instance's feature.

    Args:
        embed_dims: width of the instance feature.
        num_learnable_pts: number of points that a linear layer places within half a size of the centre.
        fix_scale: the places of the fixed points, in sizes from the centre. The default is the centre alone.

    Attributes:
        num_pts: number of key points of an anchor. The fixed ones come first.

    Source: names are those of SparseDrive's generator.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_learnable_pts: int = 0,
        fix_scale: Sequence[tuple[float, float, float]] | None = None,
    ) -> None:
        super().__init__()
        fix_scale = ((0.0, 0.0, 0.0),) if fix_scale is None else fix_scale
        self.num_learnable_pts = num_learnable_pts
        self.fix_scale = nn.Parameter(torch.tensor(fix_scale, dtype=torch.float32), requires_grad=False)
        self.num_pts = len(fix_scale) + num_learnable_pts
        self.learnable_fc = nn.Linear(embed_dims, num_learnable_pts * 3) if num_learnable_pts > 0 else None

    def forward(
        self,
        anchor: Tensor,  # [B, N, 8 + v]
        instance_feature: Tensor | None = None,  # [B, N, C]
    ) -> Tensor:
        """Return key points [B, N, num_pts, 3] in metres.

        Without ``instance_feature`` the learnable points are left out. Points are float32, or float64 if the anchors
        are.
        """
        anchor = at_least_float32(anchor)
        logits = None
        fc = self.learnable_fc
        if fc is not None and instance_feature is not None:
            logits = in_full_precision(fc, instance_feature)
        return box_key_points(anchor, self.fix_scale, logits, MAX_LOG_SIZE)

    @staticmethod
    def anchor_projection(
        anchor: Tensor,  # [B, N, 8 + v]
        T_src2dst: Tensor,  # [B, 4, 4]
        time_interval: Tensor | None = None,  # [B] or [], source minus destination
    ) -> Tensor:
        """Return the anchors in the coordinates of a destination and, if the time is given, at its time."""
        anchor = at_least_float32(anchor)
        dtype = anchor.dtype
        velocity = anchor[..., VX:]
        dims = velocity.shape[-1]
        transform = T_src2dst.to(dtype)[:, None]  # [B, 1, 4, 4]
        centre = anchor[..., X:W]
        if time_interval is not None:
            moved = velocity * time_interval.to(dtype).reshape(-1, 1, 1)
            centre = centre - F.pad(moved, (0, 3 - dims))
        centre = _matmul(transform[..., :3, :3], centre) + transform[..., :3, 3]
        heading = _matmul(transform[..., :2, :2], anchor[..., SIN_YAW:VX].flip(-1))  # (cos, sin)
        turned = _matmul(transform[..., :dims, :dims], velocity)
        return torch.cat([centre, anchor[..., W:SIN_YAW], heading.flip(-1), turned], -1)


@MODELS.register_module()
class SparsePoint3DKeyPointsGenerator(KeyPointsGenerator):
    """Generates key points of polyline anchors, at learnable offsets from each of their points and at several heights.

    Args:
        embed_dims: width of the instance feature.
        num_sample: number of points of an anchor. Anchors are [B, N, num_sample * 2], x and y in metres.
        num_learnable_pts: number of offsets in the ground plane for each point and height. With 0, the generator can
            only project anchors from frame to frame.
        fix_height: heights in metres above ``ground_height``.
        ground_height: z of the ground in metres.

    Attributes:
        num_pts: number of key points of an anchor, num_sample * len(fix_height) * num_learnable_pts.

    Source: names are those of SparseDrive's generator.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        num_sample: int = 20,
        num_learnable_pts: int = 0,
        fix_height: Sequence[float] = (0,),
        ground_height: float = 0,
    ) -> None:
        super().__init__()
        self.num_sample = num_sample
        self.num_learnable_pts = num_learnable_pts
        self.fix_height = tuple(fix_height)
        num_pts = num_sample * len(fix_height) * num_learnable_pts
        self.num_pts = num_pts
        self.learnable_fc = nn.Linear(embed_dims, num_pts * 2) if num_learnable_pts > 0 else None
        heights = torch.tensor(fix_height, dtype=torch.float32) + ground_height
        self.register_buffer("_heights", heights[:, None, None], persistent=False)  # [heights, 1, 1]

    def forward(
        self,
        anchor: Tensor,  # [B, N, num_sample * 2]
        instance_feature: Tensor,  # [B, N, C]
    ) -> Tensor:
        """Return key points [B, N, num_pts, 3] in metres. ``num_learnable_pts`` must be at least 1 for it."""
        fc: Any = self.learnable_fc
        anchor = at_least_float32(anchor)
        num_sample = self.num_sample
        sizes = (num_sample, len(self.fix_height), self.num_learnable_pts, 2)
        offset = in_full_precision(fc, instance_feature).unflatten(-1, sizes)
        ground = offset + anchor.unflatten(-1, (num_sample, 1, 1, 2))
        z = self._heights.to(ground.dtype).expand(*ground.shape[:-1], 1)
        return torch.cat([ground, z], -1).flatten(2, 4)

    def anchor_projection(
        self,
        anchor: Tensor,  # [B, N, num_sample * 2]
        T_src2dst: Tensor,  # [B, 4, 4]
        time_interval: Tensor | None = None,
    ) -> Tensor:
        """Return the polylines in the coordinates of a destination.

        A time is accepted without effect, because map elements do not move.
        """
        points = at_least_float32(anchor).unflatten(-1, (self.num_sample, 2))
        transform = T_src2dst.to(points.dtype)[:, None, None]  # [B, 1, 1, 4, 4]
        return (_matmul(transform[..., :2, :2], points) + transform[..., :2, 3]).flatten(-2)


def _matmul(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix [..., I, J] times vector [..., J], without the 16-bit products of autocast."""
    return (matrix * vector[..., None, :]).sum(-1)

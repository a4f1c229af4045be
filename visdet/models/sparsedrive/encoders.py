"""Encoders that embed anchors."""

from collections.abc import Sequence
from typing import Literal

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.registry import MODELS

from ..layers.precision import in_full_precision
from .boxes.box3d import SIN_YAW, VX, W, X
from .mlp import SideBySide, linear_relu_ln


@MODELS.register_module()
class SparseBox3DEncoder(BaseModule):
    """Embeds box anchors. Position, size, yaw and velocity have a perceptron each, whose results are combined.

    It runs in float32 under autocast, because bfloat16 would round 60 m to the next quarter of a metre.

    Args:
        embed_dims: width of every part, or a list of the widths of position, size, yaw, velocity and, with
            ``output_fc``, the output.
        vel_dims: number of components of the velocity that are embedded, 0 to 3.
        mode: 'add' adds the parts, 'cat' concatenates them.
        output_fc: whether another perceptron follows.
        in_loops, out_loops: depth of each perceptron; see ``linear_relu_ln``.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        embed_dims: int | Sequence[int],
        vel_dims: int = 3,
        mode: Literal["add", "cat"] = "add",
        output_fc: bool = True,
        in_loops: int = 1,
        out_loops: int = 2,
    ) -> None:
        super().__init__()
        widths = [embed_dims] * 5 if isinstance(embed_dims, int) else list(embed_dims)
        self.vel_dims = vel_dims
        self.mode = mode

        def perceptron(input_dims: int, output_dims: int) -> nn.Sequential:
            return nn.Sequential(*linear_relu_ln(output_dims, in_loops, out_loops, input_dims))

        self.pos_fc = perceptron(3, widths[0])
        self.size_fc = perceptron(3, widths[1])
        self.yaw_fc = perceptron(2, widths[2])
        self.vel_fc = perceptron(vel_dims, widths[3]) if vel_dims > 0 else None
        output_dims = widths[-1]
        self.output_fc = perceptron(output_dims, output_dims) if output_fc else None
        perceptrons = self._perceptrons()
        self._side_by_side = SideBySide(perceptrons) if SideBySide.serves(perceptrons) else None

    def _perceptrons(self) -> list[nn.Sequential]:
        parts = self.pos_fc, self.size_fc, self.yaw_fc, self.vel_fc
        return [part for part in parts if part is not None]

    def forward(self, box_3d: Tensor) -> Tensor:
        """Return the embeddings [..., C] of anchors [..., 8 + velocities]."""
        perceptrons = self._perceptrons()
        columns = slice(X, W), slice(W, SIN_YAW), slice(SIN_YAW, VX), slice(VX, VX + self.vel_dims)
        given = [box_3d[..., part] for _, part in zip(perceptrons, columns, strict=False)]
        predicts_on_gpu = box_3d.is_cuda and not torch.is_grad_enabled()
        together = self._side_by_side
        if together is not None and predicts_on_gpu and SideBySide.serves(perceptrons):
            parts = together(perceptrons, given)
        else:
            parts = list(map(in_full_precision, perceptrons, given))
        embedding = sum(parts[1:], parts[0]) if self.mode == "add" else torch.cat(parts, dim=-1)
        output_fc = self.output_fc
        return embedding if output_fc is None else in_full_precision(output_fc, embedding)


@MODELS.register_module()
class SparsePoint3DEncoder(BaseModule):
    """Embeds polyline anchors by one perceptron of all coordinates, in float32 under autocast.

    Args:
        embed_dims: width of the embedding.
        num_sample: number of points of a polyline. coords_dim: number of coordinates of a point.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(self, embed_dims: int = 256, num_sample: int = 20, coords_dim: int = 2) -> None:
        super().__init__()
        self.pos_fc = nn.Sequential(*linear_relu_ln(embed_dims, 1, 2, num_sample * coords_dim))

    def forward(self, anchor: Tensor) -> Tensor:
        """Return the embeddings [..., embed_dims] of polylines [..., num_sample · coords_dim] in metres."""
        return in_full_precision(self.pos_fc, anchor)

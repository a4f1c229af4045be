"""A small two-view depth network: attention along epipolar lines."""

from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS

from .layers import ConvModule
from .layers.precision import at_least_float32

__all__ = ["TwoViewDepth", "epipolar_samples"]


def epipolar_samples(
    intrinsics: Tensor,  # [B, 3, 3]
    source_from_reference: Tensor,  # [B, 4, 4]
    depths: Tensor,  # [D]
    image_size: tuple[int, int],
    grid_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # [B, Q, D, 2], Bool[B, Q, D]
    """Return where the source view sees the points at ``depths`` behind each cell of a grid over the reference view.

    Args:
        intrinsics: of both views, in pixels; the image reaches from 0 to its width and height.
        source_from_reference: the relative pose, in the unit of the depths.
        depths: z in the reference view.
        image_size: (height, width) in pixels.
        grid_size: (h, w) of the grid whose Q = h w cells' centres are the queries, row by row.

    Returns:
        Positions (x, y) in -1..1 from edge to edge of the source image, beyond that outside of it, and a mask that is
        True where a point lies behind the source camera: its position means nothing.
    """
    (height, width), (rows, columns) = image_size, grid_size
    y = (torch.arange(rows, device=depths.device, dtype=depths.dtype) + 0.5) * (height / rows)
    x = (torch.arange(columns, device=depths.device, dtype=depths.dtype) + 0.5) * (width / columns)
    y, x = torch.meshgrid(y, x, indexing="ij")
    pixels = torch.stack((x, y, torch.ones_like(x)), dim=-1).flatten(0, 1)  # [Q, 3]
    turn = intrinsics @ source_from_reference[:, :3, :3] @ torch.linalg.inv(intrinsics)
    shift = (intrinsics @ source_from_reference[:, :3, 3:]).squeeze(-1)
    seen = (pixels @ turn.mT).unsqueeze(2) * depths.view(-1, 1) + shift.view(-1, 1, 1, 3)  # [B, Q, D, 3]
    behind = seen[..., 2] <= 0
    place = seen[..., :2] / seen[..., 2:].masked_fill(behind.unsqueeze(-1), 1.0)
    return place * place.new_tensor([2 / width, 2 / height]) - 1, behind


@MODELS.register_module()
class TwoViewDepth(BaseModel):
    """Predicts the depth of the reference view from a second, posed view.

    A few convolutions make features of both views at half the resolution. Every reference feature attends to the
    source features at ``num_depths`` candidates along its epipolar line, evenly spaced in inverse depth; the mean
    candidate under the attention's weights, plus a convolution's correction, is the prediction.

    Args:
        attention: config of the attention; 'FusedSampleAttention' with ``embed_dims`` channels.
        embed_dims: channels of the features.
        num_blocks: residual convolutions of the features.
        num_depths: candidates D.
        depth_range: nearest and farthest candidate.
        loss_match_weight: weight of the cross entropy between the attention's weights and the true candidates.
        loss_depth_weight: weight of the L1 loss of the inverse depth, as a share of its range.
    """

    def __init__(
        self,
        attention: dict[str, Any],
        embed_dims: int = 32,
        num_blocks: int = 3,
        num_depths: int = 32,
        depth_range: tuple[float, float] = (1.0, 8.0),
        loss_match_weight: float = 1.0,
        loss_depth_weight: float = 10.0,
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        if num_depths < 2 or not 0 < depth_range[0] < depth_range[1]:
            raise InvalidInputError(
                "TwoViewDepth: num_depths must be at least 2 and depth_range positive and rising, got "
                f"{num_depths} and {tuple(depth_range)}"
            )
        norm = {"type": "GN", "num_groups": 4}
        self.num_depths = num_depths
        self.depth_range = tuple(depth_range)
        self.loss_match_weight = loss_match_weight
        self.loss_depth_weight = loss_depth_weight
        self.stem = ConvModule(3, embed_dims, 5, stride=2, padding=2, norm_cfg=norm)
        self.blocks = nn.ModuleList(
            ConvModule(embed_dims, embed_dims, 3, padding=1, norm_cfg=norm) for _ in range(num_blocks)
        )
        self.features = nn.Conv2d(embed_dims, embed_dims, 1)
        self.attention = MODELS.build({"embed_dims": embed_dims, **attention})
        self.correction = nn.Sequential(
            ConvModule(embed_dims + 1, embed_dims, 3, padding=1, norm_cfg=norm),
            ConvModule(embed_dims, embed_dims, 3, padding=1, norm_cfg=norm),
            nn.Conv2d(embed_dims, 1, 3, padding=1),
        )
        last: Any = self.correction[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(
        self, inputs: Tensor, data_samples: dict[str, Tensor], mode: str = "tensor"
    ) -> dict[str, Tensor] | list[dict[str, Any]] | tuple[Tensor, Tensor]:
        """Run the network on pairs of views.

        Args:
            inputs: [B, 2, 3, H, W], 0..255, the reference view and the source view; H and W even.
            data_samples: ``intrinsics`` [B, 3, 3] in pixels and ``source_from_reference`` [B, 4, 4]; for 'loss' also
                ``gt_depth`` [B, H / 2, W / 2].
            mode: 'loss' returns {name: scalar}; 'predict' returns one dict a pair: ``pred_depth`` [H / 2, W / 2] and
                what ``data_samples`` holds of the pair; 'tensor' returns the position [B, H / 2, W / 2] of the inverse
                depth in its range, 0 the farthest and 1 the nearest, and the candidates' weights [B, Q, D].
        """
        if mode not in ("tensor", "predict", "loss"):
            raise ValueError(f"TwoViewDepth: mode must be 'tensor', 'predict' or 'loss', got {mode!r}")
        if inputs.dim() != 5 or inputs.shape[1:3] != (2, 3) or inputs.shape[3] % 2 or inputs.shape[4] % 2:
            raise InvalidInputError(
                f"TwoViewDepth: inputs must be [B, 2, 3, H, W] with even H and W, got {tuple(inputs.shape)}"
            )
        position, weights = self._match(
            inputs, data_samples["intrinsics"], data_samples["source_from_reference"]
        )
        if mode == "loss":
            return self._loss(position, weights, data_samples["gt_depth"])
        if mode == "predict":
            depth = 1 / self._inverse_depth(position.clamp(0, 1))
            return [
                {"pred_depth": depth[b], **{name: values[b] for name, values in data_samples.items()}}
                for b in range(len(depth))
            ]
        return position, weights

    def _match(
        self, inputs: Tensor, intrinsics: Tensor, source_from_reference: Tensor
    ) -> tuple[Tensor, Tensor]:
        image_size = (inputs.shape[-2], inputs.shape[-1])
        x = self.stem(inputs.flatten(0, 1).float() / 127.5 - 1)
        for block in self.blocks:
            x = x + block(x)
        reference, source = self.features(x).unflatten(0, (-1, 2)).unbind(1)  # [B, C, h, w]
        candidates = torch.linspace(0, 1, self.num_depths, device=inputs.device)  # [D], in the range
        samples, behind = epipolar_samples(
            intrinsics,
            source_from_reference,
            1 / self._inverse_depth(candidates),
            image_size,
            (reference.shape[-2], reference.shape[-1]),
        )
        found, weights = self.attention(
            reference.flatten(2).mT,
            source.contiguous(),
            samples,
            0.5 * candidates.expand(samples.shape[:-1]),  # half a period: the ends differ
            behind,
        )
        weights = weights.mean(dim=1)  # [B, Q, D]
        position = (weights @ candidates.to(weights.dtype)).view(-1, 1, *reference.shape[-2:])
        context = torch.cat((found.mT.unflatten(2, reference.shape[-2:]), position.to(found.dtype)), dim=1)
        return (position + at_least_float32(self.correction(context))).squeeze(1), weights

    def _loss(self, position: Tensor, weights: Tensor, gt_depth: Tensor) -> dict[str, Tensor]:
        farthest, nearest = 1 / self.depth_range[1], 1 / self.depth_range[0]
        truth = ((1 / gt_depth - farthest) / (nearest - farthest)).clamp(0, 1)
        # The true weights: those that interpolate the truth between the two candidates around it.
        place = truth.flatten(1) * (self.num_depths - 1)  # [B, Q]
        steps = torch.arange(self.num_depths, device=place.device)
        target = (1 - (place.unsqueeze(-1) - steps).abs()).clamp(min=0)
        return {
            "loss_match": -self.loss_match_weight * (target * (weights + 1e-6).log()).sum(-1).mean(),
            "loss_depth": self.loss_depth_weight * F.l1_loss(position, truth),
        }

    def _inverse_depth(self, position: Tensor) -> Tensor:
        farthest, nearest = 1 / self.depth_range[1], 1 / self.depth_range[0]
        return farthest + (nearest - farthest) * position

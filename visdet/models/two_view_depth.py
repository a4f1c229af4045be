"""A small two-view depth network: attention along epipolar lines."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS
from visdet.structures import TwoViewDataSample

from .base_detector import BaseDetector
from .layers import ConvModule
from .layers.precision import at_least_float32


def epipolar_samples(
    intrinsics: Tensor,  # [B, 3, 3]
    source_from_reference: Tensor,  # [B, 4, 4]
    depths: Tensor,  # [D]
    image_size: tuple[int, int],
    grid_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # [B, Q, D, 2], Bool[B, Q, D]
    """Project points on the rays of a grid over the reference view, at the given depths, into the source view.

    Args:
        intrinsics: the camera matrix of both views, in pixels. The image reaches from 0 to its width and height.
        source_from_reference: the relative pose, in the unit of the depths.
        depths: z coordinates in the reference view.
        image_size: (height, width) in pixels.
        grid_size: the (h, w) of the grid. The centres of its Q = h · w cells are the queries, row by row.

    Returns:
        The positions (x, y) in the source image, which reaches from -1 to 1 from edge to edge, and a mask that is True
        where a point lies behind the source camera. The position of such a point is meaningless.
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
class TwoViewDepth(BaseDetector):
    """Predicts the depth of the reference view from a second, posed view.

    A few convolutions compute features of both views at half the resolution. Every feature of the reference view
    attends to the features of the source view at ``num_depths`` candidates along its epipolar line, which are evenly
    spaced in inverse depth. The prediction is the mean candidate under the attention weights plus a correction by
    another few convolutions.

    The inputs are pairs of a reference view and a source view of even height and width, with values in 0..255.

    Args:
        attention: config of the attention, such as a 'FusedSampleAttention'. Its ``embed_dims`` is this model's by
            default.
        embed_dims: channels of the features.
        num_blocks: number of residual convolutions of the features.
        num_depths: number D of candidates.
        depth_range: the depths of the nearest and the farthest candidate.
        loss_match_weight: weight of the cross entropy between the attention weights and the true candidates.
        loss_depth_weight: weight of the L1 loss of the inverse depth, which is scaled so that its range is 0..1.
        data_preprocessor: config or module that turns collated pairs into a batch. The default stacks them.

    Raises:
        ValueError: there are fewer than two depths, or the depth range is not positive and increasing.
    """

    input_shape: ClassVar[tuple[str, ...]] = ("B", "2", "3", "H", "W")
    sample_type: ClassVar[type[TwoViewDataSample]] = TwoViewDataSample

    def __init__(
        self,
        attention: dict[str, Any],
        embed_dims: int = 32,
        num_blocks: int = 3,
        num_depths: int = 32,
        depth_range: tuple[float, float] = (1.0, 8.0),
        loss_match_weight: float = 1.0,
        loss_depth_weight: float = 10.0,
        data_preprocessor: dict[str, Any] | nn.Module | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data_preprocessor or {"type": "DrivingDataPreprocessor"}, init_cfg)
        if num_depths < 2 or not 0 < depth_range[0] < depth_range[1]:
            raise InvalidInputError(
                "TwoViewDepth: num_depths must be at least 2 and depth_range positive and increasing, got "
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
        for parameter in self.correction[-1].parameters():
            nn.init.zeros_(parameter)

    def loss(self, inputs: Tensor, data_samples: Sequence[TwoViewDataSample]) -> dict[str, Tensor]:
        """Return ``loss_match`` and ``loss_depth``."""
        position, weights = self.raw_outputs(inputs, data_samples)
        gt_depth = torch.stack([sample.gt_depth for sample in data_samples])
        farthest, nearest = 1 / self.depth_range[1], 1 / self.depth_range[0]
        truth = ((1 / gt_depth - farthest) / (nearest - farthest)).clamp(0, 1)
        # The true weights interpolate the truth between the two nearest candidates.
        place = truth.flatten(1) * (self.num_depths - 1)  # [B, Q]
        steps = torch.arange(self.num_depths, device=place.device)
        target = (1 - (place.unsqueeze(-1) - steps).abs()).clamp(min=0)
        return {
            "loss_match": -self.loss_match_weight * (target * (weights + 1e-6).log()).sum(-1).mean(),
            "loss_depth": self.loss_depth_weight * F.l1_loss(position, truth),
        }

    def predict(self, inputs: Tensor, data_samples: Sequence[TwoViewDataSample]) -> list[TwoViewDataSample]:
        """Return the samples with ``pred_depth`` [H / 2, W / 2]."""
        position, _ = self.raw_outputs(inputs, data_samples)
        depths = 1 / self._inverse_depth(position.clamp(0, 1))
        for sample, depth in zip(data_samples, depths, strict=True):
            sample.set_field(depth, "pred_depth")
        return list(data_samples)

    def raw_outputs(
        self, inputs: Tensor, data_samples: Sequence[TwoViewDataSample] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted inverse depths and the attention weights.

        Returns:
            the inverse depths [B, H / 2, W / 2], scaled so that 0 is the farthest candidate and 1 the nearest, and the
            weights [B, Q, D] of the candidates, averaged over the heads.

        Raises:
            ValueError: the inputs are not [B, 2, 3, H, W] with even H and W, or there are no samples.
        """
        if inputs.shape[1:3] != (2, 3) or inputs.shape[3] % 2 or inputs.shape[4] % 2:
            raise InvalidInputError(
                f"TwoViewDepth: inputs must be [B, 2, 3, H, W] with even H and W, got {tuple(inputs.shape)}"
            )
        assert data_samples is not None
        intrinsics = torch.stack([sample.intrinsics for sample in data_samples])
        source_from_reference = torch.stack([sample.source_from_reference for sample in data_samples])
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
            0.5 * candidates.expand(samples.shape[:-1]),  # half a period, so that the two ends differ
            behind,
        )
        weights = weights.mean(dim=1)  # [B, Q, D]
        position = (weights @ candidates.to(weights.dtype)).view(-1, 1, *reference.shape[-2:])
        context = torch.cat((found.mT.unflatten(2, reference.shape[-2:]), position.to(found.dtype)), dim=1)
        return (position + at_least_float32(self.correction(context))).squeeze(1), weights

    def _inverse_depth(self, position: Tensor) -> Tensor:
        farthest, nearest = 1 / self.depth_range[1], 1 / self.depth_range[0]
        return farthest + (nearest - farthest) * position

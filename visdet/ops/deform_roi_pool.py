"""Deformable RoI pooling, which is RoIAlign with bins that move by learnt offsets."""

from torch import Tensor, nn

from . import _registration
from ._arguments import check_that, constant, pair, widened
from ._declared import declared
from ._modules import OperatorModule
from ._roi_sampling import MAP, UPRIGHT, check_samples, pool_regions
from .roi_align import roi_align

__all__ = [
    "DeformRoIPool",
    "DeformRoIPoolPack",
    "ModulatedDeformRoIPoolPack",
    "deform_roi_pool",
    "deform_roi_pool_reference",
]


@declared(
    input=MAP,
    rois=UPRIGHT,
    offset="None or real",
    output_size="1 or 2 integers, at least 1",
    spatial_scale="number, above 0",
    sampling_ratio="integer",
    gamma="number, above -inf",
)
def deform_roi_pool(
    input: Tensor,  # [B, C, H, W]
    rois: Tensor,  # [N, 5] (batch index, x1, y1, x2, y2)
    offset: Tensor | None,  # [N, 2, PH, PW] (x, y)
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    gamma: float = 0.1,
) -> Tensor:  # [N, C, PH, PW]
    """Return the mean of bilinear samples in each bin, moved by ``gamma`` * (the region's size) * ``offset``.

    Args:
        input: [B, C, H, W]. The map, of any floating-point type. 16-bit types are computed in float32.
        rois: [N, 5]. The regions (batch index, x1, y1, x2, y2) in pixels of the image. They are not differentiated.
        offset: [N, 2, PH, PW]. The movement (x, y) of each bin in units of ``gamma`` times the region's size. Without
            it (None or empty) this is ``roi_align`` with aligned=True.
        output_size: (height, width) in bins, or one number for both.
        spatial_scale: The number of pixels of the map per pixel of the image.
        sampling_ratio: The number of samples down and across each bin; 0 for as many as the bin covers pixels,
            rounded up.
        gamma: The factor of the offsets.

    Returns:
        [N, C, PH, PW]. The bins in the type of ``input``. Sampling, borders and regions of no image, with NaN or far
        outside the map are treated as by ``roi_align``. A sample whose offset is NaN or infinite is 0.

    It is differentiable once with respect to ``input`` and ``offset``. mmcv extrapolates the gradient of an offset
    within a pixel outside the border; here it is that of the clamped sample: 0 across the border. Kernels of visdet's
    serve it in float32 (float64 for float64). On the CPU the results have the same bits for any number of threads. On
    CUDA only the gradient of ``input`` may differ from call to call, unless it must be deterministic, as that of
    ``roi_align``. Plain torch serves other devices, and all where visdet's library is missing.

    Raises:
        ValueError: A shape, type, device or number does not fit. The message names the argument.

    Source: Deformable Convolutional Networks, arXiv 1703.06211; the signature is mmcv's.
    """
    size = pair(output_size)
    check_samples("deform_roi_pool", size, sampling_ratio)
    expected = [rois.shape[0], 2, *size]
    if offset is None or (offset.numel() == 0 and list(offset.shape) != expected):
        return roi_align(input, rois, size, spatial_scale, sampling_ratio)
    check_that(list(offset.shape) == expected, "deform_roi_pool", "offset", "be {}", offset, expected)
    tensors = widened(input, input), constant(rois, input), widened(offset, input)
    pooled = _deform_roi_pool(*tensors, *size, spatial_scale, sampling_ratio, gamma)
    return pooled.to(input)


def deform_roi_pool_reference(
    input: Tensor,
    rois: Tensor,
    offset: Tensor | None,
    output_size: int | tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    gamma: float = 0.1,
) -> Tensor:
    """Return what ``deform_roi_pool`` returns, in plain torch: the definition kernels are tested against."""
    movement = None if offset is None else widened(offset, input).flip(1) * gamma
    return pool_regions(
        input, rois, pair(output_size), spatial_scale, sampling_ratio, aligned=True, movement=movement
    )


_deform_roi_pool = _registration.differentiable(
    "deform_roi_pool",
    "input [N, C, pooled_height, pooled_width]",
    layouts={"input": "[B, C, H, W]", "rois": "[N, 5]"},
    elsewhere=lambda input, rois, offset, *rest: deform_roi_pool_reference(
        input, rois, offset, rest[:2], *rest[2:]
    ),
    needs_library=False,
)


class DeformRoIPool(OperatorModule):
    """A module that calls ``deform_roi_pool`` with its settings."""

    operator = staticmethod(deform_roi_pool)
    output_size: tuple[int, int]

    def __init__(
        self,
        output_size: int | tuple[int, int],
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        gamma: float = 0.1,
    ) -> None:
        super().__init__(
            output_size=pair(output_size),
            spatial_scale=float(spatial_scale),
            sampling_ratio=int(sampling_ratio),
            gamma=float(gamma),
        )

    def forward(self, input: Tensor, rois: Tensor, offset: Tensor | None = None) -> Tensor:
        return self._call(input, rois, offset)


class DeformRoIPoolPack(DeformRoIPool):
    """Deformable RoI pooling whose offsets three linear layers predict from the undeformed bins. They start at 0."""

    def __init__(
        self,
        output_size: int | tuple[int, int],
        output_channels: int,
        deform_fc_channels: int = 1024,
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        gamma: float = 0.1,
    ) -> None:
        super().__init__(output_size, spatial_scale, sampling_ratio, gamma)
        self.output_channels, self.deform_fc_channels = output_channels, deform_fc_channels
        self.offset_fc = self._predictor(2, num_layers=3)

    def _predictor(self, channels: int, num_layers: int) -> nn.Sequential:
        """Return linear layers that predict numbers of each bin from the undeformed bins. These start at 0."""
        bins, hidden = self.output_size[0] * self.output_size[1], self.deform_fc_channels
        last = nn.Linear(hidden, bins * channels)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        sizes = [bins * self.output_channels, *[hidden] * (num_layers - 2)]
        others = [part for size in sizes for part in (nn.Linear(size, hidden), nn.ReLU(inplace=True))]
        return nn.Sequential(*others, last)

    def _pool(self, input: Tensor, rois: Tensor) -> tuple[Tensor, Tensor]:
        """Return the deformed bins [N, C, PH, PW] and the flattened undeformed ones."""
        channels, expected = input.shape[1], self.output_channels
        check_that(channels == expected, type(self).__name__, "input", "have {} channels", channels, expected)
        straight = super().forward(input, rois).flatten(1)
        offset = self.offset_fc(straight).view(-1, 2, *self.output_size)
        return super().forward(input, rois, offset), straight

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:  # type: ignore[override]
        return self._pool(input, rois)[0]


class ModulatedDeformRoIPoolPack(DeformRoIPoolPack):
    """Deformable RoI pooling that also predicts a factor in 0..1 for each bin. The factors start at 0.5."""

    def __init__(
        self,
        output_size: int | tuple[int, int],
        output_channels: int,
        deform_fc_channels: int = 1024,
        spatial_scale: float = 1.0,
        sampling_ratio: int = 0,
        gamma: float = 0.1,
    ) -> None:
        super().__init__(
            output_size, output_channels, deform_fc_channels, spatial_scale, sampling_ratio, gamma
        )
        self.mask_fc = self._predictor(1, num_layers=2).append(nn.Sigmoid())

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:  # type: ignore[override]
        pooled, straight = self._pool(input, rois)
        return pooled * self.mask_fc(straight).view(-1, 1, *self.output_size)

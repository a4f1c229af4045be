"""Cases of the detection operators with mmdet's usual sizes, compared with torchvision, mmcv and plain torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet import ops
from visdet.ops.box_iou_rotated import box_iou_rotated_reference
from visdet.ops.carafe import carafe_reference
from visdet.ops.deform_conv2d import deform_conv2d_reference
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.nms import kept_by_plain_torch
from visdet.ops.roi_align import roi_align_reference
from visdet.ops.roi_pool import roi_pool_reference
from visdet.ops.soft_nms import soft_nms_reference

from ..case import Call, Case, Peer, Work

__all__ = ["CASES"]

FLOAT32 = (torch.float32,)
ALL = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
Function = Callable[..., Tensor]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _boxes(N: int, generator: torch.Generator, height: int = 800, width: int = 1216) -> Tensor:
    """Return N boxes (x1, y1, x2, y2) of 16 to 400 pixels in an image."""
    corner = torch.rand(N, 2, generator=generator) * torch.tensor([width - 16.0, height - 16.0])
    extent = 16 * 25 ** torch.rand(N, 2, generator=generator)
    return torch.cat([corner, corner + extent], 1)


def _regions(N: int, B: int, generator: torch.Generator) -> Tensor:
    images = torch.randint(0, B, (N, 1), generator=generator)
    return torch.cat([images.float(), _boxes(N, generator)], 1)


def _random(dtype: torch.dtype, device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = _seeded()
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _scored(dtype: torch.dtype, device: torch.device, *, N: int, classes: int) -> tuple[Any, ...]:
    generator = _seeded()
    boxes = _boxes(N, generator).repeat(classes, 1)
    boxes = boxes + torch.rand(boxes.shape, generator=generator) * 4
    scores = torch.rand(N * classes, generator=generator)
    idxs = torch.arange(classes).repeat_interleave(N)
    return boxes.to(device, dtype), scores.to(device, dtype), idxs.to(device)


def _rotated(dtype: torch.dtype, device: torch.device, *, N: int, M: int = 0) -> tuple[Any, ...]:
    """Return N rotated boxes of 16 to 400 pixels, and their scores or M more."""
    generator = _seeded()
    corners = _boxes(N + M, generator)
    center, sides = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
    angle = torch.rand(N + M, 1, generator=generator) * 3.14159
    boxes = torch.cat([center, sides, angle], 1).to(device, dtype)
    return (boxes[:N], boxes[N:] if M else torch.rand(N, generator=generator).to(device, dtype))


def _pooled(dtype: torch.dtype, device: torch.device, *, N: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    return *_random(dtype, device, shape), _regions(N, shape[0], _seeded()).to(device)


def _convolved(
    dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], modulated: bool
) -> tuple[Any, ...]:
    B, C, H, W = shape
    x, offset, weight = _random(dtype, device, shape, (B, 18, H, W), (C, C, 3, 3))
    weight = weight / (3 * C**0.5)
    mask = torch.rand(B, 9, H, W, generator=_seeded()).to(device, dtype)
    return (x, offset, mask, weight) if modulated else (x, offset, weight)


def _classified(dtype: torch.dtype, device: torch.device, *, N: int, C: int) -> tuple[Any, ...]:
    """Return logits about as low as those of a trained head, and targets of which one in fifty is a class."""
    generator = _seeded()
    logits = torch.randn(N, C, generator=generator) * 2 - 4
    is_object = torch.rand(N, generator=generator) < 0.02
    target = torch.where(is_object, torch.randint(0, C, (N,), generator=generator), C)
    return logits.to(device, dtype), target.to(device)


def _upsampled(
    dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], K: int
) -> tuple[Any, ...]:
    B, _, H, W = shape
    features, masks = _random(torch.float32, device, shape, (B, K * K, 2 * H, 2 * W))
    return features.to(dtype), masks.softmax(1).to(dtype)


def _masked(
    dtype: torch.dtype, device: torch.device, *, shape: tuple[int, ...], share: float
) -> tuple[Any, ...]:
    features, weight = _random(dtype, device, shape, (shape[1], shape[1], 3, 3))
    mask = torch.rand(shape[0], *shape[2:], generator=_seeded()) < share
    return features, mask.to(device, dtype), weight / (3 * shape[1] ** 0.5)


def _with_kept(keep: Function) -> Function:
    """Return a function that gives the first result of visdet's nms by one that returns only indices."""

    def detections(boxes: Tensor, scores: Tensor, idxs: Tensor) -> Tensor:
        kept = keep(boxes, scores, idxs)
        return torch.cat([boxes[kept], scores[kept, None]], 1)

    return detections


def _plain_nms(threshold: float, boxes: Tensor, scores: Tensor, idxs: Tensor) -> Tensor:
    """Return the kept indices, computed for each class separately by visdet's plain torch."""
    kept = []
    for members in [(idxs == c).nonzero().squeeze(1) for c in idxs.unique()]:
        kept.append(members[kept_by_plain_torch(boxes[members], scores[members], threshold)])
    merged = torch.cat(kept)
    return merged[scores[merged].sort(descending=True, stable=True).indices]


def _plain_nms_rotated(boxes: Tensor, scores: Tensor) -> Tensor:
    """Return the boxes that visdet's plain torch keeps, with their scores."""
    kept = kept_by_plain_torch(boxes, scores, 0.1)
    return torch.cat([boxes[kept], scores[kept, None]], 1)


def _corner_pool_by_doubling(x: Tensor) -> Tensor:
    """Return ``corner_pool(x, "left")``, computed by log2(W) maxima over steps of doubling length."""
    step = 1
    while step < x.shape[3]:
        x = torch.cat([torch.maximum(x[..., :-step], x[..., step:]), x[..., -step:]], 3)
        step *= 2
    return x


def _torchvision(make: Callable[[Any], Function], differentiable: tuple[int, ...]) -> Peer:
    """Return the peer whose function ``make`` selects from torchvision.ops."""

    def load() -> Callable[..., Call]:
        import torchvision

        function = make(torchvision.ops)
        return lambda *arguments: Call(function, arguments, differentiable)

    return Peer("torchvision", load)


def _mmcv(make: Callable[[Any], Function], differentiable: tuple[int, ...]) -> Peer:
    """Return the peer whose function ``make`` selects from mmcv.ops. An mmcv with visdet's operators is not a peer."""

    def load() -> Callable[..., Call]:
        import mmcv._ext
        import mmcv.ops

        if mmcv._ext.__name__.startswith("visdet"):
            raise ImportError("mmcv has no operators of its own")
        function = make(mmcv.ops)
        return lambda *arguments: Call(function, arguments, differentiable)

    return Peer("mmcv", load)


def _work(case: tuple[Any, ...], outputs: int, flops: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the bytes and operations of forward and backward.

    The forward reads each input and writes the output once. The backward also writes as much as the inputs.
    """
    make, sizes = case
    tensors = [t for t in make(dtype, torch.device("cpu"), **sizes) if isinstance(t, Tensor)]
    inputs = sum(t.numel() * t.element_size() for t in tensors)
    output = outputs * dtype.itemsize
    return {
        "forward": Work(moved=inputs + output, flops=flops),
        "backward": Work(moved=2 * inputs + output, flops=2 * flops),
    }


def _case(
    op: str,
    name: str,
    make: Callable[..., tuple[Any, ...]],
    sizes: dict[str, Any],
    function: Function,
    reference: Function,
    *,
    differentiable: dict[str, int],
    outputs: int,
    flops: int,
    torchvision: Callable[[Any], Function] | None = None,
    mmcv: Callable[[Any], Function] | None = None,
    is_contestant: bool = True,
    dtypes: tuple[torch.dtype, ...] = FLOAT32,
    **changes: Any,
) -> Case:
    """Return a case. ``is_contestant`` is False if the reference is a loop over boxes or regions, and not timed."""
    positions = tuple(differentiable.values())
    plain = Peer("torch", lambda: lambda *arguments: Call(reference, arguments, positions))
    peers = [plain] if is_contestant else []
    peers += [_torchvision(torchvision, positions)] if torchvision else []
    peers += [_mmcv(mmcv, positions)] if mmcv else []
    return Case(
        op=op,
        name=name,
        sizes=" ".join(f"{key}{value}" for key, value in sizes.items()),
        make=partial(make, **sizes),
        function=function,
        reference=reference,
        differentiable=differentiable,
        work=partial(_work, (make, sizes), outputs, flops),
        tolerance=lambda dtype: dict.fromkeys(["output", *differentiable], TOLERANCE[dtype]),
        peers=peers,
        dtypes=dtypes,
        **changes,
    )


def _soft_reference(boxes: Tensor, scores: Tensor) -> Tensor:
    return soft_nms_reference(boxes.cpu(), scores.cpu(), 0.3, 0.5, 1e-3, 1, 0)[0].to(boxes)


def _batched(kind: str, boxes: Tensor, scores: Tensor, idxs: Tensor, **settings: Any) -> Tensor:
    return ops.batched_nms(boxes, scores, idxs, dict(type=kind, **settings))[0]


def _no_weight(logits: Tensor) -> Tensor:
    return logits.new_empty(0, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def _one_hot(target: Tensor, C: int, dtype: torch.dtype) -> Tensor:
    return F.one_hot(target, C + 1)[:, :C].to(dtype)


def _softmax_focal_by_steps(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(1)[torch.arange(len(target), device=target.device), target]
    return -0.25 * (1 - p) ** 2 * p.log()


FPN = (2, 256, 100, 152)
STAGE = (2, 256, 50, 76)
ROWS = 12000
CASES = [
    _case(
        "nms",
        "nms-rpn",
        _scored,
        dict(N=4500, classes=1),
        lambda boxes, scores, idxs: ops.nms(boxes, scores, 0.7)[0],
        _with_kept(partial(_plain_nms, 0.7)),
        differentiable={},
        is_contestant=False,
        outputs=0,
        flops=4500 * 4500 * 8,
        torchvision=lambda tv: _with_kept(lambda boxes, scores, _: tv.nms(boxes, scores, 0.7)),
        mmcv=lambda mm: lambda boxes, scores, _: mm.nms(boxes, scores, 0.7)[0],
    ),
    _case(
        "batched_nms",
        "batched-nms-80x1000",
        _scored,
        dict(N=1000, classes=80),
        partial(_batched, "nms", iou_threshold=0.5),
        _with_kept(partial(_plain_nms, 0.5)),
        differentiable={},
        is_contestant=False,
        outputs=0,
        flops=80 * 1000 * 1000 * 8,
        torchvision=lambda tv: _with_kept(
            lambda boxes, scores, idxs: tv.batched_nms(boxes, scores, idxs, 0.5)
        ),
        mmcv=lambda mm: lambda *given: mm.batched_nms(*given, dict(type="nms", iou_threshold=0.5))[0],
    ),
    _case(
        "nms_rotated",
        "nms-rotated-2000",
        _rotated,
        dict(N=2000),
        lambda boxes, scores: ops.nms_rotated(boxes, scores, 0.1)[0],
        _plain_nms_rotated,
        differentiable={},
        is_contestant=False,
        outputs=0,
        flops=2000 * 2000 * 100,
        mmcv=lambda mm: lambda boxes, scores: mm.nms_rotated(boxes, scores, 0.1)[0],
    ),
    _case(
        "box_iou_rotated",
        "box-iou-rotated-100x21824",
        _rotated,
        dict(N=100, M=21824),
        lambda boxes1, boxes2: ops.box_iou_rotated(boxes1, boxes2),
        lambda boxes1, boxes2: box_iou_rotated_reference(boxes1, boxes2, 0, False),
        differentiable={},
        outputs=100 * 21824,
        flops=100 * 21824 * 200,
        mmcv=lambda mm: lambda boxes1, boxes2: mm.box_iou_rotated(boxes1, boxes2),
    ),
    _case(
        "soft_nms",
        "soft-nms-1000",
        _scored,
        dict(N=1000, classes=1),
        lambda boxes, scores, idxs: ops.soft_nms(boxes, scores, 0.3)[0],
        lambda boxes, scores, idxs: _soft_reference(boxes, scores),
        differentiable={},
        outputs=0,
        flops=1000 * 1000 * 8,
        mmcv=lambda mm: lambda boxes, scores, _: mm.soft_nms(boxes, scores, 0.3)[0],
    ),
    _case(
        "roi_align",
        "roi-align-fpn",
        _pooled,
        dict(N=512, shape=FPN),
        lambda x, rois: ops.roi_align(x, rois, 7, 1 / 8),
        lambda x, rois: roi_align_reference(x, rois, 7, 1 / 8),
        differentiable={"input": 0},
        outputs=512 * 256 * 49,
        flops=512 * 256 * 49 * 4 * 10,
        torchvision=lambda tv: lambda x, rois: tv.roi_align(x, rois.to(x.dtype), 7, 1 / 8, 0, True),
        mmcv=lambda mm: lambda x, rois: mm.roi_align(x, rois.to(x.dtype), 7, 1 / 8),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    _case(
        "roi_pool",
        "roi-pool-fpn",
        _pooled,
        dict(N=512, shape=FPN),
        lambda x, rois: ops.roi_pool(x, rois, 7, 1 / 8),
        lambda x, rois: roi_pool_reference(x, rois, 7, 7, 1 / 8)[0],
        differentiable={"input": 0},
        is_contestant=False,
        outputs=512 * 256 * 49 * 2,
        flops=512 * 256 * 49 * 9,
        # torchvision's bins differ, so that only its time can be compared.
        torchvision=lambda tv: lambda x, rois: tv.roi_pool(x, rois.to(x.dtype), 7, 1 / 8),
        mmcv=lambda mm: lambda x, rois: mm.roi_pool(x, rois.to(x.dtype), 7, 1 / 8),
        dtypes=ALL,
    ),
    _case(
        "deform_conv2d",
        "deform-conv-r50",
        _convolved,
        dict(shape=STAGE, modulated=False),
        lambda x, offset, weight: ops.deform_conv2d(x, offset, weight, 1, 1),
        lambda x, offset, weight: deform_conv2d_reference(
            x, offset, None, weight, None, (1, 1), (1, 1), (1, 1), 1
        ),
        differentiable={"input": 0, "offset": 1, "weight": 2},
        outputs=2 * 256 * 50 * 76,
        flops=2 * 2 * 256 * 256 * 9 * 50 * 76,
        torchvision=lambda tv: lambda x, offset, weight: tv.deform_conv2d(x, offset, weight, padding=1),
        mmcv=lambda mm: lambda x, offset, weight: mm.deform_conv2d(x, offset, weight, 1, 1),
        dtypes=ALL,
    ),
    _case(
        "modulated_deform_conv2d",
        "modulated-deform-conv-r50",
        _convolved,
        dict(shape=STAGE, modulated=True),
        lambda x, offset, mask, weight: ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1),
        lambda x, offset, mask, weight: deform_conv2d_reference(
            x, offset, mask, weight, None, (1, 1), (1, 1), (1, 1), 1
        ),
        differentiable={"input": 0, "offset": 1, "mask": 2, "weight": 3},
        outputs=2 * 256 * 50 * 76,
        flops=2 * 2 * 256 * 256 * 9 * 50 * 76,
        torchvision=lambda tv: (
            lambda x, offset, mask, weight: tv.deform_conv2d(x, offset, weight, padding=1, mask=mask)
        ),
        mmcv=lambda mm: (
            lambda x, offset, mask, weight: mm.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1)
        ),
        dtypes=ALL,
    ),
    *(
        _case(
            "sigmoid_focal_loss",
            f"sigmoid-focal-{N}x80",
            _classified,
            dict(N=N, C=80),
            lambda x, target: ops.sigmoid_focal_loss(x, target, reduction="none"),
            lambda x, target: sigmoid_focal_loss_reference(x, target, _no_weight(x), 2.0, 0.25),
            differentiable={"input": 0},
            outputs=N * 80,
            flops=N * 80 * 40,
            torchvision=lambda tv: (
                lambda x, target: tv.sigmoid_focal_loss(x, _one_hot(target, x.shape[1], x.dtype))
            ),
            mmcv=lambda mm: lambda x, target: mm.sigmoid_focal_loss(x, target, 2.0, 0.25, None, "none"),
            dtypes=ALL,
            heavy=N > ROWS,
        )
        for N in (ROWS, 200_000)
    ),
    _case(
        "softmax_focal_loss",
        f"softmax-focal-{ROWS}x81",
        _classified,
        dict(N=ROWS, C=81),
        lambda x, target: ops.softmax_focal_loss(x, target.clamp(max=80), reduction="none"),
        lambda x, target: _softmax_focal_by_steps(x, target.clamp(max=80)),
        differentiable={"input": 0},
        outputs=ROWS,
        flops=ROWS * 81 * 10,
        mmcv=lambda mm: (
            lambda x, target: mm.softmax_focal_loss(x, target.clamp(max=80), 2.0, 0.25, None, "none")
        ),
    ),
    _case(
        "carafe",
        "carafe-fpn",
        _upsampled,
        dict(shape=(1, *STAGE[1:]), K=5),
        lambda x, masks: ops.carafe(x, masks, 5, 1, 2),
        lambda x, masks: carafe_reference(x, masks, 5, 1, 2),
        differentiable={"features": 0, "masks": 1},
        outputs=256 * 100 * 152,
        flops=2 * 25 * 256 * 100 * 152,
        mmcv=lambda mm: lambda x, masks: mm.carafe(x, masks, 5, 1, 2),
        dtypes=ALL,
    ),
    _case(
        "masked_conv2d",
        "masked-conv-10-percent",
        _masked,
        dict(shape=(1, *FPN[1:]), share=0.1),
        lambda x, mask, weight: ops.masked_conv2d(x, mask, weight, None, 1),
        lambda x, mask, weight: F.conv2d(x, weight, padding=1) * mask[:, None],
        differentiable={"input": 0, "weight": 2},
        outputs=256 * 100 * 152,
        flops=2 * 9 * 256 * 256 * 1520,
    ),
    _case(
        "corner_pool",
        "corner-pool-left",
        lambda dtype, device, shape: tuple(_random(dtype, device, shape)),
        dict(shape=(2, 128, 128, 128)),
        lambda x: ops.corner_pool(x, "left"),
        _corner_pool_by_doubling,
        differentiable={"input": 0},
        outputs=2 * 128**3,
        flops=2 * 128**3,
        mmcv=lambda mm: mm.CornerPool("left"),
    ),
]

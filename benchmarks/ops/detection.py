"""Cases of the detection operators with mmdet's usual sizes, compared with torchvision and plain torch."""

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

from .. import detection_inputs as inputs
from ..case import Call, Case, Peer, Work, peer_of

FLOAT32 = (torch.float32,)
ALL = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
Function = Callable[..., Tensor]


def _with_kept(keep: Function) -> Function:
    """Return a function that gives the first result of visdet's nms by one that returns only indices."""

    def detections(boxes: Tensor, scores: Tensor, idxs: Tensor) -> Tensor:
        kept = keep(boxes, scores, idxs)
        return torch.cat([boxes[kept], scores[kept, None]], 1)

    return detections


def _plain_nms(threshold: float, boxes: Tensor, scores: Tensor, idxs: Tensor) -> Tensor:
    """Return the kept indices of each class, by visdet's plain torch."""
    return kept_by_plain_torch(boxes, scores, idxs, None, threshold)


def _plain_nms_rotated(boxes: Tensor, scores: Tensor) -> Tensor:
    """Return the boxes that visdet's plain torch keeps, with their scores."""
    kept = kept_by_plain_torch(boxes, scores, None, None, 0.1)
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


def _work(case: tuple[Any, ...], outputs: int, dtype: torch.dtype) -> dict[str, Work]:
    """Return the bytes of forward and backward.

    The forward reads each input and writes the output once. The backward also writes as much as the inputs.
    """
    make, sizes = case
    tensors = [t for t in make(dtype, torch.device("cpu"), **sizes) if isinstance(t, Tensor)]
    given = sum(t.numel() * t.element_size() for t in tensors)
    output = outputs * dtype.itemsize
    return {
        "forward": Work(moved=given + output),
        "backward": Work(moved=2 * given + output),
    }


def _case(
    op: str,
    name: str,
    make: Callable[..., tuple[Any, ...]],
    sizes: dict[str, Any],
    function: Function,
    reference: Function,
    *,
    differentiable: dict[str, int] | None = None,
    outputs: int = 0,
    torchvision: Callable[[Any], Function] | None = None,
    is_contestant: bool = True,
    dtypes: tuple[torch.dtype, ...] = FLOAT32,
    **changes: Any,
) -> Case:
    """Return a case. ``is_contestant`` is False if the reference is a loop over boxes or regions, and not timed."""
    differentiable = differentiable or {}
    positions = tuple(differentiable.values())
    plain = peer_of("torch", reference, positions)
    peers = [plain] if is_contestant else []
    peers += [_torchvision(torchvision, positions)] if torchvision else []
    return Case(
        op=op,
        name=name,
        sizes=" ".join(f"{key}{value}" for key, value in sizes.items()),
        make=partial(make, **sizes),
        function=function,
        reference=reference,
        differentiable=differentiable,
        work=partial(_work, (make, sizes), outputs),
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


FPN = (2, 256, 100, 152)
STAGE = (2, 256, 50, 76)
ROWS = 12000
CASES = [
    _case(
        "nms",
        "nms-rpn",
        inputs.scored,
        dict(N=4500, classes=1),
        lambda boxes, scores, idxs: ops.nms(boxes, scores, 0.7)[0],
        _with_kept(partial(_plain_nms, 0.7)),
        is_contestant=False,
        torchvision=lambda tv: _with_kept(lambda boxes, scores, _: tv.nms(boxes, scores, 0.7)),
    ),
    _case(
        "batched_nms",
        "batched-nms-80x1000",
        inputs.scored,
        dict(N=1000, classes=80),
        partial(_batched, "nms", iou_threshold=0.5),
        _with_kept(partial(_plain_nms, 0.5)),
        is_contestant=False,
        torchvision=lambda tv: _with_kept(
            lambda boxes, scores, idxs: tv.batched_nms(boxes, scores, idxs, 0.5)
        ),
    ),
    _case(
        "nms_rotated",
        "nms-rotated-2000",
        inputs.rotated,
        dict(N=2000),
        lambda boxes, scores: ops.nms_rotated(boxes, scores, 0.1)[0],
        _plain_nms_rotated,
        is_contestant=False,
    ),
    _case(
        "box_iou_rotated",
        "box-iou-rotated-100x21824",
        inputs.rotated,
        dict(N=100, M=21824),
        lambda boxes1, boxes2: ops.box_iou_rotated(boxes1, boxes2),
        lambda boxes1, boxes2: box_iou_rotated_reference(boxes1, boxes2, 0, False),
        outputs=100 * 21824,
    ),
    _case(
        "soft_nms",
        "soft-nms-1000",
        inputs.scored,
        dict(N=1000, classes=1),
        lambda boxes, scores, idxs: ops.soft_nms(boxes, scores, 0.3)[0],
        lambda boxes, scores, idxs: _soft_reference(boxes, scores),
    ),
    _case(
        "roi_align",
        "roi-align-fpn",
        inputs.pooled,
        dict(N=512, shape=FPN),
        lambda x, rois: ops.roi_align(x, rois, 7, 1 / 8),
        lambda x, rois: roi_align_reference(x, rois, 7, 1 / 8),
        differentiable={"input": 0},
        outputs=512 * 256 * 49,
        torchvision=lambda tv: lambda x, rois: tv.roi_align(x, rois.to(x.dtype), 7, 1 / 8, 0, True),
        dtypes=(torch.float32, torch.bfloat16),
    ),
    _case(
        "roi_pool",
        "roi-pool-fpn",
        inputs.pooled,
        dict(N=512, shape=FPN),
        lambda x, rois: ops.roi_pool(x, rois, 7, 1 / 8),
        lambda x, rois: roi_pool_reference(x, rois, 7, 7, 1 / 8)[0],
        differentiable={"input": 0},
        is_contestant=False,
        outputs=512 * 256 * 49 * 2,
        # torchvision's bins differ, so that only its time can be compared.
        torchvision=lambda tv: lambda x, rois: tv.roi_pool(x, rois.to(x.dtype), 7, 1 / 8),
        dtypes=ALL,
    ),
    _case(
        "deform_conv2d",
        "deform-conv-r50",
        inputs.convolved,
        dict(shape=STAGE, modulated=False),
        lambda x, offset, weight: ops.deform_conv2d(x, offset, weight, 1, 1),
        lambda x, offset, weight: deform_conv2d_reference(x, offset, None, weight, (1, 1), (1, 1), (1, 1), 1),
        differentiable={"input": 0, "offset": 1, "weight": 2},
        outputs=2 * 256 * 50 * 76,
        torchvision=lambda tv: lambda x, offset, weight: tv.deform_conv2d(x, offset, weight, padding=1),
        dtypes=ALL,
    ),
    _case(
        "modulated_deform_conv2d",
        "modulated-deform-conv-r50",
        inputs.convolved,
        dict(shape=STAGE, modulated=True),
        lambda x, offset, mask, weight: ops.modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1),
        lambda x, offset, mask, weight: deform_conv2d_reference(
            x, offset, mask, weight, (1, 1), (1, 1), (1, 1), 1
        ),
        differentiable={"input": 0, "offset": 1, "mask": 2, "weight": 3},
        outputs=2 * 256 * 50 * 76,
        torchvision=lambda tv: (
            lambda x, offset, mask, weight: tv.deform_conv2d(x, offset, weight, padding=1, mask=mask)
        ),
        dtypes=ALL,
    ),
    *(
        _case(
            "sigmoid_focal_loss",
            f"sigmoid-focal-{N}x80",
            inputs.classified,
            dict(N=N, C=80),
            lambda x, target: ops.sigmoid_focal_loss(x, target, reduction="none"),
            lambda x, target: sigmoid_focal_loss_reference(x, target, _no_weight(x), 2.0, 0.25),
            differentiable={"input": 0},
            outputs=N * 80,
            torchvision=lambda tv: (
                lambda x, target: tv.sigmoid_focal_loss(x, _one_hot(target, x.shape[1], x.dtype))
            ),
            dtypes=ALL,
            heavy=N > ROWS,
        )
        for N in (ROWS, 200_000)
    ),
    _case(
        "carafe",
        "carafe-fpn",
        inputs.upsampled,
        dict(shape=(1, *STAGE[1:]), K=5),
        lambda x, masks: ops.carafe(x, masks, 5, 1, 2),
        lambda x, masks: carafe_reference(x, masks, 5, 1, 2),
        differentiable={"features": 0, "masks": 1},
        outputs=256 * 100 * 152,
        dtypes=ALL,
    ),
    _case(
        "masked_conv2d",
        "masked-conv-10-percent",
        inputs.masked,
        dict(shape=(1, *FPN[1:]), share=0.1),
        lambda x, mask, weight: ops.masked_conv2d(x, mask, weight, None, 1),
        lambda x, mask, weight: F.conv2d(x, weight, padding=1) * mask[:, None],
        differentiable={"input": 0, "weight": 2},
        outputs=256 * 100 * 152,
    ),
    _case(
        "corner_pool",
        "corner-pool-left",
        lambda dtype, device, shape: tuple(inputs.random(dtype, device, shape)),
        dict(shape=(2, 128, 128, 128)),
        lambda x: ops.corner_pool(x, "left"),
        _corner_pool_by_doubling,
        differentiable={"input": 0},
        outputs=2 * 128**3,
    ),
]

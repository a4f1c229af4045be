"""The instance bank, which holds learned anchors and keeps the instances of a sequence from frame to frame."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visdet.errors import InvalidInputError, InvalidTypeError
from visdet.registry import MODELS
from visdet.structures.tensor_tree import ON_HOST

from .anchor_files import ModuleWithAnchors
from .frame_clock import DeviceStep, FrameClock
from .temporal_state import temporal_value

__all__ = ["InstanceBank", "InstanceBankState", "select_rows", "topk"]


def topk(confidence: Tensor, k: int, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the k largest confidences [B, k] of each sample, and those rows of each input, [B, k, C].

    Args:
        confidence: [B, Q].
        inputs: [B, Q, C], or [B, Q], which counts as C = 1.
    """
    confidence, index = confidence.topk(k, dim=1)
    return confidence, [select_rows(x if x.dim() == 3 else x[..., None], index) for x in inputs]


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return rows ``index`` [B, k] of x [B, Q, C], as [B, k, C]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


@temporal_value
@dataclass(frozen=True)
class InstanceBankState:
    """What a bank keeps from one frame for the next. The value is immutable, so that it can be kept and put back.

    Attributes:
        cached_feature: [B, K, C], the features of the K most confident instances, the best first. It is None before the
            first frame.
        cached_anchor: [B, K, D], the anchors of these instances. Between ``get`` and ``cache`` they are moved to the
            place and time of the current frame.
        confidence: [B, K], the confidences of the cached instances, which decay from frame to frame.
        temp_confidence: [B, Q], the confidences of all instances of the frame that was cached last.
        instance_id: [B, Q] int64, the ids of the cached instances, followed by -1.
        prev_id: [] int64, the next id.
        mask: [B] bool, whether the cached instances of a sample belong to the sequence of the current frame.
        clock: the time and pose of the frame that was cached last.
        history: the same as ``mask``, on the host.
        frame: between ``enter`` and ``cache``, the clock of the current frame.
        step: between ``enter`` and ``cache``, what lies between the cached frame and the current one. It is None if
            nothing is cached.
    """

    cached_feature: Tensor | None = None
    cached_anchor: Tensor | None = None
    confidence: Tensor | None = None
    temp_confidence: Tensor | None = None
    instance_id: Tensor | None = None
    prev_id: Tensor | int = 0
    mask: Tensor | None = None
    clock: FrameClock | None = field(default=None, metadata=ON_HOST)
    history: tuple[bool, ...] = ()
    frame: FrameClock | None = field(default=None, metadata=ON_HOST)
    step: DeviceStep | None = None


@MODELS.register_module()
class InstanceBank(ModuleWithAnchors):
    """Learned anchors with their features, and the temporal state of a batch of sequences.

    The calls of a frame are ``enter``, ``get``, the single-frame decoder, ``update``, the temporal decoder, ``cache``
    and ``get_instance_id``. ``enter`` is the work of the host, and ``get`` calls it if it is given ``img_metas``. The
    value ``state`` is everything that the bank remembers. It can be read, kept and put back.

    The history of a sample is dropped if more than ``max_time_interval`` seconds have passed or its scene has changed.
    The whole state is dropped if the batch size or the device has changed.

    Args:
        num_anchor: number of anchors that are used. If ``anchor`` has fewer, all of them are.
        embed_dims: width of the features.
        anchor: [N, D] or [N, points, 2], numbers or the path of a ``.npy`` file. While a file is missing, the anchors
            are zeros, which a checkpoint replaces. Training with such anchors is an error.
        anchor_handler: module or config of a module with ``anchor_projection``, which moves anchors in space and time.
        num_temp_instances: K, the number of instances that are kept for the next frame. With 0 or less none are.
        default_time_interval: the time in seconds that counts if there is no previous frame.
        confidence_decay: the factor by which a cached confidence decays in each frame.
        anchor_grad, feat_grad: whether anchors and their features learn.
        max_time_interval: the longest time in seconds between two frames of a sequence.

    Source: names and defaults are SparseDrive's. Differences: the state is one value, nothing waits for the device, and
    ids are only kept together with instances.
    """

    def __init__(
        self,
        num_anchor: int,
        embed_dims: int,
        anchor: str | Sequence[Any] | np.ndarray | Tensor,
        anchor_handler: dict[str, Any] | nn.Module | None = None,
        num_temp_instances: int = 0,
        default_time_interval: float = 0.5,
        confidence_decay: float = 0.6,
        anchor_grad: bool = True,
        feat_grad: bool = True,
        max_time_interval: float = 2,
    ) -> None:
        super().__init__()
        if isinstance(anchor_handler, dict):
            anchor_handler = MODELS.build(anchor_handler)
        if anchor_handler is not None and not hasattr(anchor_handler, "anchor_projection"):
            raise InvalidTypeError(
                f"InstanceBank: anchor_handler must have anchor_projection, got {type(anchor_handler).__name__}"
            )
        self.embed_dims = embed_dims
        self.num_temp_instances = num_temp_instances
        self.default_time_interval = default_time_interval
        self.confidence_decay = confidence_decay
        self.max_time_interval = max_time_interval
        self.anchor_handler: Any = anchor_handler
        num_sample = getattr(anchor_handler, "num_sample", None)
        anchors = self.read_anchors(
            "anchor", anchor, (num_anchor, 11 if num_sample is None else 2 * num_sample)
        )
        anchors = anchors[:num_anchor].flatten(1)  # A polyline becomes one row of numbers.
        self.num_anchor = len(anchors)
        self.anchor_init = anchors
        if num_temp_instances > self.num_anchor:
            raise InvalidInputError(
                f"InstanceBank: num_temp_instances must be at most the number of anchors {self.num_anchor}, "
                f"got {num_temp_instances}"
            )
        self.anchor = nn.Parameter(anchors.clone(), requires_grad=anchor_grad)
        self.instance_feature = nn.Parameter(
            torch.zeros(self.num_anchor, embed_dims), requires_grad=feat_grad
        )
        self.state = InstanceBankState()

    def init_weights(self) -> None:
        """Set the anchors to their initial values, and initialise the features by Xavier if they learn."""
        with torch.no_grad():
            self.anchor.copy_(self.anchor_init)
        if self.instance_feature.requires_grad:
            nn.init.xavier_uniform_(self.instance_feature)

    def reset(self) -> None:
        """Forget everything, including the ids that have been given."""
        self.state = InstanceBankState()

    def enter(self, batch_size: int, clock_of_frame: Callable[[], FrameClock] | None) -> None:
        """Take in when and where a frame was taken. This is all work on the host that a frame needs.

        Args:
            batch_size: B.
            clock_of_frame: returns the clock of the frame. It is called if instances are kept. None is allowed for a
                first frame only.
        """
        state, anchor = self.state, self.anchor
        cached, clock = state.cached_anchor, state.clock
        if cached is None or clock is None or len(cached) != batch_size or cached.device != anchor.device:
            if clock_of_frame is None or self.num_temp_instances <= 0:
                self.reset()
            else:
                self.state = InstanceBankState(frame=clock_of_frame())
            return
        frame = FrameClock.of(None) if clock_of_frame is None else clock_of_frame()
        step = frame.since(clock)
        history = step.is_continued(self.max_time_interval)
        on_device = DeviceStep.of(step, history, self.default_time_interval, anchor.device, anchor.dtype)
        self.state = replace(
            state, mask=on_device.is_continued, history=tuple(history), frame=frame, step=on_device
        )

    def get(
        self, batch_size: int, metas: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return what a frame starts with, and move the cached anchors to the place and time of the frame.

        Args:
            batch_size: B.
            metas: ``timestamp`` [B] (seconds) and ``img_metas``; see ``FrameClock``. The bank then enters the frame.
                Without ``img_metas`` it must have entered the frame before.

        Returns:
            features [B, N, C] and anchors [B, N, D] of the learned instances, cached features [B, K, C] and anchors
            [B, K, D] or None for both, and the seconds since the previous frame, [B].
        """
        self.require_anchors()
        if metas is None or "img_metas" in metas:
            self.enter(batch_size, None if metas is None else lambda: FrameClock.of(metas))
        feature = self.instance_feature.expand(batch_size, -1, -1)
        anchor = self.anchor.expand(batch_size, -1, -1)
        state, step = self.state, self.state.step
        cached = state.cached_anchor
        if step is None or cached is None:
            return feature, anchor, None, None, anchor.new_full((batch_size,), self.default_time_interval)
        cached = self.moved(cached)
        self.state = replace(state, cached_anchor=cached)
        return feature, anchor, state.cached_feature, cached, step.interval

    def moved(self, anchor: Tensor) -> Tensor:
        """Return anchors [B, n, D] of the previous frame at the place and time of the current one.

        Without a previous frame or an ``anchor_handler`` they are unchanged.
        """
        step = self.state.step
        if step is None or self.anchor_handler is None:
            return anchor
        return self.anchor_handler.anchor_projection(
            anchor, [step.previous_to_current], time_intervals=[-step.seconds]
        )[0]

    def update(self, instance_feature: Tensor, anchor: Tensor, confidence: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cached instances followed by the most confident others, as many as there are anchors.

        Samples without history stay unchanged, and so do all samples before the first cached frame.

        Args:
            instance_feature: [B, Q, C]. anchor: [B, Q, D]. confidence: [B, Q, classes], logits. Rows after the first
                ``num_anchor`` are denoising queries, which keep their places.
        """
        state = self.state
        if state.cached_feature is None or state.cached_anchor is None or state.mask is None:
            return instance_feature, anchor
        N, has_history = self.num_anchor, state.mask[:, None, None]
        _, (feature_kept, anchor_kept) = topk(
            confidence[:, :N].amax(-1), N - self.num_temp_instances, instance_feature, anchor
        )
        feature_of_history = torch.cat(
            [state.cached_feature.to(feature_kept.dtype), feature_kept, instance_feature[:, N:]], dim=1
        )
        anchor_of_history = torch.cat([state.cached_anchor, anchor_kept, anchor[:, N:]], dim=1)
        self.state = replace(
            state,
            confidence=None
            if state.confidence is None
            else torch.where(state.mask[:, None], state.confidence, 0.0),
            instance_id=None
            if state.instance_id is None
            else torch.where(state.mask[:, None], state.instance_id, -1),
        )
        return (
            torch.where(has_history, feature_of_history, instance_feature),
            torch.where(has_history, anchor_of_history, anchor),
        )

    def cache(
        self,
        instance_feature: Tensor,
        anchor: Tensor,
        confidence: Tensor,
        metas: dict[str, Any] | None = None,
        feature_maps: Any = None,
    ) -> None:
        """Keep the K most confident instances for the next frame.

        The confidence of an instance that was cached before is at least its decayed confidence.

        Args:
            instance_feature: [B, N, C]. anchor: [B, N, D]. confidence: [B, N, classes], logits.
            metas: as in ``get``. feature_maps: accepted for compatibility, without effect.
        """
        K = self.num_temp_instances
        if K <= 0:
            return
        confidence = confidence.detach().float().amax(-1).sigmoid()
        if self.state.confidence is not None:
            carried = torch.maximum(self.state.confidence * self.confidence_decay, confidence[:, :K])
            confidence = torch.cat([carried, confidence[:, K:]], dim=1)
        best, (feature, anchor) = topk(confidence, K, instance_feature.detach(), anchor.detach())
        self.state = replace(
            self.state,
            cached_feature=feature,
            cached_anchor=anchor,
            confidence=best,
            temp_confidence=confidence,
            clock=self.state.frame or FrameClock.of(metas),
            frame=None,
            step=None,
        )

    def get_instance_id(
        self, confidence: Tensor, anchor: Tensor | None = None, threshold: float | None = None
    ) -> Tensor:
        """Return the track ids [B, N] int64, where -1 stands for no track.

        Cached instances keep their ids. New ids come from one counter for all samples.

        Args:
            confidence: [B, N, classes], logits. anchor: accepted for compatibility, without effect.
            threshold: the least probability that starts a track. With None every instance starts one.
        """
        confidence = confidence.detach().float().amax(-1).sigmoid()
        ids = torch.full_like(confidence, -1, dtype=torch.int64)
        known = self.state.instance_id
        if known is not None and len(known) == len(ids):
            ids = known.clone()
        is_new = ids < 0
        if threshold is not None:
            is_new = is_new & (confidence >= threshold)
        count = is_new.flatten().cumsum(0)  # The device counts, so that the host need not wait.
        ids = torch.where(is_new, count.view_as(ids) - 1 + self.state.prev_id, ids)
        self.state = replace(self.state, prev_id=self.state.prev_id + count[-1])
        self._keep_ids(ids, confidence)
        return ids

    def _keep_ids(self, ids: Tensor, confidence: Tensor) -> None:
        K = self.num_temp_instances
        if K <= 0:
            return
        order = confidence if self.state.temp_confidence is None else self.state.temp_confidence
        _, (kept,) = topk(order, K, ids)
        others = kept.new_full((len(ids), self.num_anchor - K), -1)
        self.state = replace(self.state, instance_id=torch.cat([kept.squeeze(-1), others], dim=1))


def _of_state(name: str) -> property:
    return property(lambda bank: getattr(bank.state, name), doc=f"``state.{name}``")


for _name in (
    "cached_feature",
    "cached_anchor",
    "confidence",
    "temp_confidence",
    "instance_id",
    "prev_id",
    "mask",
):
    setattr(InstanceBank, _name, _of_state(_name))

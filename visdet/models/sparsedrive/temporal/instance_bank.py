"""The instance bank, which holds learned anchors and keeps the instances of a sequence from frame to frame."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visdet.errors import InvalidInputError
from visdet.registry import MODELS, built

from ...rows import rows_at
from ..anchor_files import ModuleWithAnchors
from .frame_clock import DeviceStep, FrameStep
from .plain_values import temporal_value


def topk(confidence: Tensor, k: int, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the k largest confidences [B, k] of each sample, and those rows of each input, [B, k, C].

    Args:
        confidence: [B, Q].
        inputs: [B, Q, C].
    """
    confidence, index = confidence.topk(k, dim=1)
    return confidence, [rows_at(index, x) for x in inputs]


def confidence_of(logits: Tensor) -> Tensor:
    """Return the probability [B, Q] of the best class of logits [B, Q, classes], in float32 and without gradients."""
    return logits.detach().float().amax(-1).sigmoid()


@temporal_value
@dataclass(frozen=True)
class InstanceBankState:
    """What a bank keeps from one frame for the next. The value is immutable.

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
        history: the same as ``mask``, on the host.
        step: from ``enter`` to ``update``, what lies between the cached frame and the current one. It is None if
            nothing is cached.
    """

    cached_feature: Tensor | None = None
    cached_anchor: Tensor | None = None
    confidence: Tensor | None = None
    temp_confidence: Tensor | None = None
    instance_id: Tensor | None = None
    prev_id: Tensor | int = 0
    mask: Tensor | None = None
    history: tuple[bool, ...] = ()
    step: DeviceStep | None = None


@MODELS.register_module()
class InstanceBank(ModuleWithAnchors):
    """Learned anchors with their features, and what becomes of the temporal state of a batch of sequences.

    The calls of a frame are ``enter``, ``get``, the single-frame decoder, ``update``, the temporal decoder, ``cache``
    and ``get_instance_id``. Each takes the state and returns it with its changes. The bank itself remembers nothing.
    ``enter`` is the work of the host, and everything else runs on the device.

    The history of a sample is dropped if more than ``max_time_interval`` seconds have passed or its scene has changed.
    The whole state except the next id is dropped if the batch size or the device has changed.

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

    Source: names and defaults are SparseDrive's. Differences: the state is an argument and a result, nothing waits for
    the device, and ids are only kept together with instances.
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
        anchor_handler = built(anchor_handler, MODELS)
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
        num_anchor = len(anchors)
        self.num_anchor = num_anchor
        self.anchor_init = anchors
        if num_temp_instances > num_anchor:
            raise InvalidInputError(
                f"InstanceBank: num_temp_instances must be at most the number of anchors {num_anchor}, "
                f"got {num_temp_instances}"
            )
        self.anchor = nn.Parameter(anchors.clone(), requires_grad=anchor_grad)
        self.instance_feature = nn.Parameter(torch.zeros(num_anchor, embed_dims), requires_grad=feat_grad)

    def init_weights(self) -> None:
        """Set the anchors to their initial values, and initialise the features by Xavier if they learn."""
        with torch.no_grad():
            self.anchor.copy_(self.anchor_init)
        feature = self.instance_feature
        if feature.requires_grad:
            nn.init.xavier_uniform_(feature)

    def enter(self, state: InstanceBankState, batch_size: int, step: FrameStep | None) -> InstanceBankState:
        """Return the state with which a frame starts. This is all work on the host that a frame needs.

        Args:
            state: what the frame before left. batch_size: B.
            step: what lies between the two frames. Without one, the bank starts anew.
        """
        cached = state.cached_anchor
        anchor = self.anchor
        device = anchor.device
        if step is None or cached is None or cached.shape[0] != batch_size or cached.device != device:
            issued = state.prev_id
            return InstanceBankState(prev_id=issued.to(device) if isinstance(issued, Tensor) else issued)
        on_device, history = step.entered(
            self.max_time_interval, self.default_time_interval, device, anchor.dtype
        )
        return replace(state, mask=on_device.is_continued, history=history, step=on_device)

    def get(
        self, state: InstanceBankState, batch_size: int
    ) -> tuple[Tensor, Tensor, Tensor, InstanceBankState]:
        """Return what a frame starts with, and the state with its anchors at the place and time of the frame.

        Args:
            state: the result of ``enter``. batch_size: B.

        Returns:
            features [B, N, C] and anchors [B, N, D] of the learned instances, the seconds since the previous frame,
            [B], and the state. Its ``cached_feature`` and ``cached_anchor`` are None in a first frame.
        """
        self.require_anchors()
        feature = self.instance_feature.expand(batch_size, -1, -1)
        anchor = self.anchor.expand(batch_size, -1, -1)
        cached: Any = state.cached_anchor
        step = state.step
        if step is None:
            return feature, anchor, anchor.new_full((batch_size,), self.default_time_interval), state
        return feature, anchor, step.interval, replace(state, cached_anchor=self.moved(cached, step))

    def moved(self, anchor: Tensor, step: DeviceStep) -> Tensor:
        """Return anchors [B, n, D] of the previous frame at the place and time of the current one.

        Without an ``anchor_handler`` they are unchanged.
        """
        handler = self.anchor_handler
        if handler is None:
            return anchor
        return handler.anchor_projection(anchor, step.previous_to_current, -step.seconds)

    def update(
        self, state: InstanceBankState, instance_feature: Tensor, anchor: Tensor, confidence: Tensor
    ) -> tuple[Tensor, Tensor, InstanceBankState]:
        """Return the cached instances followed by the most confident others, as many as there are anchors.

        Samples without history stay unchanged, and so do all samples before the first cached frame.

        Args:
            state: the result of ``get``.
            instance_feature: [B, Q, C]. anchor: [B, Q, D]. confidence: [B, Q, classes], logits. Rows after the first
                ``num_anchor`` are denoising queries, which keep their places.

        Returns:
            features, anchors, and the state.
        """
        cached_feature: Any = state.cached_feature
        cached_anchor: Any = state.cached_anchor
        known: Any = state.confidence
        mask = state.mask
        if mask is None:
            return instance_feature, anchor, state
        N = self.num_anchor
        kept = mask[:, None]
        has_history = kept[..., None]
        _, (feature_kept, anchor_kept) = topk(
            confidence[:, :N].amax(-1), N - self.num_temp_instances, instance_feature, anchor
        )
        feature_of_history = torch.cat(
            [cached_feature.to(feature_kept.dtype), feature_kept, instance_feature[:, N:]], dim=1
        )
        anchor_of_history = torch.cat([cached_anchor, anchor_kept, anchor[:, N:]], dim=1)
        ids = state.instance_id
        state = replace(
            state,
            step=None,
            confidence=torch.where(kept, known, 0.0),
            instance_id=None if ids is None else torch.where(kept, ids, -1),
        )
        return (
            torch.where(has_history, feature_of_history, instance_feature),
            torch.where(has_history, anchor_of_history, anchor),
            state,
        )

    def cache(
        self, state: InstanceBankState, instance_feature: Tensor, anchor: Tensor, confidence: Tensor
    ) -> InstanceBankState:
        """Return the state with the K most confident instances, which are kept for the next frame.

        The confidence of an instance that was cached before is at least its decayed confidence.

        Args:
            state: the result of ``update``, or of ``get`` if there is no temporal decoder.
            instance_feature: [B, N, C]. anchor: [B, N, D]. confidence: [B, N, classes], logits.
        """
        K = self.num_temp_instances
        if K <= 0:
            return state
        if state.step is not None:  # ``update`` has not put the cached instances among those of this frame.
            state = replace(state, confidence=None, instance_id=None)
        confidence = confidence_of(confidence)
        known = state.confidence
        if known is not None:
            decayed = torch.maximum(known * self.confidence_decay, confidence[:, :K])
            confidence = torch.cat([decayed, confidence[:, K:]], dim=1)
        best, (feature, anchor) = topk(confidence, K, instance_feature.detach(), anchor.detach())
        return replace(
            state,
            cached_feature=feature,
            cached_anchor=anchor,
            confidence=best,
            temp_confidence=confidence,
            step=None,
        )

    def get_instance_id(
        self, state: InstanceBankState, confidence: Tensor, threshold: float | None = None
    ) -> tuple[Tensor, InstanceBankState]:
        """Return the track ids [B, N] int64, where -1 stands for no track, and the state with them.

        Cached instances keep their ids. New ids come from one counter for all samples, which a new scene, another
        batch size or a missing frame does not set back. A bank that keeps no instances knows no tracks.

        Args:
            state: the result of ``cache``. confidence: [B, N, classes], logits.
            threshold: the least probability that starts a track. With None every instance starts one.
        """
        confidence = confidence_of(confidence)
        ids = torch.full_like(confidence, -1, dtype=torch.int64)
        K = self.num_temp_instances
        known = state.instance_id
        if K <= 0:
            return ids, state
        if known is not None:
            ids = known
        is_new = ids < 0
        if threshold is not None:
            is_new = is_new & (confidence >= threshold)
        count = is_new.flatten().cumsum(0)  # The device counts, so that the host need not wait.
        issued = state.prev_id
        ids = torch.where(is_new, count.view_as(ids) - 1 + issued, ids)
        order: Any = state.temp_confidence
        _, (kept,) = topk(order, K, ids.unsqueeze(-1))
        padded = F.pad(kept.squeeze(-1), (0, self.num_anchor - K), value=-1)
        return ids, replace(state, prev_id=issued + count[-1], instance_id=padded)

"""The instance queue, by which motion and planning remember instances and the ego of the last frames."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from mmengine.model import BaseModule
from torch import Tensor, nn

from visdet.checks.arguments import Positive
from visdet.registry import MODELS

from ...layers.precision import in_full_precision
from ...rows import rows_at
from ..boxes.box3d import VX, VY
from ..deformable_feature_aggregation import is_flat
from ..mlp import linear_relu_ln
from .frame_clock import DeviceStep
from .instance_bank import confidence_of
from .plain_values import temporal_value

_EGO_SIZE_M = (4.08, 1.73, 1.56)
_GROUND_M = -1.84
_NUM_WAVES = 4
_FORWARD_SPEED = 6  # column of the ego's status that holds the velocity along its x axis


@temporal_value
@dataclass(frozen=True)
class InstanceQueueState:
    """What a queue keeps from one frame to the next. The value is immutable.

    Attributes:
        features, anchors: [B, N, C] and [B, N, D] of each of the last frames, the oldest first. They have the order and
            the coordinates of the instances of the current frame.
        period: [B, N], the number of frames for which each instance has been tracked.
        instance_id: [B, N] int64, the track ids of the frame that was cached last.
        confidence: [B, N], the confidences of its instances.
        ego_features, ego_anchors: [B, 1, C] and [B, 1, D] of each of the last frames. ego_period: [B, 1].
        ego_status: [B, 1, 10], as it was predicted.
    """

    features: tuple[Tensor, ...] = ()
    anchors: tuple[Tensor, ...] = ()
    period: Any = None
    instance_id: Any = None
    confidence: Any = None
    ego_features: tuple[Tensor, ...] = ()
    ego_anchors: tuple[Tensor, ...] = ()
    ego_period: Any = None
    ego_status: Any = None


@MODELS.register_module()
class InstanceQueue(BaseModule):
    """Follows instances and the ego over the last frames. Instances are matched by track id.

    The calls of a frame are ``get`` and ``cache``. Each takes the state and returns it with its changes. The queue
    itself remembers nothing.

    Args:
        embed_dims: width C of the features.
        queue_length: number of frames that are kept, including the current one.
        tracking_threshold: an instance is only tracked if its confidence in the previous frame is above this. With 0
            every instance is.
        feature_map_scale: accepted for compatibility. The feature of the ego is a mean over the coarsest map of the
            front camera, which may have any size.
        ego_motion_from_poses: whether the ego's velocity is computed from the poses of this frame and the previous one,
            instead of being the one predicted in the previous frame. ``ego_motion_embed`` then embeds it.

    Source: names and defaults are SparseDrive's, which has no ``ego_motion_from_poses``. Differences: the state is an
    argument and a result; a sample whose history was dropped starts anew for agents and ego alike; images may have any
    size.
    """

    def __init__(
        self,
        embed_dims: int,
        queue_length: Positive,
        tracking_threshold: float = 0,
        feature_map_scale: Sequence[float] | None = None,
        ego_motion_from_poses: bool = False,
    ) -> None:
        super().__init__()
        self.queue_length = queue_length
        self.tracking_threshold = tracking_threshold

        def convolution(stride: int) -> list[nn.Module]:
            conv = nn.Conv2d(embed_dims, embed_dims, 3, stride=stride, padding=1, bias=False)
            return [conv, nn.BatchNorm2d(embed_dims)]

        self.ego_feature_encoder = nn.Sequential(
            *convolution(1), *convolution(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        sizes = [math.log(size) for size in _EGO_SIZE_M]
        ego_anchor = [0.0, 0.5, _GROUND_M + _EGO_SIZE_M[2] / 2, *sizes, 1.0, 0.0, 0.0, 0.0, 0.0]
        self.ego_anchor = nn.Parameter(torch.tensor([ego_anchor]), requires_grad=False)
        self.ego_motion_encoder: nn.Sequential | None = None
        if ego_motion_from_poses:
            waves = 2 * 2 * 2 * _NUM_WAVES  # velocity and change, two axes, sine and cosine
            self.ego_motion_encoder = nn.Sequential(*linear_relu_ln(embed_dims, 2, 1, waves))

    def get(
        self,
        state: InstanceQueueState | None,
        det_output: dict[str, Any],
        feature_maps: Sequence[Any],
        step: DeviceStep | None,
        anchor_handler: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, InstanceQueueState]:
        """Return what is remembered, with the instances of this frame.

        Args:
            state: what the frame before left, or None in a first frame.
            det_output: ``instance_feature`` [B, N, C], ``prediction``, ``instance_id`` [B, N].
            feature_maps: the feature pyramid, flattened or [B, V, C, H, W] of each level.
            step: what lies between the two frames. Without one, the queue starts anew.
            anchor_handler: module with ``anchor_projection``, which moves anchors in space and time.

        Returns:
            the feature [B, 1, C] and the anchor [B, 1, D] of the ego; features [B, N + 1, T, C] and anchors
            [B, N + 1, T, D] of the last T frames, where the ego comes last; [B, N + 1, T] bool, True where nothing is
            remembered; the state.
        """
        feature = det_output["instance_feature"].detach()
        if step is None or state is None:
            new = feature.new_zeros(feature.shape[:2], dtype=torch.int64)
            state = InstanceQueueState(period=new, ego_period=new[:, :1])
        else:
            state = self._continued(state, det_output, step, anchor_handler)
        ego_feature, ego_anchor = self._ego(state, feature_maps, step)
        length = self.queue_length
        state = replace(
            state,
            features=self._latest(state.features, feature),
            anchors=self._latest(state.anchors, det_output["prediction"][-1].detach()),
            period=(state.period + 1).clamp(max=length),
            ego_features=self._latest(state.ego_features, ego_feature.detach()),
            ego_anchors=self._latest(state.ego_anchors, ego_anchor.detach()),
            ego_period=(state.ego_period + 1).clamp(max=length),
        )
        period = torch.cat([state.period, state.ego_period], dim=1)
        features, ego_features, anchors, ego_anchors = (
            torch.stack(frames, 2)
            for frames in (state.features, state.ego_features, state.anchors, state.ego_anchors)
        )
        features = torch.cat([features, ego_features.to(features.dtype)], dim=1)
        anchors = torch.cat([anchors, ego_anchors], dim=1)
        ages = torch.arange(len(state.anchors), 0, -1, device=period.device)
        return ego_feature, ego_anchor, features, anchors, ages > period[..., None], state

    def _continued(
        self, state: InstanceQueueState, det_output: dict[str, Any], step: DeviceStep, anchor_handler: Any
    ) -> InstanceQueueState:
        """Return what is remembered in the order and in the coordinates of the instances of this frame."""
        threshold = self.tracking_threshold
        is_continued = step.is_continued[:, None]
        own_id = det_output["instance_id"][..., None]
        match: Tensor = (own_id == state.instance_id[:, None]) & (own_id >= 0)
        match = match & is_continued[..., None]  # [B, N, N before]
        if threshold > 0:
            match = match & (state.confidence > threshold)[:, None]
        moved = partial(anchor_handler.anchor_projection, T_src2dst=step.previous_to_current)
        return replace(
            state,
            features=tuple(_chosen(match, x) for x in state.features),
            anchors=tuple(_chosen(match, moved(x)) for x in state.anchors),
            period=(match * state.period[:, None]).sum(2),
            ego_anchors=tuple(map(moved, state.ego_anchors)),
            ego_period=torch.where(is_continued, state.ego_period, 0),
        )

    def _latest(self, frames: tuple[Tensor, ...], frame: Tensor) -> tuple[Tensor, ...]:
        """Return the frames that are kept when another one has come."""
        return (*frames, frame)[-self.queue_length :]

    def _ego(
        self, state: InstanceQueueState, feature_maps: Sequence[Any], step: DeviceStep | None
    ) -> tuple[Tensor, Tensor]:
        """Return the feature [B, 1, C] and the anchor [B, 1, D] of the ego in this frame."""
        front = feature_maps[-1][:, 0]
        if is_flat(feature_maps):
            features, shapes, starts = feature_maps
            H, W = shapes[0, -1].tolist()
            start = int(starts[0, -1])
            front = features[:, start : start + H * W].transpose(1, 2).unflatten(-1, (H, W))
        feature = self.ego_feature_encoder(front).flatten(1).unsqueeze(1)
        anchor = self.ego_anchor.repeat(feature.shape[0], 1, 1)
        if step is not None:
            is_continued = step.is_continued[:, None]
            if self.ego_motion_encoder is None:
                speed = state.ego_status[..., _FORWARD_SPEED]
                anchor[..., VY] = torch.where(is_continued, speed, 0).to(anchor.dtype)
            else:
                velocity = torch.where(is_continued, step.velocity, 0).to(anchor.dtype)
                anchor[..., VX : VY + 1] = velocity.unsqueeze(1)
        return feature, anchor

    def ego_motion_embed(self, state: InstanceQueueState) -> Tensor | None:
        """Return an embedding [B, 1, C] of the ego's velocity and of its change since the previous frame.

        It is None without ``ego_motion_from_poses``. In the first frames of a sequence, zeros stand for the waves of
        what is not known yet.
        """
        encoder = self.ego_motion_encoder
        if encoder is None:
            return None
        last = state.ego_anchors[-2:]  # or the only one
        before, velocity = (anchor[..., VX : VY + 1] for anchor in (last[0], last[-1]))
        period = state.ego_period[..., None]
        waves = (period > 1) * _waves(velocity, 5.0)
        waves_of_change = (period > 2) * _waves(velocity - before, 2.5)
        return in_full_precision(encoder, torch.cat([waves, waves_of_change], -1))

    def cache(
        self, state: InstanceQueueState, det_output: dict[str, Any], ego_feature: Tensor, ego_status: Tensor
    ) -> InstanceQueueState:
        """Return the state with what is needed to track the instances in the next frame.

        Args:
            state: the result of ``get``. det_output: ``classification`` of each layer and ``instance_id``.
            ego_feature: [B, 1, C], after the layers of the head. ego_status: [B, 1, 10], as it is predicted.
        """
        return replace(
            state,
            confidence=confidence_of(det_output["classification"][-1]),
            instance_id=det_output["instance_id"],
            ego_status=ego_status.detach(),
            ego_features=(*state.ego_features[:-1], ego_feature.detach()),
        )


def _chosen(match: Tensor, x: Tensor) -> Tensor:
    """Return for each row of match [B, N, M] the row of x [B, M, D] at its True, or zeros if it has none.

    A row has at most one True.
    """
    index = match.int().argmax(-1)  # Inductor's argmax of 8-bit integers is wrong on a CPU (torch 2.14).
    rows = rows_at(index, x)
    return torch.where(match.any(-1, keepdim=True), rows, 0)


def _waves(motion: Tensor, shortest: float) -> Tensor:
    """Return sines and cosines [..., 16] of velocities [..., 2], whose shortest wave is ``shortest`` m/s long.

    Each wave is twice as long as the one before. The layers that follow normalise their input, which removes its
    length. If velocities were given as they are, all high speeds would look the same.
    """
    length = shortest * 2.0 ** torch.arange(_NUM_WAVES, device=motion.device)
    phase = (motion[..., None] * (2 * math.pi / length)).flatten(-2)
    return torch.cat([phase.sin(), phase.cos()], -1)

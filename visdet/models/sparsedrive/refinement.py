"""The modules that refine boxes, polylines, trajectories and plans."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule, bias_init_with_prob
from torch import Tensor, nn

from visdet.registry import MODELS

from ..layers.feed_forward import relu_perceptron
from ..layers.precision import in_full_precision
from .boxes.box3d import SIN_YAW, VX
from .mlp import Scale, linear_relu_ln, perceptron

_PRIOR = 0.01  # the probability of each class before training


class _Refinement(BaseModule):
    """The base class of both refinements, with a branch for offsets and one for classes."""

    class_list = "classes"  # the list of the data set that names them

    def __init__(self, embed_dims: int, output_dim: int, num_cls: int) -> None:
        super().__init__()
        self.num_cls = num_cls
        self.layers = nn.Sequential(
            *linear_relu_ln(embed_dims, 2, 2), nn.Linear(embed_dims, output_dim), Scale([1.0] * output_dim)
        )
        self.cls_layers: Any = perceptron(embed_dims, num_cls)
        self.class_rows = {self.class_list: [f"cls_layers.{len(self.cls_layers) - 1}"]}

    def init_weights(self) -> None:
        """Set the bias of the class logits so that probabilities start at 1 %."""
        nn.init.constant_(self.cls_layers[-1].bias, bias_init_with_prob(_PRIOR))


@MODELS.register_module()
class SparseBox3DRefinementModule(_Refinement):
    """Refines box anchors, in float32 under autocast.

    The predicted offsets are added to position and size. For the velocity, a displacement is predicted and divided by
    the time step before it is added.

    Args:
        embed_dims: width of the features.
        output_dim: number of components of an anchor, 8 + velocities. num_cls: number of classes.
        normalize_yaw: whether (sin, cos) is normalised to length 1.
        refine_yaw: whether (sin, cos) of the anchor is added to the prediction, instead of being replaced by it.
        with_cls_branch: must be True.
        with_quality_estimation: whether centerness and yawness are predicted.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        output_dim: int = 11,
        num_cls: int = 10,
        normalize_yaw: bool = False,
        refine_yaw: bool = False,
        with_cls_branch: Literal[True] = True,
        with_quality_estimation: bool = False,
    ) -> None:
        super().__init__(embed_dims, output_dim, num_cls)
        self.normalize_yaw = normalize_yaw
        self.refine_yaw = refine_yaw
        self.quality_layers = perceptron(embed_dims, 2) if with_quality_estimation else None
        self.register_buffer("_is_velocity", torch.arange(output_dim) >= VX, persistent=False)

    def forward(
        self,
        instance_feature: Tensor,
        anchor: Tensor,
        anchor_embed: Tensor,
        time_interval: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the refined anchors, class logits and quality.

        Args:
            instance_feature, anchor_embed: [B, Q, C]. anchor: [B, Q, output_dim].
            time_interval: the seconds since the previous frame, [B] or a number.

        Returns:
            anchors [B, Q, output_dim] in float32, logits [B, Q, num_cls], quality [B, Q, 2] or None.
        """
        feature = instance_feature + anchor_embed
        delta = in_full_precision(self.layers, feature)
        # What is predicted of the velocity is a displacement.
        seconds = torch.as_tensor(time_interval, dtype=delta.dtype, device=delta.device).view(-1, 1, 1)
        refined = torch.addcdiv(anchor, delta, torch.where(self._is_velocity, seconds, 1.0))
        refines = self.refine_yaw
        normalizes = self.normalize_yaw
        if not refines or normalizes:
            yaw = (refined if refines else delta)[..., SIN_YAW:VX]
            yaw = F.normalize(yaw, dim=-1) if normalizes else yaw
            refined = torch.cat([refined[..., :SIN_YAW], yaw, refined[..., VX:]], dim=-1)
        quality_layers = self.quality_layers
        quality = None if quality_layers is None else quality_layers(feature)
        return refined, self.cls_layers(instance_feature), quality


@MODELS.register_module()
class SparsePoint3DRefinementModule(_Refinement):
    """Refines polyline anchors by adding predicted offsets, in float32 under autocast.

    Args:
        embed_dims: width of the features.
        num_sample: number of points of a polyline. coords_dim: number of coordinates of a point.
        num_cls: number of classes. with_cls_branch: must be True.

    Source: names and defaults are SparseDrive's.
    """

    class_list = "map_classes"

    def __init__(
        self,
        embed_dims: int = 256,
        num_sample: int = 20,
        coords_dim: int = 2,
        num_cls: int = 3,
        with_cls_branch: Literal[True] = True,
    ) -> None:
        super().__init__(embed_dims, num_sample * coords_dim, num_cls)

    def forward(
        self,
        instance_feature: Tensor,
        anchor: Tensor,
        anchor_embed: Tensor,
        time_interval: Tensor | float = 1.0,
    ) -> tuple[Tensor, Tensor, None]:
        """Return refined polylines [B, Q, output_dim] (float32), class logits [B, Q, num_cls], and None.

        Args:
            instance_feature, anchor_embed: [B, Q, C]. anchor: [B, Q, output_dim], in metres.
            time_interval: accepted without effect, because map elements do not move.
        """
        refined = in_full_precision(self.layers, instance_feature + anchor_embed) + anchor
        return refined, self.cls_layers(instance_feature), None


_STATUS = 10  # acceleration, rotation rate and velocity, three each, and the steering angle


@MODELS.register_module()
class MotionPlanningRefinementModule(BaseModule):
    """Predicts scores and steps of every mode of the agents and of the ego, and the ego's status.

    Steps and status are float32 under autocast.

    Args:
        embed_dims: width C of the features.
        fut_ts, fut_mode: number of steps and of modes of agents.
        ego_fut_ts, ego_fut_mode: number of the ego's steps, and number of its modes for each of the three commands.

    Source: names and defaults are SparseDrive's.
    """

    def __init__(
        self,
        embed_dims: int = 256,
        fut_ts: int = 12,
        fut_mode: int = 6,
        ego_fut_ts: int = 6,
        ego_fut_mode: int = 3,
    ) -> None:
        super().__init__()
        self.fut_ts = fut_ts
        self.ego_fut_ts = ego_fut_ts
        self.motion_cls_branch: Any = perceptron(embed_dims, 1)
        self.motion_reg_branch = relu_perceptron(embed_dims, 2, fut_ts * 2)
        self.plan_cls_branch: Any = perceptron(embed_dims, 1)
        self.plan_reg_branch = relu_perceptron(embed_dims, 2, ego_fut_ts * 2)
        self.plan_status_branch = relu_perceptron(embed_dims, 2, _STATUS)

    def init_weights(self) -> None:
        """Set the bias of the scores so that probabilities start at 1 %."""
        for branch in (self.motion_cls_branch, self.plan_cls_branch):
            nn.init.constant_(branch[-1].bias, bias_init_with_prob(_PRIOR))

    def forward(
        self, motion_query: Tensor, plan_query: Tensor, ego_feature: Tensor, ego_anchor_embed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return logits [B, N, M] and steps [B, N, M, T, 2] of motion, both for planning, and the status [B, 1, 10].

        Args:
            motion_query: [B, N, M, C]. plan_query: [B, 1, 3 * ego_fut_mode, C].
            ego_feature, ego_anchor_embed: [B, 1, C].
        """
        steps = in_full_precision(self.motion_reg_branch, motion_query).unflatten(-1, (self.fut_ts, 2))
        plan_steps = in_full_precision(self.plan_reg_branch, plan_query).unflatten(-1, (self.ego_fut_ts, 2))
        return (
            self.motion_cls_branch(motion_query).squeeze(-1),
            steps,
            self.plan_cls_branch(plan_query).squeeze(-1),
            plan_steps,
            in_full_precision(self.plan_status_branch, ego_feature + ego_anchor_embed),
        )

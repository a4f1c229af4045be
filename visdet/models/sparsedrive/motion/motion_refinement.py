"""The refinement of motion and planning, which predicts trajectories, their scores and the ego's status."""

from typing import Any

from mmengine.model import BaseModule, bias_init_with_prob
from torch import Tensor, nn

from visdet.registry import MODELS

from ...layers.precision import in_full_precision
from ..mlp import linear_relu_ln

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
        self.fut_ts, self.ego_fut_ts = fut_ts, ego_fut_ts

        def scores() -> nn.Sequential:
            return nn.Sequential(*linear_relu_ln(embed_dims, 1, 2), nn.Linear(embed_dims, 1))

        def numbers(count: int) -> nn.Sequential:
            hidden = [
                nn.Linear(embed_dims, embed_dims),
                nn.ReLU(),
                nn.Linear(embed_dims, embed_dims),
                nn.ReLU(),
            ]
            return nn.Sequential(*hidden, nn.Linear(embed_dims, count))

        self.motion_cls_branch = scores()
        self.motion_reg_branch = numbers(fut_ts * 2)
        self.plan_cls_branch = scores()
        self.plan_reg_branch = numbers(ego_fut_ts * 2)
        self.plan_status_branch = numbers(_STATUS)

    def init_weights(self) -> None:
        """Set the bias of the scores so that probabilities start at 1 %."""
        branch: Any
        for branch in (self.motion_cls_branch, self.plan_cls_branch):
            nn.init.constant_(branch[-1].bias, bias_init_with_prob(0.01))

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

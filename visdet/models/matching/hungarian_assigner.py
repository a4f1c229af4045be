"""One-to-one assignment of predictions to ground truth with the least total cost."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from visdet.registry import TASK_UTILS

from .match_costs import MatchCost
from .padded_targets import PaddedTargets


@TASK_UTILS.register_module()
class HungarianAssigner:
    """Matches ground-truth boxes one-to-one with predictions so that the total cost is least.

    If there are fewer predictions than boxes, some boxes stay without a prediction. A NaN or infinite cost counts as
    1e8, so that a diverging model is noticed by its loss and does not stop the solver.

    Args:
        match_costs: a cost, its config, or a list of either. The costs are added.

    Source: Carion et al., DETR, ECCV 2020.
    """

    def __init__(
        self, match_costs: Sequence[dict[str, Any] | MatchCost] | dict[str, Any] | MatchCost
    ) -> None:
        if isinstance(match_costs, (dict, MatchCost)):
            match_costs = [match_costs]
        self.match_costs = [
            TASK_UTILS.build(cost) if isinstance(cost, dict) else cost for cost in match_costs
        ]

    def cost(self, logits: Tensor, boxes_xyxy: Tensor, targets: PaddedTargets) -> Tensor:
        """Return the total cost [..., Q, N] of logits [..., Q, C] and boxes [..., Q, 4] in pixels."""
        costs = [cost.pairwise(logits, boxes_xyxy, targets) for cost in self.match_costs]
        return sum(costs[1:], start=costs[0])

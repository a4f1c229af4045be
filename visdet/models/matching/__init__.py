"""Assignment of predictions to ground truth."""

from .match_costs import (
    BBoxL1Cost,
    ClassificationCost,
    FocalLossCost,
    HungarianAssigner,
    IoUCost,
    MatchCost,
    RotatedBoxCost,
)
from .padded_targets import PaddedTargets

__all__ = [
    "BBoxL1Cost",
    "ClassificationCost",
    "FocalLossCost",
    "HungarianAssigner",
    "IoUCost",
    "MatchCost",
    "PaddedTargets",
    "RotatedBoxCost",
]

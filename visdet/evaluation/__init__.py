"""Metrics of all detector families."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from .coco_metric import CocoMetric
from .dota_metric import DOTAMetric
from .driving_metric import DrivingMetric
from .motion_metric import MotionMetric
from .nuscenes_metric import NuScenesMetric
from .planning_metric import PlanningMetric
from .tracking_metric import TrackingMetric
from .vector_map_metric import VectorMapMetric

__all__ = [
    "CocoMetric",
    "DOTAMetric",
    "DrivingMetric",
    "MotionMetric",
    "NuScenesMetric",
    "PlanningMetric",
    "TrackingMetric",
    "VectorMapMetric",
]

"""Metrics."""

from .coco_metric import CocoMetric

__all__ = ["CocoMetric"]

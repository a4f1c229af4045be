"""Data sets that are drawn instead of downloaded, for demos and tests."""

from .driving_scenes import DrivingScenesDataset, make_driving_scenes
from .shapes import ShapesDataset, make_shapes
from .two_view_pairs import TwoViewPairs

__all__ = ["DrivingScenesDataset", "ShapesDataset", "TwoViewPairs", "make_driving_scenes", "make_shapes"]

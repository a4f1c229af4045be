"""Data sets, their transforms and their samplers."""

from . import samplers, transforms
from .coco import CocoDataset
from .shapes import ShapesDataset, make_shapes

__all__ = ["CocoDataset", "ShapesDataset", "make_shapes", "samplers", "transforms"]

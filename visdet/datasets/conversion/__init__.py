"""COCO files from YOLO folders, Pascal VOC, CSV tables and other COCO files, as labelling tools export them."""

from .converter import FORMATS, convert

__all__ = ["FORMATS", "convert"]

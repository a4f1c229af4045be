"""Drawing of samples and predictions."""

from .drawing import contact_sheet, draw_boxes, side_by_side
from .field_visualizer import FieldVisualizer, slice_ellipses
from .local_visualizer import DetLocalVisualizer

__all__ = [
    "DetLocalVisualizer",
    "FieldVisualizer",
    "contact_sheet",
    "draw_boxes",
    "side_by_side",
    "slice_ellipses",
]

"""Drawing of samples and predictions."""

from .drawing import contact_sheet, draw_boxes, side_by_side
from .local_visualizer import DetLocalVisualizer

__all__ = ["DetLocalVisualizer", "contact_sheet", "draw_boxes", "side_by_side"]

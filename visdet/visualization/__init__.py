"""Drawing of samples and predictions."""

from .drawing import contact_sheet, draw_boxes, side_by_side
from .local_visualizer import DetLocalVisualizer
from .two_view_depth_visualizer import TwoViewDepthVisualizer

__all__ = ["DetLocalVisualizer", "TwoViewDepthVisualizer", "contact_sheet", "draw_boxes", "side_by_side"]

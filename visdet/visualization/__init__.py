"""Drawing of samples and predictions."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from .drawing import contact_sheet, draw_boxes, side_by_side
from .driving_visualizer import DrivingVisualizer
from .local_visualizer import DetLocalVisualizer
from .sample_visualizer import SampleVisualizer

__all__ = [
    "DetLocalVisualizer",
    "DrivingVisualizer",
    "SampleVisualizer",
    "contact_sheet",
    "draw_boxes",
    "side_by_side",
]

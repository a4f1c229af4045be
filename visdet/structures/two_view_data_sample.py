"""What is known and predicted about a pair of views."""

from mmengine.structures import BaseDataElement

__all__ = ["TwoViewDataSample"]


class TwoViewDataSample(BaseDataElement):
    """Cameras, true and predicted depth of a pair of views. Meta information: ``pair``, its number.

    Attributes:
        intrinsics: [3, 3] of both views, in pixels. source_from_reference: [4, 4], in the unit of the depths.
        gt_depth, pred_depth: [h, w], z in the reference view.
    """

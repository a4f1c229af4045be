"""The sample of a pair of views, with their true and predicted depth."""

from mmengine.structures import BaseDataElement


class TwoViewDataSample(BaseDataElement):
    """The cameras and the true and predicted depth of a pair of views.

    The meta information is ``pair``, the number of the pair.

    Attributes:
        intrinsics: [3, 3], the camera matrix of both views, in pixels.
        source_from_reference: [4, 4], the relative pose, in the unit of the depths.
        gt_depth, pred_depth: [h, w], the z coordinates in the reference view.
    """

"""The sample of a scalar field, with its true and predicted values."""

from mmengine.structures import BaseDataElement

__all__ = ["FieldDataSample"]


class FieldDataSample(BaseDataElement):
    """True and predicted values of a field at the points of a chunk.

    Attributes:
        gt_field, pred_field: [n], the values at the chunk's n points.
    """

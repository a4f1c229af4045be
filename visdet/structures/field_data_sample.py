"""The sample of a scalar field, with its true and predicted values."""

from mmengine.structures import BaseDataElement

__all__ = ["FieldDataSample"]


class FieldDataSample(BaseDataElement):
    """True and predicted values of a field at the points of a chunk.

    Meta information: ``volume_shape`` [D0, D1, D2] where the points are all voxels of a volume, in its order.

    Attributes:
        gt_field, pred_field: [n], the values at the chunk's n points.
        pred_gaussians: the Gaussians whose sum is ``pred_field``, InstanceData of the heaviest first, in the points'
            unit: ``means`` [N, 3], ``covariances`` [N, 3, 3], ``weights`` [N].
    """

"""The sample of a scalar field, with its true and predicted values."""

from mmengine.structures import BaseDataElement


class FieldDataSample(BaseDataElement):
    """True and predicted values of a field at the points of a chunk.

    If the points are all voxels of a volume, in its order, the meta information has ``volume_shape`` [D0, D1, D2].

    Attributes:
        gt_field, pred_field: [n], the values at the n points of the chunk.
        pred_gaussians: the Gaussians whose sum is ``pred_field``, the heaviest first. They are InstanceData with
            ``means`` [N, 3], ``covariances`` [N, 3, 3] and ``weights`` [N], in the unit of the points.
    """

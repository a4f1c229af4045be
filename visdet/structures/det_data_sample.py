"""The sample of one image, with its ground truth and its predictions."""

from mmengine.structures import BaseDataElement, InstanceData


class DetDataSample(BaseDataElement):
    """Ground truth, predictions and meta information of one image.

    The meta information (``set_metainfo``) consists of ``img_id``, ``img_path``, ``flip``, ``flip_direction``, the
    (height, width) of the image in its file (``ori_shape``), in the batch without padding (``img_shape``) and with it
    (``batch_input_shape``), and ``scale_factor``, the factors by which its (width, height) were multiplied.

    Attributes:
        gt_instances: ``bboxes`` [N, 4] (x1, y1, x2, y2) in pixels of ``img_shape``, and ``labels`` [N] int64.
        ignored_instances: the same for crowd regions, which are not trained on and do not count as missed.
        pred_instances: ``bboxes`` [N, 4] (x1, y1, x2, y2) in pixels, ``scores`` [N] and ``labels`` [N].

    Source: the field names are mmdet's.
    """

    @property
    def gt_instances(self) -> InstanceData:
        return self._gt_instances

    @gt_instances.setter
    def gt_instances(self, value: InstanceData) -> None:
        self.set_field(value, "_gt_instances", dtype=InstanceData)

    @gt_instances.deleter
    def gt_instances(self) -> None:
        del self._gt_instances

    @property
    def ignored_instances(self) -> InstanceData:
        return self._ignored_instances

    @ignored_instances.setter
    def ignored_instances(self, value: InstanceData) -> None:
        self.set_field(value, "_ignored_instances", dtype=InstanceData)

    @ignored_instances.deleter
    def ignored_instances(self) -> None:
        del self._ignored_instances

    @property
    def pred_instances(self) -> InstanceData:
        return self._pred_instances

    @pred_instances.setter
    def pred_instances(self, value: InstanceData) -> None:
        self.set_field(value, "_pred_instances", dtype=InstanceData)

    @pred_instances.deleter
    def pred_instances(self) -> None:
        del self._pred_instances

"""What is known and predicted about one image."""

from mmengine.structures import BaseDataElement, InstanceData

__all__ = ["DetDataSample"]


class DetDataSample(BaseDataElement):
    """Ground truth, predictions and meta information of one image.

    Meta information (``set_metainfo``): ``img_id``, ``img_path``, ``ori_shape``, ``img_shape`` (height,
    width of the image without padding), ``batch_input_shape`` (height, width of the padded batch),
    ``scale_factor`` (width, height ratios img_shape / ori_shape), ``flip``, ``flip_direction``.

    Attributes:
        gt_instances: ``bboxes`` [N, 4] xyxy in pixels of ``img_shape``, ``labels`` [N] int64.
        ignored_instances: the same for crowd regions, which neither train nor count as misses.
        pred_instances: ``bboxes`` [N, 4] xyxy in pixels, ``scores`` [N], ``labels`` [N].

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

"""Data sets of plain images of any sizes, without files."""

import torch
from mmengine.dataset import BaseDataset
from torchvision import tv_tensors

from visdet.registry import TRANSFORMS

__all__ = ["Paint", "Painted", "data"]


class Painted(BaseDataset):
    """Images of given (height, width) without files. Each has a box in its upper left corner."""

    METAINFO = {"classes": ("a",)}

    def __init__(self, sizes, pipeline, boxes=None):
        self.sizes, self.boxes = sizes, boxes
        super().__init__(
            pipeline=[TRANSFORMS.build(step) if isinstance(step, dict) else step for step in pipeline]
        )

    def load_data_list(self):
        box = dict(bbox=[0, 0, 9, 9], bbox_label=0, ignore_flag=0)
        return [
            dict(height=h, width=w, img_id=i, img_path="", instances=[box] * number)
            for i, ((h, w), number) in enumerate(zip(self.sizes, self.boxes or [1] * 10**4, strict=False))
        ]

    def _rand_another(self):
        return int(torch.randint(len(self), ()))


class Paint:
    """Makes the image of a record, and packs no pixels."""

    keeps_size = True

    def __call__(self, results):
        size = results["height"], results["width"]
        results["img"] = tv_tensors.Image(torch.zeros(3, *size, dtype=torch.uint8))
        results["img_shape"] = results["ori_shape"] = size
        return results


def data(sizes, *steps, **options):
    return Painted(
        sizes, [Paint(), dict(type="LoadAnnotations"), *steps, dict(type="PackDetInputs")], **options
    )

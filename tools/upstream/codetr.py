"""Co-DETR, on random images with random boxes."""

import importlib
from pathlib import Path
from typing import Any

import torch

from .detr import DeformableDETR
from .driving import without_files


class CoDETR(DeformableDETR):
    """A model of Co-DETR's own copy of mmdet, built from its mmcv 1.x config."""

    def imports(self) -> None:
        importlib.import_module("projects")

    def build(self, work: Path, device: str, scale: float) -> torch.nn.Module:
        from mmcv import Config
        from mmcv.runner import build_optimizer
        from mmdet.models import build_detector

        settings = Config.fromfile(self.config)
        without_files(settings.model, work, {})
        self.model = build_detector(settings.model)
        self.model.init_weights()
        self.device = torch.device(device)
        self.optimizer = build_optimizer(self.model, settings.optimizer)
        return self.model.to(device)

    def images_of(self, batch: tuple[list, list]) -> tuple[torch.Tensor, list[dict]]:
        """Return the images, which are padded to one size, and their descriptions."""
        images, _ = batch
        height, width = (max(sizes) for sizes in zip(*(image.shape[-2:] for image in images), strict=True))
        padded = images[0].new_zeros(len(images), 3, height, width)
        metas = []
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
            shape = (*image.shape[1:], 3)
            metas.append(
                {
                    "img_shape": shape,
                    "ori_shape": shape,
                    "pad_shape": (height, width, 3),
                    "batch_input_shape": (height, width),
                    "scale_factor": [1.0] * 4,
                    "flip": False,
                }
            )
        return padded, metas

    def train_step(self, batch: tuple[list, list]) -> torch.Tensor:
        images, metas = self.images_of(batch)
        boxes = []
        for image, target in zip(*batch, strict=True):
            centers, sides = target["boxes"].split(2, 1)
            corners = torch.cat([centers - sides / 2, centers + sides / 2], 1)
            boxes.append(corners * corners.new_tensor([image.shape[2], image.shape[1]] * 2))
        data = {"img": images, "img_metas": metas, "gt_bboxes": boxes}
        data["gt_labels"] = [target["labels"] for target in batch[1]]
        return self.model.train_step(data, self.optimizer)["loss"]

    def predict(self, batch: tuple[list, list]) -> Any:
        images, metas = self.images_of(batch)
        return self.model(return_loss=False, rescale=True, img=[images], img_metas=[metas])

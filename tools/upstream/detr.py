"""Deformable-DETR, DINO and Mask2Former, on random images with random boxes."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

IMAGE_SIZES = ((224, 320), (256, 288))  # height and width


class DeformableDETR:
    """The model of ``main.py``, with its criterion and its postprocessor."""

    backbone = "models.backbone"

    def __init__(self, config: str) -> None:
        self.config = config

    def imports(self) -> None:
        self.main = importlib.import_module("main")

    def arguments(self, device: str) -> argparse.Namespace:
        return self.main.get_args_parser().parse_args(["--device", device])

    def build(self, work: Path, device: str, scale: float) -> torch.nn.Module:
        # Only the main process loads pretrained weights.
        importlib.import_module(self.backbone).is_main_process = lambda: False
        build = getattr(self.main, "build_model_main", None) or self.main.build_model
        self.model, self.criterion, self.postprocessors = build(self.arguments(device))
        self.device = torch.device(device)
        self.criterion.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        return self.model.to(device)

    def batches(self, work: Path, training: bool) -> Iterator[tuple[list, list]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            images = [torch.randn(3, *size, generator=generator).to(self.device) for size in IMAGE_SIZES]
            boxes = [torch.rand(5, 4, generator=generator) * 0.4 + 0.2 for _ in images]  # cx, cy, w, h
            labels = [torch.randint(1, 80, (5,), generator=generator) for _ in images]
            yield (
                images,
                [
                    {"boxes": box.to(self.device), "labels": label.to(self.device)}
                    for box, label in zip(boxes, labels, strict=True)
                ],
            )

    def outputs(self, images: list, targets: list) -> dict:
        return self.model(images)

    def train_step(self, batch: tuple[list, list]) -> torch.Tensor:
        images, targets = batch
        losses = self.criterion(self.outputs(images, targets), targets)
        weights = self.criterion.weight_dict
        return sum(value * weights[name] for name, value in losses.items() if name in weights)

    def predict(self, batch: tuple[list, list]) -> Any:
        images, targets = batch
        sizes = torch.tensor(IMAGE_SIZES, device=self.device)
        return self.postprocessors["bbox"](self.outputs(images, targets), sizes)


class DINO(DeformableDETR):
    """The same with the config file's settings and denoising."""

    backbone = "models.dino.backbone"

    def arguments(self, device: str) -> argparse.Namespace:
        arguments = self.main.get_args_parser().parse_args(["-c", self.config, "--device", device])
        settings = importlib.import_module("util.slconfig").SLConfig.fromfile(self.config)
        vars(arguments).update(settings._cfg_dict.to_dict())
        return arguments

    def outputs(self, images: list, targets: list) -> dict:
        return self.model(images, targets if self.model.training else None)


class Mask2Former(DeformableDETR):
    """The model of ``train_net.py``, with masks as targets."""

    def imports(self) -> None:
        self.main = importlib.import_module("train_net")

    def build(self, work: Path, device: str, scale: float) -> torch.nn.Module:
        from detectron2.config import get_cfg

        settings = get_cfg()
        self.main.add_deeplab_config(settings)
        self.main.add_maskformer2_config(settings)
        settings.merge_from_file(self.config)
        settings.merge_from_list(["MODEL.DEVICE", device, "MODEL.WEIGHTS", "", "OUTPUT_DIR", str(work)])
        self.model = self.main.Trainer.build_model(settings)
        self.optimizer = self.main.Trainer.build_optimizer(settings, self.model)
        self.device = torch.device(device)
        return self.model

    def inputs(self, batch: tuple[list, list]) -> list[dict]:
        from detectron2.structures import Instances

        inputs = []
        for image, target in zip(*batch, strict=True):
            height, width = image.shape[-2:]
            instances = Instances((height, width))
            instances.gt_classes = target["labels"]
            instances.gt_masks = torch.zeros(len(target["labels"]), height, width, dtype=torch.bool)
            for mask, (x, y, w, h) in zip(instances.gt_masks, target["boxes"].tolist(), strict=True):
                mask[int(height * (y - h / 2)) : int(height * (y + h / 2))] = True
                mask[:, : int(width * max(x - w / 2, 0))] = False
            inputs.append(
                {"image": image * 50 + 120, "instances": instances, "height": height, "width": width}
            )
        return inputs

    def train_step(self, batch: tuple[list, list]) -> torch.Tensor:
        return sum(self.model(self.inputs(batch)).values())

    def predict(self, batch: tuple[list, list]) -> Any:
        outputs = self.model(self.inputs(batch))
        return [(entry["instances"].scores, entry["instances"].pred_boxes.tensor) for entry in outputs]

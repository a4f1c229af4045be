"""Models of the configs with random weights, and batches for them. Nothing is downloaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.structures import InstanceData
from torch import nn

from visdet.registry import DATASETS, MODELS
from visdet.structures import DetDataSample

from .case import seeded
from .environment import ROOT

Batches = list[dict[str, Any]]  # the batches as a data loader collates them

CONFIGS = ROOT / "configs"
BOXES = 10  # number of boxes in an image for Deformable DETR and DINO
NUM_DET, NUM_MAP, TINY_DET, TINY_MAP = 900, 100, 24, 8


def deformable_detr(batch_size: int, num_batches: int, folder: Path, tiny: bool) -> tuple[nn.Module, Batches]:
    """Return Deformable DETR R50 and one batch of 800 x 1333 pixels, which is repeated.

    With ``tiny``, the backbone is a thin R18 and images have 64 x 96 pixels.
    """
    return _detector("deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", batch_size, num_batches, tiny)


def dino(batch_size: int, num_batches: int, folder: Path, tiny: bool) -> tuple[nn.Module, Batches]:
    """Return DINO R50 on four scales, and the batch of ``deformable_detr``."""
    return _detector("dino/dino-4scale_r50_8xb2-12e_coco.py", batch_size, num_batches, tiny)


def _detector(name: str, batch_size: int, num_batches: int, tiny: bool) -> tuple[nn.Module, Batches]:
    config = Config.fromfile(CONFIGS / name).model
    config.backbone.init_cfg = None
    height, width = (64, 96) if tiny else (800, 1333)
    if tiny:
        config.backbone.depth = 18
        config.backbone.base_channels = 8
        config.neck.in_channels = [16, 32, 64]
        config.encoder.num_layers = config.decoder.num_layers = 2
    generator = seeded()
    images = torch.randint(0, 256, (batch_size, 3, height, width), generator=generator, dtype=torch.uint8)
    samples = [_boxes(height, width, generator) for _ in range(batch_size)]
    return _built(config), [{"inputs": list(images), "data_samples": samples}] * num_batches


def _boxes(height: int, width: int, generator: torch.Generator) -> DetDataSample:
    """Return the ground truth of an image, which is boxes inside it with 3 to 33 % of its sides."""
    centers = torch.rand(BOXES, 2, generator=generator) * 0.6 + 0.2
    sides = torch.rand(BOXES, 2, generator=generator) * 0.3 + 0.03
    corners = torch.cat((centers - sides / 2, centers + sides / 2), dim=1)
    sample = DetDataSample(metainfo={"img_shape": (height, width), "scale_factor": (1.0, 1.0)})
    sample.gt_instances = InstanceData(
        bboxes=corners * torch.tensor([width, height] * 2),
        labels=torch.randint(0, 80, (BOXES,), generator=generator),
    )
    return sample


def sparsedrive(stage: int) -> Callable[[int, int, Path, bool], tuple[nn.Module, Batches]]:
    """Return a function that makes SparseDrive R50 of a stage, and consecutive frames of six 256 x 704 images.

    With ``tiny``, images have 64 x 128 pixels and the model is the toy model.
    """

    def make(batch_size: int, num_batches: int, folder: Path, tiny: bool) -> tuple[nn.Module, Batches]:
        model = _built(_sparsedrive_config(stage, tiny))
        return model, _frames(batch_size, num_batches, folder, (64, 128) if tiny else (256, 704))

    return make


def _sparsedrive_config(stage: int, tiny: bool) -> Any:
    name = "toy" if tiny else "r50"
    if stage == 1:
        config = Config.fromfile(CONFIGS / "_base_" / "models" / f"sparsedrive_{name}.py").model
    else:
        files = {"toy": "sparsedrive_toy_stage2.py", "r50": "sparsedrive_r50_stage2_8xb6_nuscenes.py"}
        config = Config.fromfile(CONFIGS / "sparsedrive" / files[name]).model
        planner = config.head.motion_plan_head
        steps = (planner.fut_mode, planner.fut_ts, 2), (planner.ego_fut_mode, planner.ego_fut_ts, 2)
        planner.motion_anchor = np.zeros((planner.num_classes, *steps[0])).tolist()
        planner.plan_anchor = np.zeros((3, *steps[1])).tolist()
    preprocessor = Config.fromfile(CONFIGS / "_base_" / "datasets" / "driving_scenes.py").data_preprocessor
    config.data_preprocessor = preprocessor
    config.img_backbone.init_cfg = None
    if tiny:
        config.img_backbone.base_channels = 8
        config.img_neck.in_channels = [8, 16, 32]
    counts = (TINY_DET, TINY_MAP) if tiny else (NUM_DET, NUM_MAP)
    for task, anchors in random_anchors(*counts).items():
        bank = config.head[f"{task}_head"].instance_bank
        bank.update(anchor=anchors.tolist(), num_anchor=len(anchors))
        if tiny:
            bank.num_temp_instances = len(anchors) // 3
    return config


def random_anchors(num_det: int, num_map: int) -> dict[str, np.ndarray]:
    """Return boxes [num_det, 11] and lines [num_map, 20, 2] around the vehicle."""
    numbers = np.random.default_rng(0)
    boxes = np.zeros((num_det, 11))
    boxes[:, :3] = numbers.uniform((-50, -50, -3), (50, 50, 1), (num_det, 3))
    boxes[:, 3:7] = 1
    starts = numbers.uniform((-15, -30), (15, 30), (num_map, 1, 2))
    return {"det": boxes, "map": starts + np.linspace(0, 4, 20)[None, :, None]}


def _frames(batch_size: int, num_batches: int, folder: Path, image_size: tuple[int, int]) -> Batches:
    """Return consecutive frames of driving scenes, one scene for each sample of a batch.

    The scenes are drawn into ``folder`` once.
    """
    height, width = image_size
    config = Config.fromfile(CONFIGS / "_base_" / "datasets" / "driving_scenes.py").train_dataloader.dataset
    config.update(
        data_root=str(folder / f"scenes_{batch_size}"),
        generator={
            "num_train": batch_size,
            "num_val": 1,
            "num_test": 1,
            "num_frames": num_batches,
            "image_size": (height, width),
        },
        sequences_split_num=1,
    )
    config.data_aug_conf.update(final_dim=(height, width), H=height, W=width)
    dataset = DATASETS.build(config)
    return [
        pseudo_collate([dataset[scene * num_batches + frame] for scene in range(batch_size)])
        for frame in range(num_batches)
    ]


def _built(config: Any) -> nn.Module:
    model = MODELS.build(config)
    model.init_weights()
    return model

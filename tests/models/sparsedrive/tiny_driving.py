"""A tiny SparseDrive, and frames of an imagined drive that need no data."""

from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config

from visdet.registry import MODELS
from visdet.structures import DrivingDataSample

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
HEIGHT, WIDTH, NUM_CAMERAS = 32, 64, 6
NUM_DET, NUM_MAP = 24, 8


def tiny_config(with_map=True, **overrides):
    """Return the toy model's config with few anchors, drawn at random; ``overrides`` are 'a.b.c' style keys."""
    config = Config.fromfile(CONFIGS / "_base_/models/sparsedrive_toy.py")
    generator = np.random.default_rng(0)
    boxes = np.zeros((NUM_DET, 11))
    boxes[:, :3] = generator.uniform((-20, -20, -2), (20, 20, 0), (NUM_DET, 3))
    boxes[:, 3:7] = 1
    lines = generator.uniform((-15, -30), (15, 30), (NUM_MAP, 1, 2)) + np.linspace(0, 4, 20)[None, :, None]
    for name, anchors, carried in (("det", boxes, 8), ("map", lines, 3)):
        bank = config.model.head[f"{name}_head"].instance_bank
        bank.update(anchor=anchors.tolist(), num_anchor=len(anchors), num_temp_instances=carried)
    config.model.img_backbone.base_channels = 8
    config.model.img_neck.in_channels = [8, 16, 32]
    config.model.head.task_config.with_map = with_map
    config.merge_from_dict({f"model.{key.replace('__', '.')}": value for key, value in overrides.items()})
    return config.model


def tiny_model(seed=0, **overrides):
    """Return the model of ``tiny_config``, initialised and in training."""
    torch.manual_seed(seed)
    model = MODELS.build(tiny_config(**overrides))
    model.init_weights()
    return model.train()


def cameras():
    """Return projections [V, 4, 4] of a ring of pinhole cameras, x right, y forward, z up."""
    matrices = []
    for i in range(NUM_CAMERAS):
        yaw = 2 * np.pi * i / NUM_CAMERAS
        right, forward = (np.cos(yaw), -np.sin(yaw), 0), (np.sin(yaw), np.cos(yaw), 0)
        axes = np.eye(4)
        axes[:3, :3] = [right, (0, 0, -1), forward]
        intrinsic = np.eye(4)
        intrinsic[:2, :3] = [[WIDTH / 1.4, 0, WIDTH / 2], [0, WIDTH / 1.4, HEIGHT / 2]]
        matrices.append(intrinsic @ axes)
    return np.stack(matrices)


def frame(times, seed=0, scenes=None, num_boxes=None, num_lines=None, poses=None):
    """Return (images, samples) of one frame of each sample; sample i draws from seed + i, whatever the batch."""
    B = len(times)
    seeds = [(seed, i) for i in range(B)] if isinstance(seed, int) else seed
    counts = num_boxes or [4] * B, num_lines or [3] * B
    images, samples = [], []
    for i, (own_seed, n, m) in enumerate(zip(seeds, *counts, strict=True)):
        draw = np.random.default_rng(own_seed)
        images.append(draw.normal(size=(NUM_CAMERAS, 3, HEIGHT, WIDTH)))
        places = draw.uniform((-15, -15, -2), (15, 15, 0), (n, 3))
        sides, yaw, velocity = draw.uniform(1, 4, (n, 3)), draw.uniform(-3, 3, n), draw.normal(size=(n, 2))
        labels = draw.integers(0, 5, n)
        line = draw.uniform((-10, -25), (10, 25), (m, 1, 1, 2)) + np.linspace(0, 5, 20)[:, None]
        lines = np.full((m, 38, 20, 2), 1e5)
        lines[:, :1], lines[:, 1:2] = line, line[:, :, ::-1]
        pose = np.eye(4) if poses is None else poses[i]
        metas = {"T_global": pose, "T_global_inv": np.linalg.inv(pose), "timestamp": times[i]}
        metas |= {"instance_id": np.arange(n)} | ({} if scenes is None else {"scene_token": scenes[i]})
        sample = DrivingDataSample(metainfo=metas)
        sample.gt_labels_3d = torch.from_numpy(labels)
        sample.gt_map_labels = torch.from_numpy(draw.integers(0, 3, m))
        sample.gt_depth = [
            torch.from_numpy(draw.uniform(-5, 30, (NUM_CAMERAS, HEIGHT // stride, WIDTH // stride))).float()
            for stride in (4, 8, 16)
        ]
        fields = {
            "projection_mat": cameras(),
            "image_wh": np.tile([WIDTH, HEIGHT], (NUM_CAMERAS, 1)),
            "focal": np.full(NUM_CAMERAS, WIDTH / 1.4),
            "gt_bboxes_3d": np.column_stack([places, sides, yaw, velocity]),
            "gt_map_pts": lines,
        }
        for name, values in fields.items():
            sample.set_field(torch.from_numpy(values).float(), name)
        samples.append(sample)
    return torch.from_numpy(np.stack(images)).float(), samples


STAGE2 = CONFIGS / "sparsedrive/sparsedrive_toy_stage2.py"


def tiny_stage2(edit=lambda head: None, **overrides):
    """Return the toy's second stage, tiny. ``edit`` may change the config of its head."""
    generator = np.random.default_rng(0)
    head = Config.fromfile(STAGE2).model.head.motion_plan_head
    head.motion_anchor = generator.normal(0, 3, (5, 6, 12, 2)).tolist()
    head.plan_anchor = generator.normal(0, 3, (3, head.ego_fut_mode, 6, 2)).tolist()
    config = tiny_config(freeze_perception=True)
    config.head.motion_plan_head = head
    config.head.task_config.with_motion_plan = True
    config.update(overrides)
    edit(config.head)
    torch.manual_seed(0)
    model = MODELS.build(config)
    model.init_weights()
    return model


def motion_frame(times, **arguments):
    images, samples = frame(times, **arguments)
    generator = torch.Generator().manual_seed(0)
    for sample in samples:
        count = len(sample.gt_bboxes_3d)
        sample.gt_agent_fut_trajs = torch.randn(count, 12, 2, generator=generator)
        sample.gt_agent_fut_masks = torch.ones(count, 12)
        sample.gt_ego_fut_trajs, sample.gt_ego_fut_masks = torch.ones(6, 2), torch.ones(6)
        sample.gt_ego_fut_cmd, sample.ego_status = torch.tensor([0.0, 0, 1]), torch.ones(10)
    return images, samples

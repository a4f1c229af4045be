"""Models for Bench2Drive, which is out of reach, on the driving scenes: HiP-AD and SparseDriveV2.

HiP-AD gets random images and targets on the scenes' poses. SparseDriveV2 gets random paths, speeds and target points.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .driving import Driving, drawn_infos

_DRAWN = {  # the targets of SparseDriveV2: their shapes and largest values
    "tp_near": ((2,), 30.0),
    "gt_lat": ((15, 2), 15.0),
    "gt_lon": ((6,), 10.0),
    "gt_traj": ((6, 2), 20.0),
}
_PATHS = ("spat_trajs_2m", "spat_trajs_5m", "fut_trajs_2hz", "fut_trajs_5hz")


class HiPAD(Driving):
    """HiP-AD's second stage."""

    def build(self, work: Path, device: str, scale: float) -> Any:
        self.device = torch.device(device)
        model = super().build(work, device, scale)
        model.head.evaluate_bench2dive = False  # It needs the data set's own annotations.
        return model

    def batches(self, work: Path, training: bool) -> Iterator[dict]:
        infos = drawn_infos(work)
        rng = np.random.default_rng(0)
        width, height = self.settings.input_shape
        for info in infos[:2]:
            yield self.frame(info, rng, width, height)

    def frame(self, info: dict, rng: np.random.Generator, width: int, height: int) -> dict:
        def tensor(value: Any) -> torch.Tensor:
            return torch.as_tensor(np.asarray(value, np.float32), device=self.device)

        cameras = list(info["cams"].values())
        factor = np.diag([width / 1600, height / 900, 1, 1])
        projections = []
        for camera in cameras:
            to_lidar, intrinsic = np.eye(4), np.eye(4)
            to_lidar[:3, :3], to_lidar[:3, 3] = (
                camera["sensor2lidar_rotation"],
                camera["sensor2lidar_translation"],
            )
            intrinsic[:3, :3] = camera["cam_intrinsic"]
            projections.append(factor @ intrinsic @ np.linalg.inv(to_lidar))
        pose = np.eye(4)
        pose[:3, 3] = info["ego2global_translation"]
        boxes = np.concatenate([info["gt_boxes"], info["gt_velocity"]], 1)
        time, count, views = info["timestamp"] / 1e6, len(boxes), len(cameras)
        labels = torch.as_tensor(rng.integers(0, len(self.settings.det_class_names), count))
        points = rng.uniform(-15, 15, (8, 38, self.settings.map_num_pts, 2))
        batch = {
            "img": tensor(rng.normal(size=(1, views, 3, height, width))),
            "timestamp": torch.tensor([time], dtype=torch.float64, device=self.device),
            "projection_mat": tensor([projections]),
            "image_wh": tensor([[[width, height]] * views]),
            "focal": tensor([[camera["cam_intrinsic"][0, 0] for camera in cameras]]),
            "gt_depth": [
                tensor(rng.uniform(1, 60, (1, views, height // stride, width // stride)))
                for stride in self.settings.strides[:3]
            ],
            "gt_bboxes_3d": [tensor(boxes)],
            "gt_labels_3d": [labels.to(self.device)],
            "gt_map_labels": [torch.as_tensor(rng.integers(0, 4, 8), device=self.device)],
            "gt_map_pts": [tensor(points)],
            "gt_agent_fut_trajs": [tensor(rng.normal(size=(count, 6, 2)))],
            "gt_agent_fut_masks": [tensor(np.ones((count, 6)))],
            "gt_ego_fut_cmd": tensor([np.eye(6)[3]]),
            "target_point": tensor(rng.uniform(-10, 10, (1, 2))),
            "ego_status": tensor(rng.normal(size=(1, 6))),
            "ego_status_mask": tensor(np.ones((1, 6))),
            "img_metas": [
                {
                    "T_global": pose,
                    "T_global_inv": np.linalg.inv(pose),
                    "timestamp": time,
                    "instance_id": np.asarray(info["instance_inds"]),
                    "scene_token": info["scene_token"],
                }
            ],
        }
        for name in _PATHS:
            batch[f"gt_ego_{name}"] = tensor(rng.normal(size=(1, 6, 2)))
            batch[f"gt_ego_{name.replace('trajs', 'masks')}"] = tensor(np.ones((1, 6)))
        return batch

    def train_step(self, batch: dict) -> torch.Tensor:
        losses = self.parallel.module(**batch)
        return sum(value for name, value in losses.items() if "loss" in name)

    def predict(self, batch: dict) -> Any:
        return self.parallel.module(**batch)


class SparseDriveV2(Driving):
    """The second stage of SparseDriveV2's branch ``bench2drive``, with motion and planning."""

    def batches(self, work: Path, training: bool) -> Iterator[dict]:
        pipeline = self.settings.data["train" if training else "val"].pipeline
        pipeline[-1]["keys"] = [
            name for name in pipeline[-1]["keys"] if name.removesuffix("_mask") not in _DRAWN
        ]
        generator = torch.Generator().manual_seed(0)
        for batch in super().batches(work, training):
            if training:
                for name in ("gt_agent_fut_trajs", "gt_agent_fut_masks"):
                    futures = batch[name].data[0]
                    futures[:] = [future[:, : self.settings.fut_ts] for future in futures]
            for name, (shape, extent) in _DRAWN.items():
                batch[name] = torch.rand(1, *shape, generator=generator) * extent
                if name != "tp_near":
                    batch[f"{name}_mask"] = torch.ones(1, shape[0])
            yield batch

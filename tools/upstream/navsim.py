"""SparseDriveV2 on random images. The scores of NAVSIM's simulator, which its loss needs, are drawn at random."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


class SparseDriveV2:
    """The model of the agent ``sparsedrive``, with random vocabularies of paths and velocities."""

    package = "navsim.agents.sparsedrive"

    def __init__(self, config: str) -> None:
        self.config = config

    def imports(self) -> None:
        self.configs = importlib.import_module(f"{self.package}.sparsedrive_config")
        self.models = importlib.import_module(f"{self.package}.sparsedrive_model")
        self.decoder = importlib.import_module(f"{self.package}.custom_decoder")

    def build(self, work: Path, device: str, scale: float) -> torch.nn.Module:
        import timm

        names = ("path_anchor", "velocity_anchor", "trajectory_anchor")
        files = {name: str(work / f"v2_{name}.np{'z' if name == names[2] else 'y'}") for name in names}
        settings = self.configs.SparseDriveConfig(**files)
        settings.final_dim = tuple(int(size * scale) // 32 * 32 for size in settings.final_dim)
        write_vocabularies(settings)
        create = timm.create_model
        timm.create_model = lambda *names, **options: create(*names, **options | {"pretrained": False})
        self.model = self.models.SparseDriveModel(settings).to(device)
        timm.create_model = create
        self.settings, self.device = settings, torch.device(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.decoder.get_pdm_score_v1 = self.decoder.get_pdm_score_v2 = self.scores
        return self.model

    def scores(self, trajectories: torch.Tensor, paths: list[str]) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        size = trajectories.shape[1]
        return [{name: rng.random(size) for name in self.settings.metrics} for _ in paths]

    def batches(self, work: Path, training: bool) -> Iterator[tuple[dict, dict]]:
        generator = torch.Generator().manual_seed(0)
        height, width = self.settings.final_dim
        focal, cameras = width / 2, len(self.settings.cams)
        # The cameras look to the left, ahead and to the right. The vehicle's x axis points ahead, and its y axis left.
        projections = torch.eye(4).repeat(1, cameras, 1, 1)
        for camera, yaw in enumerate(np.deg2rad((55.0, 0.0, -55.0))):
            ahead, left = torch.tensor([np.cos(yaw), np.sin(yaw)]), torch.tensor([-np.sin(yaw), np.cos(yaw)])
            projections[0, camera, 0, :2] = -focal * left + width / 2 * ahead
            projections[0, camera, 1, :3] = torch.tensor([*(height / 2 * ahead), -focal])
            projections[0, camera, 1, 3] = focal * 1.5
            projections[0, camera, 2] = torch.tensor([*ahead, 0.0, 0.0])
        for _ in range(2):
            images = torch.randn(1, cameras, 3, height, width, generator=generator)
            size = torch.tensor([width, height]).float().repeat(1, cameras, 1)
            camera_feature = {"imgs": images, "projection_mat": projections.clone(), "image_wh": size}
            status = torch.randn(1, 8, generator=generator)
            steps = torch.arange(1, self.settings.len_path + 1).float()
            path = torch.stack([steps, 0 * steps, 0 * steps], -1)[None]
            poses = self.settings.trajectory_sampling.num_poses
            targets = {
                "path": path,
                "path_mask": torch.ones(1, len(steps)),
                "velocity": torch.full((1, self.settings.len_vel_seq), 4.0),
                "trajectory": path[:, :poses] * 2,
            }
            features = {"camera_feature": camera_feature, "status_feature": status}
            yield moved(features, self.device), moved(targets, self.device) | {"token_path": ["-"]}

    def train_step(self, batch: tuple[dict, dict]) -> torch.Tensor:
        return self.model(*batch)[1]["loss"]

    def predict(self, batch: tuple[dict, dict]) -> Any:
        return self.model(*batch)[0]


def moved(values: dict, device: torch.device) -> dict:
    return {
        key: moved(value, device) if isinstance(value, dict) else value.to(device)
        for key, value in values.items()
    }


def write_vocabularies(settings: Any) -> None:
    """Write random paths, velocities and the trajectories that go along each path at each velocity."""
    rng = np.random.default_rng(0)
    paths = np.zeros((settings.mode_path, settings.len_path, 3), np.float32)
    paths[..., 2] = rng.uniform(-0.03, 0.03, (len(paths), 1)) * np.arange(settings.len_path)
    paths[..., 0] = np.cumsum(np.cos(paths[..., 2]), 1)
    paths[..., 1] = np.cumsum(np.sin(paths[..., 2]), 1)
    velocities = rng.uniform(0, 12, (settings.mode_vel, settings.len_vel_seq)).astype(np.float32)
    along = np.cumsum(velocities * settings.vel_time_interval, 1)
    index = np.clip(along, 0, settings.len_path - 1).astype(int)
    np.save(settings.path_anchor, paths)
    np.save(settings.velocity_anchor, velocities)
    trajectories = paths[:, index]
    mask = np.ones(trajectories.shape[:-1], np.float32)
    np.savez(settings.trajectory_anchor, trajectory=trajectories, trajectory_mask=mask)

"""Models of driving repositories that are built on mmcv 1.x and mmdet 2.x, on the package's driving scenes."""

import copy
import importlib
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visdet.datasets import make_driving_scenes
from visdet.datasets.info_files import load_infos

ANCHORS = {  # by a part of the file's name: the shape, and the size of the region in metres
    "det": ((900, 11), 40.0),
    "kmeans900": ((900, 11), 40.0),
    "map": ((100, 40), 15.0),
    "b2d_motion": ((9, 6, 6, 2), 10.0),  # of HiP-AD
    "plan_spat": ((48, 6, 2), 10.0),
    "motion_6": ((10, 6, 12, 2), 10.0),
    "plan_6": ((3, 6, 6, 2), 10.0),
    "path_1m": ((1024, 15, 2), 15.0),  # of SparseDriveV2's branch bench2drive
    "vel_seq": ((256, 6), 10.0),
    "trajectory_1024": ((1024, 256, 6, 2), 10.0),
}


_VALUES = {  # for a comparison
    "drop_out": 0.0,
    "dropout": 0.0,
    "attn_drop": 0.0,
    "ffn_drop": 0.0,
    "use_grid_mask": False,
    "use_rescore": False,
    "with_cp": False,
}


@dataclass
class Driving:
    """A model that is built by mmdet 2.x from an mmcv 1.x config.

    Args:
        config: the path of the config.
        plugin: the package that registers the modules.
        missing: modules that the checkout imports but does not hold, and those that take their place.
        also: modules of the checkout that its config needs, but that the plugin does not import.
        anchors: entries for ``ANCHORS``.
        exact: whether the config is made deterministic, for a comparison.
        half: whether a model whose config says so runs in 16 bits on a GPU.
        dataset: the data set of the repository that reads nuScenes' form, if its config names another one.
    """

    config: str
    plugin: str = "projects.mmdet3d_plugin"
    missing: dict[str, str] = field(default_factory=dict)
    anchors: dict[str, tuple] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    dataset: str | None = None
    exact: bool = False
    half: bool = True

    def imports(self) -> None:
        for name, stand_in in self.missing.items():
            sys.modules[name] = importlib.import_module(stand_in)
        for name in (self.plugin, *self.also):
            importlib.import_module(name)

    def config_file(self, work: Path, scale: float) -> str:
        """Return the path of the config for images of the given scale."""
        return smaller(self.config, work, scale, 64 if self.exact else 32)

    def build(self, work: Path, device: str, scale: float) -> Any:
        """Return the model without pretrained weights and with random anchors."""
        from mmcv import Config
        from mmcv.parallel import MMDataParallel
        from mmcv.runner import build_optimizer, wrap_fp16_model
        from mmdet.models import build_detector

        self.settings = Config.fromfile(self.config_file(work, scale))
        for stage in self.settings.get("train_pipeline", []) + self.settings.get("test_pipeline", []):
            for part in (stage, *stage.get("transforms", [])):
                if part["type"] == "RandomScaleImageMultiViewImage":
                    part["scales"] = [factor * scale for factor in part["scales"]]
        without_files(self.settings.model, work, ANCHORS | self.anchors)
        if self.exact:
            without_randomness(self.settings.model)
        self.plain_model = copy.deepcopy(self.settings.model.to_dict())
        model = build_detector(self.settings.model, test_cfg=self.settings.get("test_cfg"))
        model.init_weights()
        if self.half and self.settings.get("fp16") and device != "cpu":
            wrap_fp16_model(model)
        model.to(device)
        self.optimizer = build_optimizer(model, self.settings.optimizer)
        self.parallel = MMDataParallel(model, device_ids=[-1 if device == "cpu" else 0])
        return model

    def infos(self, work: Path) -> Path:
        """Write the info file, with what the repository needs beside nuScenes' form, and return its path."""
        infos = drawn_infos(work)
        self.complete(infos)
        path = work / "infos.pkl"
        path.write_bytes(pickle.dumps({"infos": infos, "metadata": {"version": "v1.0-trainval"}}))
        return path

    def complete(self, infos: list[dict]) -> None:
        """Add what the repository needs beside nuScenes' form."""

    def batches(self, work: Path, training: bool) -> Iterator[dict]:
        """Yield batches of consecutive frames, by the repository's own data set and pipeline."""
        from mmcv.parallel import collate
        from mmdet.datasets import DATASETS, build_dataset

        settings = self.settings.data["train" if training else "val"]
        settings.pop("samples_per_gpu", None)  # Of the loader, as mmdet's scripts read it.
        settings.ann_file = str(self.infos(work))
        settings.data_root = str(work)
        if "sequences_split_num" in settings:
            settings.sequences_split_num = 1  # The scene is shorter than the parts of nuScenes' scenes.
        if self.dataset is not None:
            settings.type = self.dataset
            for key in set(settings) - set(signature(DATASETS.get(self.dataset)).parameters) - {"type"}:
                del settings[key]
        dataset = build_dataset(settings)
        for index in range(2):
            yield collate([dataset[index]], samples_per_gpu=1)

    def train_step(self, batch: dict) -> torch.Tensor:
        return self.parallel.train_step(batch, self.optimizer)["loss"]

    def scattered(self, batch: dict) -> dict:
        """Return the arguments of the model itself."""
        return self.parallel.scatter((), batch, self.parallel.device_ids or [-1])[1][0]

    def predict(self, batch: dict) -> Any:
        return self.parallel(return_loss=False, rescale=True, **batch)


def smaller(config: str, work: Path, scale: float, multiple: int) -> str:
    """Return the path of the config, or of a copy with smaller images, whose sides are multiples of a number."""
    text = Path(config).read_text()
    found = re.search(r"^input_shape = \((\d+), (\d+)\)", text, re.M)
    if scale == 1 or found is None:
        return config
    size = ", ".join(
        str(max(int(int(number) * scale) // multiple, 1) * multiple) for number in found.groups()
    )
    path = work / f"smaller_{Path(config).stem.replace('-', '_')}.py"
    path.write_text(text.replace(found[0], f"input_shape = ({size})"))
    return str(path)


def entries_of(settings: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each dict or list in a config with each of its keys and values, the innermost ones first."""
    for key, value in list(settings.items() if isinstance(settings, dict) else enumerate(settings)):
        if isinstance(value, (dict, list)):
            yield from entries_of(value)
        yield settings, key, value


def without_randomness(settings: Any) -> None:
    """Switch dropout, GridMask, 16-bit attention and the rescoring of the plan off in a config, in place."""
    for part, key, value in entries_of(settings):
        if key in _VALUES and not isinstance(value, (dict, list)):
            part[key] = _VALUES[key]
        elif value == "MultiheadFlashAttention":
            part[key] = "MultiheadAttention"


def without_files(settings: Any, work: Path, anchors: dict) -> None:
    """Take pretrained weights out of a config, and replace files of anchors by random ones."""
    for part, key, value in entries_of(settings):
        if key == "pretrained" or (key == "init_cfg" and (value or {}).get("type") == "Pretrained"):
            part[key] = None
        elif isinstance(value, str) and value.endswith((".npy", ".npz")):
            shape, extent = next(
                (entry for name, entry in anchors.items() if name in Path(value).name), (None, 0)
            )
            if shape is None:
                raise KeyError(f"no shape is known for the anchors {value}")
            path = work / Path(value).name
            drawn = np.random.default_rng(0).uniform(-extent, extent, shape).astype(np.float32)
            if shape[-1] == 11:
                drawn[:, 3:6] = np.log([4.5, 1.9, 1.6])  # length, width, height
                drawn[:, [2, 8, 9, 10]] = 0
                drawn[:, 6:8] = drawn[:, 6:8] / np.linalg.norm(drawn[:, 6:8], axis=1, keepdims=True)
            if path.suffix == ".npy":
                np.save(path, drawn)
            else:
                np.savez(path, trajectory=drawn, trajectory_mask=np.ones(shape[:-1], np.float32))
            part[key] = str(path)


def drawn_infos(work: Path) -> list[dict]:
    """Draw driving scenes in nuScenes' form, and return the infos of their frames, with absolute paths."""
    scenes = work / "scenes"
    make_driving_scenes(scenes, 1, 1, 1, num_frames=4, image_size=(900, 1600))
    infos = list(load_infos(scenes / "driving_infos_train.npz")[0])
    for info, earlier in zip(infos, [None, *infos], strict=False):
        points = np.fromfile(scenes / info["lidar_path"], np.float32).reshape(-1, 3)
        info["lidar_path"] = str(work / Path(info["lidar_path"]).name)
        np.pad(points, ((0, 0), (0, 2))).tofile(info["lidar_path"])  # x, y, z, intensity and ring
        for camera in info["cams"].values():
            camera["data_path"] = str(scenes / camera["data_path"])
        same = earlier is not None and earlier["scene_token"] == info["scene_token"]
        info.update(
            prev=earlier["token"] if same else "", next="", can_bus=np.zeros(18)
        )  # for BEVFormer and MomAD
    return infos

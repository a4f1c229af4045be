"""MomAD, whose planning head asks nuScenes' tables which frame is a scene's first."""

import importlib
from pathlib import Path
from typing import Any

from .driving import Driving, drawn_infos

_CONFIGS = "projects.configs"
_HEADS = "projects.mmdet3d_plugin.models.motion.motion_planning_head_"


class MomAD(Driving):
    """The second stage of the open loop."""

    def imports(self) -> None:
        self.missing = {
            f"{_CONFIGS}.sparsedrive_small_stage2_{name}": f"{_CONFIGS}.MomAD_small_stage2_{name}"
            for name in ("roboAD", "roboAD_6s")
        }
        for stand_in in self.missing.values():
            # The head takes the number of samples in a batch from the config's module.
            importlib.import_module(stand_in).batch_size = 1
        super().imports()

    def build(self, work: Path, device: str, scale: float) -> Any:
        Tables.samples = {info["token"]: info for info in drawn_infos(work)}
        importlib.import_module(f"{_HEADS}roboAD").NuScenes = Tables
        return super().build(work, device, scale)


class Tables:
    """What takes the place of the development kit's tables: the frames of the driving scenes, by their tokens."""

    samples: dict[str, dict]

    def __init__(self, **arguments: Any) -> None:
        pass

    def get(self, table: str, token: str) -> dict:
        return self.samples[token]

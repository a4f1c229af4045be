"""The table of models that check_upstream.py knows. A checkout is recognised by a file that it holds."""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["RECIPES", "Recipe", "recognise"]


@dataclass(frozen=True)
class Recipe:
    """One model of one repository.

    Args:
        name: the name of the row in the table.
        config: the path of the config in the checkout, by which the checkout is recognised.
        kind: the class that builds and runs the model, as ``module.Class`` in this package.
        options: arguments of that class.
        folder: the folder of the checkout in which its own scripts run.
        needs: names of packages whose checkouts, where they are given too, are put on the path.
    """

    name: str
    config: str
    kind: str = "driving.Driving"
    options: dict[str, Any] = field(default_factory=dict)
    folder: str = "."
    needs: tuple[str, ...] = ()

    def runner(self) -> Any:
        """Return the object that builds and runs the model."""
        module, _, name = self.kind.rpartition(".")
        return getattr(importlib.import_module(f"upstream.{module}"), name)(self.config, **self.options)


_CONFIGS = "projects/configs"
RECIPES = (
    Recipe("SparseDrive stage 1", f"{_CONFIGS}/sparsedrive_small_stage1.py"),
    Recipe("SparseDrive stage 2", f"{_CONFIGS}/sparsedrive_small_stage2.py"),
    Recipe("Sparse4D v3", f"{_CONFIGS}/sparse4dv3_temporal_r50_1x8_bs6_256x704.py"),
    Recipe(
        "DiffusionDrive (nusc)",
        f"{_CONFIGS}/diffusiondrive_configs/diffusiondrive_small_stage2.py",
        options={"also": ("projects.mmdet3d_plugin.models.motion.motion_blocks_v11",)},
    ),
    Recipe(
        "MomAD",
        f"{_CONFIGS}/MomAD_small_stage2_roboAD.py",
        kind="momad.MomAD",
        folder="open_loop",
    ),
    Recipe("BridgeAD stage 1", f"{_CONFIGS}/BridgeAD_small_stage1.py"),
    Recipe("BridgeAD stage 2", f"{_CONFIGS}/BridgeAD_small_stage2.py"),
    Recipe("HiP-AD stage 2", f"{_CONFIGS}/hipad_b2d_stage2.py", kind="bench2drive.HiPAD"),
    Recipe(
        "SparseCoop (one vehicle)",
        f"{_CONFIGS}/griffin_50scenes_25m/vehicle-side/sparsecoop_v1-1_r50_448x800_bs2x8_100e.py",
        kind="griffin.SparseCoop",
    ),
    Recipe(
        "SparseDriveV2 (bench2drive) stage 1",
        f"{_CONFIGS}/sparsedrive_stage1.py",
        options={"dataset": "NuScenes3DDataset"},
    ),
    Recipe(
        "SparseDriveV2 (bench2drive) stage 2",
        f"{_CONFIGS}/sparsedrive_stage2.py",
        kind="bench2drive.SparseDriveV2",
        options={"dataset": "NuScenes3DDataset", "anchors": {"motion_6": ((9, 6, 6, 2), 10.0)}},
    ),
    Recipe("SparseDriveV2", "navsim/agents/sparsedrive/sparsedrive_config.py", kind="navsim.SparseDriveV2"),
    Recipe(
        "BEVFormer tiny",
        f"{_CONFIGS}/bevformer/bevformer_tiny.py",
        needs=("detectron2",),
    ),
    Recipe(
        "StreamPETR R50",
        f"{_CONFIGS}/StreamPETR/stream_petr_r50_flash_704_bs2_seq_24e.py",
        kind="streampetr.StreamPETR",
    ),
    Recipe("Deformable-DETR", "configs/r50_deformable_detr.sh", kind="detr.DeformableDETR"),
    Recipe(
        "Co-DETR (Deformable DETR)",
        f"{_CONFIGS}/co_deformable_detr/co_deformable_detr_r50_1x_coco.py",
        kind="codetr.CoDETR",
    ),
    Recipe("Co-DETR (DINO)", f"{_CONFIGS}/co_dino/co_dino_5scale_r50_1x_coco.py", kind="codetr.CoDETR"),
    Recipe("DINO", "config/DINO/DINO_4scale.py", kind="detr.DINO"),
    Recipe(
        "Mask2Former",
        "configs/coco/instance-segmentation/maskformer2_R50_bs16_50ep.yaml",
        kind="detr.Mask2Former",
        needs=("detectron2",),
    ),
)


def recognise(checkout: Path) -> list[Recipe]:
    """Return the recipes whose config is in the checkout. SparseDrive's configs are also in forks of it.

    Its recipes apply only where no other one does.
    """
    found = [recipe for recipe in RECIPES if (checkout / recipe.folder / recipe.config).is_file()]
    forks = [recipe for recipe in found if not recipe.name.startswith("SparseDrive stage")]
    return forks or found

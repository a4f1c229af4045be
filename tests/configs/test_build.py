"""Every model config builds; the published ones have the published names and shapes."""

import copy
import re

import pytest
import torch
from golden import published_shapes
from mmengine.config import Config
from programs import ROOT

from visdet.engine import load_config
from visdet.engine.config.packaged import packaged_configs
from visdet.engine.config.text import config_text
from visdet.engine.summary import model_summary
from visdet.registry import MODELS

CONFIGS = ROOT / "configs"
ZOO = {
    name: (parameters, flops)
    for name, parameters, flops in re.findall(
        r"^\| `([\w/-]+)` \| ([\d,]+) \| (.*?) \|", (ROOT / "docs" / "model_zoo.md").read_text(), re.MULTILINE
    )
}
PUBLISHED = {
    "deformable_detr/deformable-detr_r50_16xb2-50e_coco": "deformable_detr_mmdet_base",
    "deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco": "deformable_detr_mmdet_refine",
    "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco": "deformable_detr_mmdet_two_stage",
    "dino/dino-4scale_r50_8xb2-12e_coco": "dino-4scale_r50",
    "dino/dino-5scale_r50_8xb2-12e_coco": "dino-5scale_r50",
    "dino/dino-5scale_swin-l_8xb2-12e_coco": "dino-5scale_swin-l",
}


def build(path):
    with torch.device("meta"):
        return MODELS.build(Config.fromfile(path).model)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONFIGS.glob("*/*.py")) if not path.parent.name.startswith("_")],
    ids=lambda path: path.stem,
)
@pytest.mark.filterwarnings("ignore:(InstanceBank|MotionPlanningHead). no .*anchor file")
def test_config_builds_and_dumps(path):
    config = Config.fromfile(path)
    assert config.default_scope == "visdet"
    before = copy.deepcopy(config.model)
    with torch.device("meta"):
        model = MODELS.build(config.model)
    assert config.model == before
    assert model.training
    parameters = ZOO[path.relative_to(CONFIGS).with_suffix("").as_posix()][0]
    assert parameters == f"{sum(parameter.numel() for parameter in model.parameters()):,}"
    assert Config.fromstring(config_text(config.to_dict()), ".py").to_dict() == config.to_dict()


def test_the_model_zoo_lists_every_config():
    assert sorted(ZOO) == packaged_configs()


def test_the_flops_of_the_model_zoo_are_counted():
    assert ZOO["dino/dino_shapes"][1] == "0.373 G"
    assert model_summary(load_config("dino/dino_shapes")[0]).splitlines()[-2].endswith("  0.373 G")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_fit(name):
    published = published_shapes(PUBLISHED[name])
    own = build(CONFIGS / f"{name}.py").state_dict()
    assert {key: tuple(value.shape) for key, value in own.items()} == published


@pytest.mark.parametrize("stage, batch", [(1, 8), (2, 6)])
@pytest.mark.filterwarnings("ignore:(InstanceBank|MotionPlanningHead). no .*anchor file")
def test_published_sparsedrive_checkpoint_fits(stage, batch):
    own = build(CONFIGS / "sparsedrive" / f"sparsedrive_r50_stage{stage}_8xb{batch}_nuscenes.py").state_dict()
    published = published_shapes(f"sparsedrive_stage{stage}")
    assert {key: tuple(value.shape) for key, value in own.items()} == published


def test_shared_branches_are_stored_for_every_layer():
    model = build(CONFIGS / "deformable_detr" / "deformable-detr_r50_16xb2-50e_coco.py")
    assert model.bbox_head.cls_branches[0] is model.bbox_head.cls_branches[5]
    assert sum(parameter.numel() for parameter in model.parameters()) == 40_118_934


@pytest.mark.parametrize("stage", [1, 2])
def test_the_driving_demo_learns_all_boxes_that_it_is_evaluated_on(stage):
    config = Config.fromfile(CONFIGS / "sparsedrive" / f"sparsedrive_toy_stage{stage}.py")
    pipeline = config.train_dataloader.dataset.pipeline
    (learned,) = [step.class_dist_thred for step in pipeline if step.type == "CircleObjectRangeFilter"]
    learned = dict(zip(config.class_names, learned, strict=True))
    ranges = [metric.class_range for metric in config.test_evaluator if "class_range" in metric]
    assert len(ranges) == stage + 1
    assert all(reach <= learned[name] for of_metric in ranges for name, reach in of_metric.items())

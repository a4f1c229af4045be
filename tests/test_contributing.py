"""CONTRIBUTING's way of an image: each name that it gives is called, in its order."""

import functools
import inspect
import re

import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import Evaluator
from programs import ROOT
from tiny_driving import tiny_config
from training_steps import are_finite

from visdet.execution.staged_detector import StagedDetector
from visdet.models import DeformableDETR
from visdet.models.layers import MultiScaleDeformableAttention
from visdet.models.sparsedrive import DeformableFeatureAggregation, SparseDrive
from visdet.registry import DATASETS, METRICS, MODELS


@functools.cache
def rows():
    """Return the names of each row and column of CONTRIBUTING's table, such as rows()["training"][0]."""
    table = re.findall(r"^\| (inputs|training|prediction) \| `(.+?)` \| `(.+?)` \|$", text(), re.MULTILINE)
    return {row: [chain.split(" → ") for chain in chains] for row, *chains in table}


def text():
    return (ROOT / "CONTRIBUTING.md").read_text()


def shapes(tmp_path, mode):
    """Return the data set, the metric and the model of tiny images with one box."""
    config = Config.fromfile(ROOT / "configs" / "deformable_detr" / "deformable-detr_shapes.py")
    config.model.backbone.base_channels, config.model.neck.in_channels = 4, [8, 16, 32]
    generator = dict(num_train=1, num_val=1, image_size=64, num_workers=1)
    options = config[{"training": "train_dataloader", "prediction": "val_dataloader"}[mode]].dataset
    dataset = DATASETS.build({**options, "data_root": str(tmp_path / "shapes"), "generator": generator})
    metric = {**config.val_evaluator, "ann_file": str(tmp_path / "shapes/annotations/instances_val.json")}
    return dataset, METRICS.build(metric), MODELS.build(config.model), MultiScaleDeformableAttention


def drive(tmp_path, mode):
    """Return the data set, the metric and the model of frames of six tiny cameras."""
    config = Config.fromfile(ROOT / "configs" / "_base_" / "datasets" / "driving_scenes.py")
    options = config[{"training": "train_dataloader", "prediction": "val_dataloader"}[mode]].dataset
    augmentation = {**config.data_aug_conf, "final_dim": (48, 128), "H": 48, "W": 128}
    generator = dict(num_train=1, num_val=1, num_test=1, num_frames=2, image_size=(48, 128), num_workers=1)
    dataset = DATASETS.build(
        {
            **options,
            "data_root": str(tmp_path / "scenes"),
            "generator": generator,
            "data_aug_conf": augmentation,
        }
    )
    model = MODELS.build({**tiny_config(), "data_preprocessor": config.data_preprocessor})
    return dataset, METRICS.build(config.val_evaluator[0]), model, DeformableFeatureAggregation


class Walk:
    """Notes each name when what it stands for is called."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.names = []

    def noting(self, name, function):
        @functools.wraps(function)
        def call(*arguments, **keywords):
            self.names.append(name)
            return function(*arguments, **keywords)

        return call

    def watch(self, name, owner, attribute):
        self.monkeypatch.setattr(owner, attribute, self.noting(name, getattr(owner, attribute)))

    def watch_layers(self, model, kind):
        """Note when the first deformable layer runs, and when it calls an operator."""
        module = inspect.getmodule(kind)
        for layer in (part for part in model.modules() if isinstance(part, kind)):
            self.watch("layers", layer, "forward")
        for name, function in vars(module).copy().items():
            if inspect.isfunction(function) and function.__module__.startswith("visdet.ops."):
                self.watch("ops", module, name)


@pytest.mark.parametrize("mode", ["training", "prediction"])
@pytest.mark.parametrize("column, family", [(0, shapes), (1, drive)])
def test_an_image_goes_the_way_that_contributing_describes(column, family, mode, tmp_path, monkeypatch):
    dataset, metric, model, layer = family(tmp_path, mode)
    metric.dataset_meta = dataset.metainfo
    expected = rows()["inputs"][column] + rows()[mode][column]
    walk = Walk(monkeypatch)
    walk.watch("dataset", type(dataset), "__getitem__")
    walk.watch("transforms", dataset, "pipeline")
    walk.watch("evaluation", metric, "process")
    walk.watch_layers(model, layer)
    collate = walk.noting("collate", pseudo_collate)
    for name in set(expected) - {"dataset", "transforms", "collate", "layers", "ops", "evaluation"}:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, model)
        is_module = isinstance(getattr(owner, last), torch.nn.Module)
        walk.watch(name, *((getattr(owner, last), "forward") if is_module else (owner, last)))
    batch = collate([dataset[0]])
    model.train(mode == "training")
    if mode == "training":
        losses = model(**model.data_preprocessor(batch, True), mode="loss")
        assert are_finite(losses)
    else:
        Evaluator(metric).process(data_samples=model.val_step(batch), data_batch=batch)
    assert list(dict.fromkeys(walk.names)) == expected


def test_contributing_is_short():
    assert len(text().splitlines()) <= 150


@pytest.mark.parametrize("detector", [DeformableDETR, SparseDrive])
def test_detectors_have_the_methods_that_the_contract_names(detector):
    contract = (ROOT / "docs" / "contract.md").read_text()
    (item,) = re.findall(r"^3\. \*\*A model\*\*.*?(?=^4\.)", contract, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`([a-z_]+)`", item)
    assert StagedDetector.__abstractmethods__ < set(names)
    assert all(hasattr(detector, name) for name in names)

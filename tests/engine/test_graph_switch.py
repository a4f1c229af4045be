"""The config's ``graph``: what it builds of a model, with and without a GPU, and in several processes."""

import logging

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS

from visdet.engine.graphs.methods import graphs_for
from visdet.execution.staged_detector import StagedDetector, has_stages
from visdet.models import DeformableDETR
from visdet.models.sparsedrive.sparsedrive import SparseDrive


class Staged(StagedDetector, torch.nn.Sequential):
    """A model with the stages that graphs need."""

    def training_batch(self):
        pass

    predictions_and_costs = assign = losses = training_batch
    prediction_batch = detections = with_detections = training_batch


class OtherLosses(Staged):
    def losses(self):
        pass


class AnotherLoss(Staged):
    def loss(self):
        pass


class AnotherForward(Staged):
    def forward(self):
        pass


class AnotherTrainStep(OtherLosses):
    def train_step(self):
        pass


class OwnLossAndLaterStages(AnotherLoss):
    def losses(self):
        pass


BOTH = ["GraphedLoss", "GraphedUpdate", "GraphedAverage", "GraphedPrediction"]


@pytest.mark.parametrize(
    ("config", "has_gpu", "kind", "built"),
    [
        ({"graph": True}, True, Staged, BOTH),
        ({"graph": True}, False, Staged, []),
        ({"graph": False}, True, Staged, []),
        ({}, True, Staged, BOTH),
        ({}, True, torch.nn.Sequential, []),
        ({}, True, OtherLosses, BOTH),
        ({}, True, AnotherLoss, BOTH[3:]),
        ({}, True, AnotherForward, []),
        ({}, True, AnotherTrainStep, BOTH[3:]),
        ({}, True, OwnLossAndLaterStages, BOTH[3:]),
    ],
)
def test_what_the_config_and_the_model_build(config, has_gpu, kind, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    graphs = graphs_for(config, kind(), logging.getLogger("graph"))
    assert [type(graph).__name__ for graph in graphs.values()] == built


def test_a_method_of_the_model_itself_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = Staged()
    model.predict = lambda *_: None
    assert list(graphs_for({}, model, logging.getLogger("graph"))) == ["loss", "update", "average"]


@pytest.mark.parametrize("model", [DeformableDETR, SparseDrive])
def test_published_models_have_the_methods(model):
    assert all(has_stages(object.__new__(model), method) for method in ("loss", "predict"))


@MODEL_WRAPPERS.register_module()
class SplitModel(torch.nn.Module):
    """Stands for a wrapper that splits parameters over processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("obstacle", ["", "SyncBatchNorm", "SplitModel"])
def test_what_several_processes_replay(obstacle, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.set_level(logging.INFO)
    model = Staged(torch.nn.Linear(1, 1), torch.nn.Identity())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = SplitModel if obstacle == "SplitModel" else torch.nn.parallel.DistributedDataParallel
        wrapped = wrapper(model)
    finally:
        torch.distributed.destroy_process_group()
    if obstacle == "SyncBatchNorm":
        model[1] = torch.nn.SyncBatchNorm(1)
    graphs = graphs_for({}, wrapped, logging.getLogger("graph"))
    assert [type(graph).__name__ for graph in graphs.values()] == (BOTH[3:] if obstacle else BOTH)
    assert graphs["predict"].model is model and ("loss" not in graphs or graphs["loss"].wrapper is wrapped)
    assert obstacle in caplog.text and bool(caplog.text) == bool(obstacle)

"""The config's ``graph``: what it builds, and that training without a GPU is eager and says so."""

import logging

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS
from toy_run import losses, train

from visdet.engine.cuda_graphs import graphs_for


def test_training_without_a_gpu_is_eager_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = train(tmp_path / "plain", train_cfg__max_iters=3)
    graph = train(tmp_path / "graph", train_cfg__max_iters=3, graph=True)
    assert losses(graph) == losses(plain)
    assert len(losses(graph)) > 0
    log = next((tmp_path / "graph").rglob("*.log")).read_text()
    assert log.count("graph: CUDA graphs need a GPU") == 1


@pytest.mark.parametrize(
    ("config", "has_gpu", "built"),
    [
        ({"graph": True}, True, ["GraphedLoss", "GraphedPrediction"]),
        ({"graph": True}, False, []),
        ({"graph": False}, True, []),
        ({}, True, []),
    ],
)
def test_what_the_config_builds(config, has_gpu, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    model = torch.nn.Linear(1, 1)
    graphs = graphs_for(config, model, logging.getLogger("graph"))
    assert [type(graph).__name__ for graph in graphs] == built


@MODEL_WRAPPERS.register_module()
class SplitModel(torch.nn.Module):
    """Stands for a wrapper that splits parameters over processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("obstacle", ["", "SyncBatchNorm", "SplitModel"])
def test_what_several_processes_replay(obstacle, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Identity())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = SplitModel if obstacle == "SplitModel" else torch.nn.parallel.DistributedDataParallel
        wrapped = wrapper(model)
    finally:
        torch.distributed.destroy_process_group()
    if obstacle == "SyncBatchNorm":
        model[1] = torch.nn.SyncBatchNorm(1)
    graphs = graphs_for({"graph": True}, wrapped, logging.getLogger("graph"))
    assert [type(graph).__name__ for graph in graphs] == ["GraphedLoss"] * (not obstacle) + [
        "GraphedPrediction"
    ]
    assert all(graph.model is model for graph in graphs)
    assert obstacle in caplog.text and bool(caplog.text) == bool(obstacle)

"""The config's ``graph``: what it builds, and that training without a GPU is eager and says so."""

import logging

import pytest
import torch
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
    ("config", "has_gpu", "num_processes", "built"),
    [
        ({"graph": True}, True, 1, ["GraphedLoss", "GraphedPrediction"]),
        ({"graph": True}, True, 2, ["GraphedPrediction"]),
        ({"graph": True}, False, 1, []),
        ({"graph": False}, True, 1, []),
        ({}, True, 1, []),
    ],
)
def test_what_the_config_builds(config, has_gpu, num_processes, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    model = torch.nn.Linear(1, 1)
    graphs = graphs_for(config, model, num_processes, logging.getLogger("graph"))
    assert [type(graph).__name__ for graph in graphs] == built

"""Fixtures of the operators' tests."""

import pytest
import torch
from emulation import compiled

from visdet.ops import _library


@pytest.fixture(params=[False, True], ids=["any-order", "deterministic"])
def deterministic(request, device):
    """Run both ways: on CUDA the backward has a kernel that sorts (always, in this mode) and one that does not."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["kernels", "plain"])
def backend(request, monkeypatch):
    """Let visdet's kernels or plain torch serve the CPU."""
    if request.param == "plain":
        monkeypatch.setattr(_library, "is_loaded", lambda name: False)


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    """Compile ``PROGRAM`` of the test module for an emulated GPU. ``SHARED`` says how its shared memory is declared."""
    shared = getattr(request.module, "SHARED", ())
    return compiled(tmp_path_factory.mktemp("emulated"), request.module.PROGRAM, *shared)

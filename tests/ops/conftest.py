"""Fixtures of the operators' tests."""

import pytest
import torch


@pytest.fixture(params=[False, True], ids=["any-order", "deterministic"])
def deterministic(request, device):
    """Run both ways: on CUDA the backward has a kernel that sorts (always, in this mode) and one that does not."""
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)

"""Which tensors the operators with kernels for CUDA alone give to them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from visdet.ops.fused import _gpu_rows


def test_subclasses_have_no_kernel(monkeypatch):
    """A mode gives tensors of a GPU that need none."""
    monkeypatch.setattr(_gpu_rows, "is_built", lambda operator: True)
    with FakeTensorMode():
        fake = torch.empty(2, 8, device="cuda")
    assert fake.is_cuda and not _gpu_rows.has_kernel("dropout_add_layer_norm", fake)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_tensors_and_parameters_have_kernels(kind):
    rows = torch.zeros(2, 8, device="cuda")
    assert _gpu_rows.has_kernel("dropout_add_layer_norm", rows if kind is torch.Tensor else kind(rows))

"""The multilayer perceptrons of SparseDrive."""

import copy
import pickle

import pytest
import torch
from torch import nn

from visdet.models.sparsedrive import mlp
from visdet.models.sparsedrive.mlp import Perceptron, Scale, linear_relu_ln, side_by_side

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def perceptron(width, outputs, device):
    torch.manual_seed(0)
    layers = [*linear_relu_ln(width, 2, 2), nn.Linear(width, outputs), Scale([2.0] * outputs)]
    return Perceptron(*layers).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_perceptron_computes_what_its_layers_do(device, learns, is_autocast):
    module = perceptron(64, 11, device)
    x = torch.randn(2, 5, 64, device=device)
    expected = nn.Sequential.forward(module, x)
    with torch.set_grad_enabled(learns), torch.autocast(device, torch.bfloat16, enabled=is_autocast):
        output = module(x)
        in_full = module.in_full_precision(x.bfloat16() if is_autocast else x)
    assert output.requires_grad == learns
    tolerance = 0.1 if is_autocast else 1e-5
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
    assert in_full.dtype == torch.float32
    torch.testing.assert_close(in_full, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_perceptrons_side_by_side(device):
    torch.manual_seed(0)
    modules = [Perceptron(*linear_relu_ln(16, 1, 2, width)).to(device) for width in (3, 2)]
    x = torch.randn(4, 7, device=device)
    expected = torch.cat([modules[0](x[:, 1:4]), modules[1](x[:, 5:])], -1)
    torch.testing.assert_close(side_by_side(modules, x, (1, 5)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)],
        [nn.Linear(8, 8, bias=False), nn.ReLU()],
        [nn.ReLU(), nn.Linear(8, 8)],
        [nn.Linear(8, 8), nn.LayerNorm(8)],
        [nn.Linear(8, 8), Scale(3.0)],
        [nn.Linear(8, 8).double()],
        [nn.Linear(8, 8), Scale([1.0] * 8), nn.ReLU()],
    ],
)
def test_unknown_layers_run_one_by_one(layers):
    module = Perceptron(*layers).cuda()
    x = torch.randn(3, 8, device="cuda", dtype=next(module.parameters()).dtype)
    assert module.kernel_plan(x) is None
    torch.testing.assert_close(module(x), nn.Sequential(*layers)(x))


@pytest.mark.cuda
def test_hooks_and_other_layers_are_respected():
    module = perceptron(8, 3, "cuda")
    x = torch.randn(4, 8, device="cuda")
    expected = module(x)
    assert module.kernel_plan(x) is not None
    seen = []
    handle = module[0].register_forward_hook(lambda *_: seen.append(True))
    torch.testing.assert_close(module(x), expected)
    assert seen == [True]
    handle.remove()
    module[0] = nn.Linear(8, 8, device="cuda")
    assert module.kernel_plan(x) is not None and not torch.allclose(module(x), expected)
    torch.testing.assert_close(module(x), nn.Sequential.forward(module, x))


def test_a_plan_notices_what_becomes_of_its_layers(monkeypatch):
    monkeypatch.setattr(mlp, "has_kernel", lambda *_: True)
    module, x = perceptron(8, 3, "cpu"), torch.randn(4, 8)
    assert module.kernel_plan(x).tensors()[0] is module[0].weight
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.kernel_plan(x).tensors()[0] is other[0].weight
    handle = module[0].register_forward_hook(lambda *_: None)
    assert module.kernel_plan(x) is None
    handle.remove()
    module[0].forward = lambda x: x
    assert module.kernel_plan(x) is None
    del module[0].forward
    assert module.kernel_plan(x) is not None and module.double().kernel_plan(x) is None


def test_parameters_have_the_names_of_a_sequence():
    module = perceptron(8, 3, "cpu")
    published = nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8),
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8),
        nn.Linear(8, 3), Scale([1.0] * 3),
    )  # fmt: skip
    published.load_state_dict(module.state_dict())
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), published(x))

"""Residual blocks of ResNet that compute their activations again in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from visdet.models import ResNet
from visdet.models.backbones import recomputed_block as module
from visdet.models.backbones.recomputed_block import recomputed_block


def normalise(rows, residual, weight, bias, mean, variance, count, momentum, eps, relu):
    """Return what the operator returns, in plain torch."""
    images = rows.permute(0, 3, 1, 2)
    if count is not None:
        count += 1
    output = F.batch_norm(images.contiguous(), mean, variance, weight, bias, True, momentum, eps)
    output = output.permute(0, 2, 3, 1).contiguous()
    output = output if residual is None else output + residual
    return output.relu() if relu else output, torch.tensor(eps)


def normalise_backward(grad, rows, output, weight, bias, statistics, relu):
    """Return the gradients that the operator returns, by autograd."""
    rows, weight, bias = (x.detach().requires_grad_() for x in (rows, weight, bias))
    with torch.enable_grad():
        result = F.batch_norm(rows.flatten(0, 2), None, None, weight, bias, True, 0.1, float(statistics))
        result = result.view_as(rows)
    if relu:
        grad = grad * ((result if output is None else output) > 0)
    of_rows, of_weight, of_bias = torch.autograd.grad(result, (rows, weight, bias), grad)
    return of_rows, grad if output is not None else of_rows, torch.stack([of_weight, of_bias])


@pytest.fixture
def emulated(monkeypatch):
    """Let the blocks use kernels of a GPU that plain torch emulates, in float64 instead of float32."""
    operators = {"batch_norm_add_relu": normalise, "batch_norm_add_relu_backward": normalise_backward}
    fake = type("Operators", (), {})()
    for name, function in operators.items():
        setattr(fake, name, type("Operator", (), {"default": staticmethod(function)}))
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    monkeypatch.setattr(
        module, "torch", _With(torch, ops=_With(torch.ops, visdet=fake), float32=torch.float64)
    )


class _With:
    """An object with the attributes of another one, some of which are replaced."""

    def __init__(self, original, **replaced):
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name):
        return getattr(self._original, name)


def backbone(depth, with_cp, device, **options):
    torch.manual_seed(0)
    options = {"num_stages": 2, "strides": (1, 2), "dilations": (1, 1), "out_indices": (0, 1), **options}
    # With 8 channels, oneDNN 3.12 (torch 2.14) crashes in the backward of the shortcut's convolution by two threads.
    net = ResNet(depth, base_channels=16, norm_eval=False, with_cp=with_cp, **options)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.1)
    return net.to(device).train()


def step(net, device, dtype):
    torch.manual_seed(1)
    images = torch.randn(3, 3, 128, 192).to(device, next(net.parameters()).dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        maps = net(images)
    torch.manual_seed(2)
    sum((x * torch.randn(x.shape).to(x)).sum() / x[0, 0].numel() for x in maps).backward()
    return maps


def counted_calls(monkeypatch):
    calls = []
    original = module._Block.apply
    monkeypatch.setattr(module._Block, "apply", lambda *args: calls.append(1) or original(*args))
    return calls


def check(depth, device, dtype, monkeypatch, expected_calls, **options):
    calls = counted_calls(monkeypatch)
    plain, saving = backbone(depth, False, device, **options), backbone(depth, True, device, **options)
    if dtype == torch.float64:
        plain, saving = plain.double(), saving.double()
    expected, maps = step(plain, device, dtype), step(saving, device, dtype)
    assert len(calls) == expected_calls
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    for a, b in zip(maps, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
    for (name, a), b in zip(saving.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert (a.grad - b.grad).norm() <= tolerance * b.grad.norm() + 1e-6, name
    for (name, a), b in zip(saving.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("options", [{}, {"frozen_stages": 1}, {"style": "caffe"}])
@pytest.mark.parametrize(("depth", "blocks"), [(18, 4), (50, 7)])
def test_gradients_and_statistics_are_those_of_a_plain_block(depth, blocks, options, emulated, monkeypatch):
    if (
        "frozen_stages" in options
    ):  # neither the blocks of the first stage nor the one after it, whose input is fixed
        blocks -= {18: 3, 50: 4}[depth]
    check(depth, "cpu", torch.float64, monkeypatch, blocks, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "blocks"), [(18, 4), (50, 7)])
def test_gradients_on_a_gpu_are_as_exact_as_those_of_plain_blocks(depth, blocks, dtype, monkeypatch):
    calls = counted_calls(monkeypatch)
    exact, plain, saving = (
        backbone(depth, False, "cpu").double(),
        *(backbone(depth, cp, "cuda") for cp in (0, 1)),
    )
    step(exact, "cpu", torch.float64)
    for net in (plain, saving):
        step(net, "cuda", dtype)
    assert len(calls) == blocks
    reference = [p.grad for p in exact.parameters()]
    errors = [
        sum(
            (p.grad.double().cpu() - g).norm() / g.norm()
            for p, g in zip(net.parameters(), reference, strict=True)
        )
        for net in (plain, saving)
    ]
    assert errors[1] <= 1.2 * errors[0] + 1e-6
    for (name, a), b in zip(saving.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_other_devices_update_statistics_once_too(monkeypatch):
    check(18, "cpu", torch.float32, monkeypatch, 0)


def layers():
    conv, norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), module.BatchNorm2d(8)
    return [(conv.double(), norm.double())]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda conv, norm: norm.eval(),
        lambda conv, norm: conv.register_forward_hook(lambda *_: None),
        lambda conv, norm: setattr(norm, "momentum", None),
        lambda conv, norm: setattr(conv, "padding_mode", "reflect"),
        lambda conv, norm: norm.float(),
        lambda conv, norm: setattr(norm, "track_running_stats", False),
    ],
)
def test_layers_that_do_more_run_one_by_one(spoil, emulated):
    x = torch.randn(2, 8, 64, 64, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    main = layers()
    assert recomputed_block(x, main, None) is not None
    spoil(*main[0])
    assert recomputed_block(x, main, None) is None


def test_images_in_another_format_run_layer_by_layer(emulated):
    x = torch.randn(2, 8, 64, 64, dtype=torch.float64)
    assert recomputed_block(x, layers(), None) is None
    assert (
        recomputed_block(x[..., :4, :4].contiguous(memory_format=torch.channels_last), layers(), None) is None
    )

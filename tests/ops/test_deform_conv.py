"""deform_conv2d, modulated_deform_conv2d, their modules, and SAConv2d."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from visdet.ops import (
    DeformConv2d,
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    SAConv2d,
    _library,
    _torchvision,
    deform_conv2d,
    modulated_deform_conv2d,
)
from visdet.ops.deform_conv2d import deform_conv2d_reference
from visdet.ops.mmcv.deform_conv_layers import rename_offset_layers_on_load


def let_serve(backend, monkeypatch):
    """Let visdet's kernels, torchvision or plain torch serve the CPU."""
    if backend != "visdet":
        monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    if backend == "plain":
        monkeypatch.setattr(_torchvision, "serves", lambda device_type: False)
    elif backend == "torchvision" and not _torchvision.serves("cpu"):
        pytest.skip("torchvision's operators do not load")


@pytest.fixture(params=["visdet", "torchvision", "plain"])
def backend(request, monkeypatch):
    let_serve(request.param, monkeypatch)


def arguments(dtype=torch.float64, B=2, C=4, G=2, groups=2, H=6, W=7):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, C, H, W, generator=generator)
    weight = torch.randn(6, C // groups, 3, 2, generator=generator)
    height, width = (H + 2 * 2 - 2 * 2 - 1) // 2 + 1, W + 2 * 1 - 1
    offset = torch.randn(B, G * 2 * 6, height, width, generator=generator)
    mask = torch.rand(B, G * 6, height, width, generator=generator)
    bias = torch.randn(6, generator=generator)
    tensors = tuple(t.to(dtype) for t in (x, offset, mask, weight, bias))
    return tensors, ((2, 1), (2, 1), (2, 1))


def test_zero_offsets_are_the_convolution(backend):
    (x, offset, mask, weight, bias), settings = arguments()
    expected = F.conv2d(x, weight, None, *settings, groups=2)
    torch.testing.assert_close(deform_conv2d(x, 0 * offset, weight, *settings, 2, 2), expected)
    half = modulated_deform_conv2d(x, 0 * offset, 0 * mask + 0.5, weight, bias, *settings, 2, 2)
    torch.testing.assert_close(half, expected / 2 + bias[:, None, None])


def test_offsets_are_y_then_x(backend):
    x = torch.arange(12.0).view(1, 1, 3, 4)
    offset = torch.zeros(1, 2, 3, 4)
    offset[:, 0] = 1  # one row down
    offset[:, 1] = 0.5
    out = deform_conv2d(x, offset, torch.ones(1, 1, 1, 1))
    assert out[0, 0, 0].tolist() == [4.5, 5.5, 6.5, 3.5]  # the last blends 7 with the zero outside
    assert out[0, 0, 2].tolist() == [0, 0, 0, 0]


def test_plain_torch_agrees(backend):
    (x, offset, mask, weight, bias), settings = arguments()
    leaves = [t.requires_grad_() for t in (x, offset, mask, weight, bias)]
    served = modulated_deform_conv2d(*leaves, *settings, 2, 2)
    plain = deform_conv2d_reference(*leaves, *settings, 2)
    torch.testing.assert_close(served, plain)
    grad = torch.randn_like(served)
    for first, second in zip(*(torch.autograd.grad(o, leaves, grad) for o in (served, plain)), strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_torch_places_samples_in_float32(dtype):
    """16 bits hold neither the places of a map of 9 x 500 pixels nor their indices."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 2, 9, 500, generator=generator), torch.randn(3, 2, 3, 3, generator=generator)
    offset, mask = (
        torch.randn(1, 18, 9, 500, generator=generator),
        torch.rand(1, 9, 9, 500, generator=generator),
    )
    leaves = [t.to(dtype).requires_grad_() for t in (x, offset, mask, weight)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    settings = ((1, 1), (1, 1), (1, 1), 1)
    out, expected = (deform_conv2d_reference(*t, None, *settings) for t in (leaves, exact))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected.to(dtype), rtol=eps, atol=2e-4)  # float32 places: to 3e-5 pixels
    grads = [torch.autograd.grad(o.sum(), t) for o, t in ((out, leaves), (expected, exact))]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted.to(dtype), rtol=2e-2, atol=2e-2)


def test_plain_torch_counts_pixels_beyond_float32():
    x = torch.zeros(1, 1, 4100, 4100)
    x[0, 0, -1, -1] = 5  # the pixel 16809999, which float32 cannot count
    out = deform_conv2d_reference(
        x, torch.zeros(1, 2, 2, 2), None, torch.ones(1, 1, 1, 1), None, (4099, 4099), (0, 0), (1, 1), 1
    )
    assert out.flatten().tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_offset_decides_the_type(dtype, backend):
    (x, offset, mask, weight, bias), settings = arguments(torch.float32)
    out = modulated_deform_conv2d(x, offset.to(dtype), mask, weight, bias, *settings, 2, 2)
    assert out.dtype == dtype
    expected = modulated_deform_conv2d(x, offset.to(dtype).float(), mask, weight, bias, *settings, 2, 2)
    torch.testing.assert_close(out, expected.to(dtype))


def test_packs_start_as_plain_convolutions():
    x = torch.randn(2, 4, 6, 6)
    layer = DeformConv2dPack(4, 8, 3, padding=1, deform_groups=2)
    assert layer.conv_offset.out_channels == 2 * 2 * 9
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, padding=1), rtol=1e-4, atol=1e-5)
    modulated = ModulatedDeformConv2dPack(4, 8, 3, padding=1, deform_groups=2)
    assert modulated.conv_offset.out_channels == 2 * 3 * 9
    expected = F.conv2d(x, modulated.weight, padding=1) / 2
    torch.testing.assert_close(modulated(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_checkpoints_of_version_one(pack):
    model = torch.nn.ModuleDict(dict(conv2=pack(4, 4, 3, padding=1)))
    state = {
        k.replace("conv2.conv_offset", "conv2_offset"): torch.ones_like(v)
        for k, v in model.state_dict().items()
    }
    assert "conv2_offset.weight" in state
    missing, unexpected, errors = [], [], []
    model["conv2"]._load_from_state_dict(state, "conv2.", {}, True, missing, unexpected, errors)
    assert not missing and not errors
    assert set(state) == set(model.state_dict())  # renamed for the layers below
    assert model.state_dict()._metadata["conv2"]["version"] == 2


def _version_one(model):
    """Return the model's state dict as version 1 wrote it, with other numbers."""
    return {
        name.replace(".conv_offset.", "_offset."): torch.full_like(value, float(i + 1))
        for i, (name, value) in enumerate(model.state_dict().items())
    }


class Block(torch.nn.Module):
    def __init__(self, pack):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 4, 1)
        self.conv2 = pack(4, 4, 3, padding=1)


def model_of(pack):
    return torch.nn.Sequential(torch.nn.ModuleDict(dict(a=Block(pack))), pack(4, 4, 1), Block(pack))


@pytest.mark.parametrize("loader", ["torch", "mmengine", "mmengine.load_checkpoint"])
@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_every_loader_renames_the_offsets_of_version_one(pack, loader, tmp_path):
    model = model_of(pack)
    rename_offset_layers_on_load(model)
    state = _version_one(model)
    assert {"0.a.conv2_offset.weight", "1_offset.bias", "2.conv2_offset.bias"} <= set(state)
    expected = dict(zip(model.state_dict(), state.values(), strict=True))
    if loader == "torch":
        model.load_state_dict(state)
    else:
        checkpoint = pytest.importorskip("mmengine.runner.checkpoint")
        if loader == "mmengine":
            checkpoint.load_state_dict(model, state, strict=True)
        else:
            torch.save(dict(state_dict=state), tmp_path / "version_1.pth")
            checkpoint.load_checkpoint(model, str(tmp_path / "version_1.pth"), "cpu", strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    copied = copy.deepcopy(model)
    copied.load_state_dict(_version_one(model))  # the copy renames too
    model.load_state_dict(model.state_dict())  # version 2 stays as it is
    rename_offset_layers_on_load(model)  # a second call changes nothing
    model.load_state_dict(_version_one(model))


@pytest.mark.parametrize("loader", ["torch", "mmengine"])
@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_state_dicts_have_the_names_of_mmcvs_and_load_strictly(pack, loader):
    model = torch.nn.ModuleDict(dict(layer1=torch.nn.Sequential(Block(pack))))
    own = {"weight", "conv_offset.weight", "conv_offset.bias"}
    own |= {"bias"} if pack is ModulatedDeformConv2dPack else set()
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    assert {f"layer1.0.conv2.{name}" for name in own} == {name for name in state if ".conv2." in name}
    if loader == "torch":
        model.load_state_dict(state, strict=True)
    else:
        pytest.importorskip("mmengine.runner.checkpoint").load_state_dict(model, state, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.filterwarnings("ignore:.*is of version 1")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])
def test_offset_layers_that_are_not_loaded_are_named(pack, strict):
    model = model_of(pack)
    state = _version_one(model)
    refusal = pytest.raises(RuntimeError, match=r"Unexpected key.*0\.a\.conv2_offset\.weight")
    warning = pytest.warns(UserWarning, match=r"'0\.a\.conv2_offset\.weight' is not loaded; call .*_on_load")
    with warning, refusal if strict else contextlib.nullcontext():
        model.load_state_dict(state, strict=strict)


def test_the_operators_leave_torchs_modules_alone():
    """A hook of all modules would be called for every module of the process."""
    code = (
        "from torch import nn\n"
        "hooks = [name for name in vars(nn.modules.module) if name.startswith('_global_')]\n"
        "count = lambda: {name: len(getattr(nn.modules.module, name) or ()) for name in hooks}\n"
        "before = count()\n"
        "import visdet.ops\n"
        "assert hooks and count() == before, count()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("modulated", [False, True])
def test_taps_of_the_padding_have_no_gradient(modulated, backend):
    """Where offsets start, at 0, a tap at -1 counts nothing, as in mmcv; torchvision takes the slope inside."""
    x = torch.arange(1.0, 10).view(1, 1, 3, 3).double()
    offset = torch.zeros(1, 18, 3, 3, dtype=torch.float64, requires_grad=True)
    weight, mask = torch.ones(1, 1, 3, 3).double(), torch.ones(1, 9, 3, 3).double()
    out = (
        modulated_deform_conv2d(x, offset, mask, weight, None, 1, 1)
        if modulated
        else deform_conv2d(x, offset, weight, 1, 1)
    )
    torch.testing.assert_close(out, F.conv2d(x, weight, padding=1))
    (grad,) = torch.autograd.grad(out.sum(), offset)
    grad = grad.view(9, 2, 3, 3)
    assert not grad[:3, :, 0].any() and not grad[::3, :, :, 0].any()  # row -1 and column -1
    assert grad[4, 0].tolist() == [[3, 3, 3], [3, 3, 3], [-7, -8, -9]]  # the centre: down a row


def on(device, is_ordered, function, tensors, settings):
    """Return output and gradients on a device, with deterministic algorithms where ``is_ordered``, on the CPU."""
    leaves = [t.detach().to(device).requires_grad_() for t in tensors]
    torch.use_deterministic_algorithms(is_ordered)
    try:
        out = function(*leaves, *settings)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    return [t.detach().cpu() for t in (out, *grads)]


@pytest.mark.parametrize("use_deform", [False, True])
def test_saconv_blends_two_dilations(use_deform):
    torch.manual_seed(0)
    layer = SAConv2d(3, 5, 3, padding=1, bias=False, use_deform=use_deform)
    x = torch.randn(1, 3, 8, 8)
    flat = layer.weight.flatten(1)
    weight = (layer.weight - flat.mean(1)[:, None, None, None]) / (flat.var(1) + 1e-5).sqrt()[
        :, None, None, None
    ]
    small, large = (F.conv2d(x, weight, padding=d, dilation=d) for d in (1, 3))
    torch.testing.assert_close(layer(x), small, rtol=1e-4, atol=1e-4)  # the switch starts at 1
    torch.nn.init.constant_(layer.switch.bias, 0.25)
    torch.testing.assert_close(layer(x), 0.25 * small + 0.75 * large, rtol=1e-4, atol=1e-4)
    layer.weight_diff.data.fill_(0.1)
    assert not torch.allclose(layer(x), 0.25 * small + 0.75 * large, atol=1e-2)


def test_saconv_takes_a_plain_convolutions_weights():
    plain, layer = torch.nn.Conv2d(3, 5, 3), SAConv2d(3, 5, 3)
    layer.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(layer._get_weight(layer.weight), plain.weight)


def test_rejections():
    (x, offset, mask, weight, bias), settings = arguments()
    for call, message in [
        (lambda: deform_conv2d(x[0], offset, weight), r"deform_conv2d: input must be \[B, C, H, W\]"),
        (lambda: deform_conv2d(x, offset[:, 1:], weight, *settings, 2, 2), r"offset must be \[2, 24, 3, 8\]"),
        (lambda: deform_conv2d(x, offset, weight, *settings, 1, 2), "input must have 2 channels, got 4"),
        (
            lambda: deform_conv2d(x, offset, weight, *settings, 2, 3),
            "deform_groups must divide 4 channels, got 3",
        ),
        (
            lambda: deform_conv2d(x, offset, weight[1:], *settings, 2, 2),
            "weight must have a multiple of 2 output",
        ),
        (lambda: deform_conv2d(x[..., :1, :1], offset, weight), "is too small"),
        (lambda: deform_conv2d(x, offset, weight[0]), r"weight must be \[C', C / groups, KH, KW\], got "),
        (lambda: deform_conv2d(x, offset, weight, *settings, 0), "groups must be at least 1, got 0"),
        (
            lambda: deform_conv2d(x, offset, weight, *settings, 2, 0),
            "deform_groups must be at least 1, got 0",
        ),
        (lambda: deform_conv2d(x, offset, weight, (1, 0)), "stride must be at least 1, got 0"),
        (lambda: deform_conv2d(x, offset, weight, *settings, 2, 2, True), "bias must be False"),
        (
            lambda: modulated_deform_conv2d(x, offset, mask[:, 1:], weight, bias, *settings, 2, 2),
            r"mask must be \[2, 12, 3, 8\], got \[2, 11, 3, 8\]",
        ),
        (lambda: deform_conv2d(x, offset, weight, 1, 1, (1, 0)), "dilation must be at least 1, got 0"),
        (lambda: deform_conv2d(x, offset, weight, 1, (0, -1)), "padding must not be negative, got -1"),
        (
            lambda: deform_conv2d(x, offset.long(), weight, *settings, 2, 2),
            "offset must be of a floating-point type, got torch.int64",
        ),
        (
            lambda: modulated_deform_conv2d(x, offset, mask, weight, bias[:1], *settings, 2, 2),
            r"modulated_deform_conv2d: bias must be \[6\], got \[1\]",
        ),
        (
            lambda: modulated_deform_conv2d(x, offset, mask, weight, torch.zeros(2, 6), *settings, 2, 2),
            r"bias must be \[6\], got \[2, 6\]",
        ),
        (lambda: DeformConv2d(3, 4, 3, groups=2), "in_channels must divide by groups 2, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()

"""deform_conv2d, modulated_deform_conv2d, their modules, and SAConv2d."""

import contextlib
import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from calls import (
    assert_matches,
    gradients,
    in_a_process,
    in_order,
    kept_for_backward,
    refusals,
)
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.fuzz import sizes
from tests.fuzz.problem import HALVES, Draw, Operator, Problem, Seeded, largest, rand, wide_of
from tests.fuzz.sampling import NEAR
from visdet.ops import (
    DeformConv2d,
    DeformConv2dPack,
    ModulatedDeformConv2dPack,
    SAConv2d,
    deform_conv2d,
    modulated_deform_conv2d,
)
from visdet.ops.deform_conv2d import deform_conv2d_reference
from visdet.ops.mmcv.deform_conv_layers import rename_offset_layers_on_load

# Of the greatest number: operands and result of the products are rounded to the type, by half an eps each, and so are
# the gradients of the columns; torch's float32 products sum thousands of terms.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 1.5 * torch.finfo(torch.float16).eps,
}


class Case(NamedTuple):
    B: int = 2
    C: int = 16
    M: int = 8
    H: int = 6
    W: int = 7
    kernel: tuple = (3, 3)
    stride: tuple = (1, 1)
    padding: tuple = (1, 1)
    dilation: tuple = (1, 1)
    groups: int = 1
    G: int = 1
    step: int = 32
    masked: bool = True
    reach: float = 2.0  # pixels, of offsets

    @property
    def settings(self):
        return self.stride, self.padding, self.dilation, self.G

    def call(self, *tensors):
        return torch.ops.visdet.deform_conv2d(*tensors, *self.settings, self.step)

    def reference(self, *tensors):
        return deform_conv2d_reference(*tensors, *self.settings)

    def tensors(self, dtype, device):
        """Return input, offset, mask and weight."""
        draw = Seeded().normal
        KH, KW = self.kernel
        height, width = (
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, k, step, pad, dil in zip(
                (self.H, self.W), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        tensors = (
            draw(self.B, self.C, self.H, self.W),
            draw(self.B, self.G * 2 * KH * KW, height, width) * self.reach,
            draw(self.B, self.G * KH * KW, height, width).sigmoid() if self.masked else None,
            draw(self.M, self.C // self.groups, KH, KW),
        )
        return [None if t is None else t.to(device, dtype) for t in tensors]


CASES = {
    "usual": Case(),
    "no-mask": Case(masked=False),
    "no-offset": Case(reach=0.0),  # every tap of the padding at exactly -1
    "far": Case(reach=9.0),
    "settings": Case(C=4, M=6, kernel=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(2, 1), groups=2, G=2),
    "groups": Case(B=3, C=24, M=6, groups=3, G=2, step=2),
    "narrow-groups": Case(B=3, C=32, M=8, groups=4, step=2),
    "group-of-each-channel": Case(C=6, M=6, groups=6, G=2),
    "deform-groups": Case(C=64, G=4),
    "in-turns": Case(B=5, step=2),
    "odd-channels": Case(C=13, M=5),
    "three-channels": Case(B=1, C=3, M=5, H=9, W=9, kernel=(5, 7), stride=(2, 2), padding=(3, 2), G=3),
    "wide": Case(B=1, C=264, H=3, W=3, groups=2),
    "one-tap": Case(kernel=(1, 1), padding=(0, 0)),
    "one-place": Case(H=3, W=3, padding=(0, 0)),
    "one-pixel": Case(H=1, W=1),
    "two-tiles": Case(H=17, W=23),
    "panels-in-parts": Case(B=1, C=40, M=140, H=9, W=11),
    "groups-across-lines": Case(B=1, C=60, M=84, H=9, W=5, groups=3, G=5),
    "chunks": Case(B=2, C=64, M=10, H=52, W=81),  # 2 x 4212 places, of which a backward takes 7272 at a time
}


def _deformed(draw: Draw, modulated: bool) -> Problem:
    groups = draw.pick(1, 1, 1, 2, 3)
    deform_groups = draw.pick(1, 1, 2, 4)
    per = draw.pick(1, 2, 3, 5, 8)
    C, out_channels = groups * deform_groups * per, groups * draw.pick(1, 2, 3, 8, 17)
    B, H, W = draw.size(3), draw.size(14, 0), draw.size(14, 0)
    if draw.is_big:
        C, out_channels, H, W = 64 * groups * deform_groups // draw.pick(1, 2), 32 * groups, 17, 23
        C = C // (groups * deform_groups) * groups * deform_groups
    kernel = (draw.pick(1, 2, 3, 3), draw.pick(1, 3, 3, 5))
    stride, dilation, padding = ((draw.pick(1, 1, 2), draw.pick(1, 1, 3)) for _ in range(3))
    padding = (draw.pick(0, 1, 2), draw.pick(0, 1, 2))
    spans = [d * (k - 1) + 1 - 2 * p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    H, W = max(H, spans[0], 1), max(W, spans[1], 1)
    size = [(s - span) // step + 1 for s, span, step in zip((H, W), spans, stride, strict=True)]
    taps = kernel[0] * kernel[1]
    dtype = draw.dtype()
    offset = draw.numbers(B, deform_groups * 2 * taps, *size) * draw.pick(1.0, 3.0)
    offset = offset.round() if draw.chance(0.15) else offset
    tensors = {
        "input": draw.with_bad_numbers(draw.numbers(B, C, H, W)),
        "offset": draw.with_bad_numbers(offset),
        "weight": draw.with_bad_numbers(draw.numbers(out_channels, C // groups, *kernel)),
    }
    if modulated:
        tensors["mask"] = draw.with_bad_numbers(draw.uniform(-0.2, 1.0, B, deform_groups * taps, *size))
        tensors["bias"] = draw.numbers(out_channels)
    arguments: dict[str, Any] = {
        name: draw.place(tensor, dtype, name != "offset" or not draw.has_bad_numbers)
        for name, tensor in tensors.items()
    }
    if modulated and draw.chance(0.3):
        arguments["bias"] = None
    settings = dict(
        stride=stride, padding=padding, dilation=dilation, groups=groups, deform_groups=deform_groups
    )
    near = _near_whole(arguments["offset"])
    draw.leave_out(arguments["offset"], near)
    terms = C // groups * taps
    is_narrow = dtype in HALVES
    return Problem(
        {**arguments, **settings},
        differentiable=tuple(tensors),
        positions=("offset",),
        wide=wide_of(dtype),
        epsilon=torch.finfo(dtype).eps if is_narrow else None,  # columns are kept in the type of the tensors
        error_factor=8.0 if is_narrow else 64.0 + 16 * max(H, W) + terms + B * size[0] * size[1],
        skip={"offset": near},
    )


def _near_whole(offset: Tensor) -> Tensor:
    """Return a mask, True where an offset is so near to a whole number that its gradient may be either side's."""
    whole_parts = offset.detach().double()  # The taps of the kernel are at whole numbers.
    return (whole_parts - whole_parts.round()).abs() < NEAR


def _deformed_reference(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    deform_groups: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return deform_conv2d_reference(
        input, offset, mask, weight, stride, padding, dilation, deform_groups, bias=bias
    )


def _deformed_bounds(problem: Problem, bounds: dict[str, float]) -> None:
    bound_of = bounds.get
    given = problem.arguments
    input, weight = given["input"], given["weight"]
    factor = largest(given["mask"]) if given.get("mask") is not None else 1.0
    bias = largest(given["bias"]) if given.get("bias") is not None else 0.0
    per_output = weight[0].numel() if len(weight) else 0
    bounds["output"] = largest(input) * largest(weight) * per_output * factor + bias
    back = bound_of("grad_peak", 0.0) * largest(weight) * len(weight)  # the gradient of a column
    channels = input.shape[1] // given["deform_groups"]
    for name, bound in (
        ("input", max(bound_of("input", 0.0), back * factor)),
        ("offset", 4 * back * largest(input) * channels * factor),
        ("mask", back * largest(input) * channels),
        ("weight", bound_of("grad_total", 0.0) * largest(input) * factor),
        ("bias", bound_of("grad_total", 0.0)),
    ):
        if name in bounds:
            bounds[name] = bound


@st.composite
def _launches_of_deform_conv2d(draw: st.DrawFn) -> dict[str, Any]:
    B, H, W = draw(st.integers(0, 3)), draw(sizes.side) + 3, draw(sizes.side) + 3
    groups, deform_groups = draw(st.sampled_from([1, 2, 32])), draw(st.sampled_from([1, 2, 4]))
    C, out = 4 * groups * draw(st.integers(1, 8)), groups * draw(st.integers(1, 8))
    dtype, k = draw(sizes.value_types), draw(st.sampled_from([1, 3]))
    return {
        "input": sizes.empty(B, C, H, W, dtype=dtype),
        "offset": sizes.empty(B, deform_groups * 2 * k * k, H, W, dtype=dtype),
        "weight": sizes.empty(out, C // groups, k, k, dtype=dtype),
        "padding": k // 2,
        "groups": groups,
        "deform_groups": deform_groups,
    }


OPERATORS = (
    Operator(
        "deform_conv2d",
        deform_conv2d,
        lambda draw: _deformed(draw, False),
        _deformed_reference,
        _deformed_bounds,
        spoiled={"input": (0, 1), "offset": ("rank", 0, 1, 2, 3), "weight": (1, 2)},
        of_size=(
            lambda n: Problem(
                {
                    "input": rand(n, 4, 6, 7),
                    "offset": rand(n, 18, 6, 7),
                    "weight": rand(2, 4, 3, 3),
                    "padding": 1,
                },
                ("input", "offset", "weight"),
            ),
        ),
        launches=_launches_of_deform_conv2d(),
    ),
    Operator(
        "modulated_deform_conv2d",
        modulated_deform_conv2d,
        lambda draw: _deformed(draw, True),
        _deformed_reference,
        _deformed_bounds,
        spoiled={"input": (0, 1), "offset": ("rank", 0, 1, 2, 3), "mask": ("rank", 0, 1, 2, 3)},
    ),
)


@pytest.mark.parametrize("name", ["settings", "no-mask", "far"])
def test_values_are_torchvisions(name, backend):
    torchvision_ops, case = pytest.importorskip("torchvision.ops"), CASES[name]
    x, offset, mask, weight = case.tensors(torch.float64, "cpu")
    rest, groups = case.settings[:3], (case.groups, case.G)
    expected = torchvision_ops.deform_conv2d(x, offset, weight, None, *rest, mask)
    if mask is None:
        assert_close(deform_conv2d(x, offset, weight, *rest, *groups), expected)
    else:
        bias = torch.arange(float(case.M)).double()
        found = modulated_deform_conv2d(x, offset, mask, weight, bias, *rest, *groups)
        assert_close(found, expected + bias[:, None, None])


def test_plain_torch_counts_pixels_beyond_float32():
    x = torch.zeros(1, 1, 4100, 4100)
    x[0, 0, -1, -1] = 5  # the pixel 16809999, which float32 cannot count
    out = deform_conv2d_reference(
        x, torch.zeros(1, 2, 2, 2), None, torch.ones(1, 1, 1, 1), (4099, 4099), (0, 0), (1, 1), 1
    )
    assert out.flatten().tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("dtype", HALVES)
def test_the_offset_decides_the_type(dtype, backend):
    x, offset, mask, weight = CASES["settings"].tensors(torch.float32, "cpu")
    rest = mask, weight, None, *CASES["settings"].settings[:3]
    out = modulated_deform_conv2d(x, offset.to(dtype), *rest, 2, 2)
    assert out.dtype == dtype
    expected = modulated_deform_conv2d(x, offset.to(dtype).float(), *rest, 2, 2)
    assert_close(out, expected.to(dtype))


def test_packs_start_as_plain_convolutions():
    x = torch.randn(2, 4, 6, 6)
    layer = DeformConv2dPack(4, 8, 3, padding=1, deform_groups=2)
    assert layer.conv_offset.out_channels == 2 * 2 * 9
    assert_close(layer(x), F.conv2d(x, layer.weight, padding=1), rtol=1e-4, atol=1e-5)
    modulated = ModulatedDeformConv2dPack(4, 8, 3, padding=1, deform_groups=2)
    assert modulated.conv_offset.out_channels == 2 * 3 * 9
    expected = F.conv2d(x, modulated.weight, padding=1) / 2
    assert_close(modulated(x), expected, rtol=1e-4, atol=1e-5)


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


of_both_packs = pytest.mark.parametrize("pack", [DeformConv2dPack, ModulatedDeformConv2dPack])


@pytest.mark.parametrize("loader", ["torch", "mmengine", "mmengine.load_checkpoint"])
@of_both_packs
def test_every_loader_renames_the_offsets_of_version_one(pack, loader, tmp_path):
    model = model_of(pack)
    rename_offset_layers_on_load(model)
    state = _version_one(model)
    assert {"0.a.conv2_offset.weight", "1_offset.bias", "2.conv2_offset.bias"} <= set(state)
    assert {"0.a.conv2.weight", "0.a.conv2.conv_offset.weight", "1.conv_offset.bias"} <= set(
        model.state_dict()
    )
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
    assert_close(model.state_dict(), expected, rtol=0, atol=0)
    copied = copy.deepcopy(model)
    copied.load_state_dict(_version_one(model))  # the copy renames too
    model.load_state_dict(model.state_dict())  # version 2 stays as it is
    rename_offset_layers_on_load(model)  # a second call changes nothing
    model.load_state_dict(_version_one(model))


@pytest.mark.filterwarnings("ignore:.*is of version 1")
@pytest.mark.parametrize("strict", [False, True])
@of_both_packs
def test_offset_layers_that_are_not_loaded_are_named(pack, strict):
    model = model_of(pack)
    state = _version_one(model)
    refusal = pytest.raises(RuntimeError, match=r"Unexpected key.*0\.a\.conv2_offset\.weight")
    warning = pytest.warns(UserWarning, match=r"'0\.a\.conv2_offset\.weight' is not loaded; call .*_on_load")
    with warning, refusal if strict else contextlib.nullcontext():
        model.load_state_dict(state, strict=strict)


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
    assert_close(out, F.conv2d(x, weight, padding=1))
    (grad,) = torch.autograd.grad(out.sum(), offset)
    grad = grad.view(9, 2, 3, 3)
    assert not grad[:3, :, 0].any() and not grad[::3, :, :, 0].any()  # row -1 and column -1
    assert grad[4, 0].tolist() == [[3, 3, 3], [3, 3, 3], [-7, -8, -9]]  # the centre: down a row


@pytest.mark.parametrize("use_deform", [False, True])
def test_saconv_blends_two_dilations(use_deform):
    layer = SAConv2d(3, 5, 3, padding=1, bias=False, use_deform=use_deform)
    x = torch.randn(1, 3, 8, 8)
    mean, variance = (of(layer.weight, (1, 2, 3), keepdim=True) for of in (torch.mean, torch.var))
    weight = (layer.weight - mean) / (variance + 1e-5).sqrt()
    small, large = (F.conv2d(x, weight, padding=d, dilation=d) for d in (1, 3))
    assert_close(layer(x), small, rtol=1e-4, atol=1e-4)  # the switch starts at 1
    torch.nn.init.constant_(layer.switch.bias, 0.25)
    blended = 0.25 * small + 0.75 * large
    assert_close(layer(x), blended, rtol=1e-4, atol=1e-4)
    layer.weight_diff.data.fill_(0.1)
    assert not torch.allclose(layer(x), blended, atol=1e-2)


def test_saconv_takes_a_plain_convolutions_weights():
    plain, layer = torch.nn.Conv2d(3, 5, 3), SAConv2d(3, 5, 3)
    layer.load_state_dict(plain.state_dict(), strict=False)
    assert_close(layer._get_weight(layer.weight), plain.weight)


SETTINGS = CASES["settings"].settings[:3]
X, OFFSET, _, WEIGHT = CASES["settings"].tensors(torch.float32, "cpu")
SOUND = Case().tensors(torch.float32, "cpu")
REFUSED = [
    (lambda: deform_conv2d(X, OFFSET, WEIGHT, *SETTINGS, 1, 2), "input must have 2 channels, got 4"),
    (
        lambda: deform_conv2d(X, OFFSET, WEIGHT, *SETTINGS, 2, 3),
        "deform_groups must divide 4 channels, got 3",
    ),
    (
        lambda: deform_conv2d(X, OFFSET, WEIGHT[1:], *SETTINGS, 2, 2),
        "weight must have a multiple of 2 output",
    ),
    (lambda: deform_conv2d(X[..., :1, :1], OFFSET, WEIGHT), "is too small"),
    (lambda: deform_conv2d(X, OFFSET, WEIGHT, *SETTINGS, 2, 2, True), "bias must be False"),
    (lambda: DeformConv2d(3, 4, 3, groups=2), "in_channels must divide by groups 2, got 3"),
    *refusals(
        torch.ops.visdet.deform_conv2d,
        (*SOUND, [1, 1], [1, 1], [1, 1], 1, 32),
        (0, SOUND[0][0], r"input must be \[B, C, H, W\], got \[16, 6, 7\]"),
        (0, SOUND[0].int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        (0, SOUND[0][:, 1:], "input must have a multiple of 16 channels, got 15"),
        (0, SOUND[0][:, :, :0, :0], r"is too small for the kernel|offset must be"),
        (1, SOUND[1][:, 1:], r"offset must be \[2, 18, 6, 7\], got \[2, 17, 6, 7\]"),
        (1, SOUND[1].double(), "offset must be Float, the type of input, got Double"),
        (2, SOUND[2][:, 1:], r"mask must be \[2, 9, 6, 7\], got \[2, 8, 6, 7\]"),
        (
            3,
            SOUND[3][0],
            r"weight must be \[M, C / groups, KH, KW\] with positive sizes, got \[16, 3, 3\]",
        ),
        (3, SOUND[3][:7, :8], "weight must have a multiple of 2 output channels, got 7"),
        (3, SOUND[3].half(), "weight must be Float, the type of input, got Half"),
        (4, [1], "stride, padding and dilation must be pairs"),
        (4, [0, 1], "stride and dilation must be positive, padding must not be negative, got 0, 1, 1"),
        (5, [-1, 1], "padding must not be negative, got 1, 1, -1"),
        (6, [4, 1], r"input \[6, 7\] is too small for the kernel"),
        (7, 3, "deform_groups must divide the 16 channels of input, got 3"),
        (8, 0, "im2col_step must be at least 1, got 0"),
    ),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_definition(device, name, dtype):
    case = CASES[name]
    assert_matches(case.call, case.reference, case.tensors(dtype, device), TOLERANCE[dtype])


def test_half_precision_places_are_not_rounded(device):
    """At column 1000 float16 counts in halves of a pixel; a quarter must stay one."""
    x = (torch.arange(1024, device=device) % 2).half().view(1, 1, 1, 1024)
    offset = torch.zeros(1, 2, 1, 1024, dtype=torch.float16, device=device)
    offset[:, 1] = 0.25
    out = deform_conv2d(x, offset, torch.ones(1, 1, 1, 1, dtype=torch.float16, device=device))
    assert out.flatten().tolist() == [0.25, 0.75] * 512


def test_gradients_of_columns_may_pass_the_range_of_float16(device):
    """The product of weight and gradient is 16 * 100 * 100 = 160000; what becomes of it fits into float16."""
    ones = {"dtype": torch.float16, "device": device}
    x, mask = torch.full((1, 8, 6, 6), 0.01, **ones), torch.full((1, 9, 6, 6), 0.01, **ones)
    offset, weight = torch.full((1, 18, 6, 6), 0.25, **ones), torch.full((16, 8, 3, 3), 100.0, **ones)
    grad_output = torch.full((1, 16, 6, 6), 100.0, **ones)
    results = {}
    for dtype in (torch.float16, torch.float64):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, offset, mask, weight)]
        modulated_deform_conv2d(*leaves, bias=None, padding=1).backward(grad_output.to(dtype))
        results[dtype] = [leaf.grad.double() for leaf in leaves]
    for grad, wanted in zip(results[torch.float16], results[torch.float64], strict=True):
        peak = wanted.abs().max().item()
        assert peak < 65504
        assert_close(grad, wanted, rtol=5e-3, atol=5e-3 * peak)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets(isa):
    """All cases with kernels of at most this set, read once a process. The best set runs in the other tests."""
    script = f"""
import test_deform_conv as tests, torch
import visdet.ops
assert torch.ops.visdet.cpu_isa() <= ("baseline", "avx2").index({isa!r})
for name in tests.CASES:
    for dtype in tests.TOLERANCE:
        tests.test_matches_the_definition("cpu", name, dtype)
"""
    in_a_process(script, VISDET_CPU_ISA=isa)


def test_memory_is_bounded_and_inputs_are_saved():
    """Columns of this problem take 655 MB; a process holds copies of the images and a few tens of megabytes of them."""
    script = """
import resource
import torch
from visdet.ops import deform_conv2d
x, offset = torch.randn(4, 64, 160, 160), torch.randn(4, 50, 160, 160)
weight = torch.randn(8, 64, 5, 5)
leaves = [t.requires_grad_() for t in (x, offset, weight)]
deform_conv2d(x[:1, :, :8, :8], offset[:1, :, :8, :8], weight, padding=2).sum().backward()  # libraries are loaded
saved = []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
    out = deform_conv2d(*leaves, padding=2)
assert set(saved) == {t.data_ptr() for t in leaves}
out.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    columns = 4 * 160 * 160 * 25 * 64 * 4 >> 20
    assert int(in_a_process(script).split()[-1]) < columns / 3


@pytest.mark.parametrize("channels", [1, 16, 17])
def test_infinite_pixels_stay_where_they_are(channels):
    """Corners outside of the map are not read, so that they cannot turn 0 times infinity into NaN."""
    x = torch.full((1, channels, 3, 3), float("inf"))
    offset = torch.full((1, 2, 3, 3), -0.5)
    assert deform_conv2d(x, offset, torch.ones(1, channels, 1, 1)).eq(float("inf")).all()


cuda = pytest.mark.cuda


@cuda
def test_more_elements_than_32_bits_count():
    x = torch.zeros(1, 1024, 1456, 1460, dtype=torch.float16, device="cuda")
    x[0, :, -1, -1] = torch.arange(1024) % 4 / 4  # sums of which float16 has exactly
    assert x.numel() > 1 << 31
    offset = torch.zeros(1, 2, *x.shape[2:], dtype=torch.float16, device="cuda")
    weight = torch.ones(1, 1024, 1, 1, dtype=torch.float16, device="cuda")
    settings = ([1, 1], [0, 0], [1, 1], 1, 32)
    out = torch.ops.visdet.deform_conv2d(x, offset, None, weight, *settings)
    assert out[0, 0, -1, -1] == 384 and out.count_nonzero() == 1
    grad = torch.zeros_like(out)
    grad[0, 0, -1, -1] = 2
    grad_x, _, _, grad_weight = torch.ops.visdet.deform_conv2d_backward(
        grad, x, offset, None, weight, *settings, True, True, True
    )
    assert grad_x[0, :, -1, -1].eq(2).all() and grad_x[0, :, -1].count_nonzero() == 1024
    assert torch.equal(grad_weight.flatten().cpu(), (torch.arange(1024) % 4 / 2).half())


@cuda
def test_memory_is_bounded_and_inputs_are_saved_on_cuda():
    x, offset, _, weight = Case(B=48, C=64, M=64, H=128, W=128, masked=False).tensors(torch.float32, "cuda")
    leaves = [t.requires_grad_() for t in (x, offset, weight)]
    with kept_for_backward() as saved:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = deform_conv2d(*leaves, padding=1)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in leaves}
    columns = 48 * 128 * 128 * 64 * 9 * 4
    assert torch.cuda.max_memory_allocated() - before < columns / 3
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.sum().backward()
    assert torch.cuda.max_memory_allocated() - before < columns / 2


@cuda
def test_all_but_the_gradient_of_input_is_ordered():
    case = Case(C=64, M=16, H=20, W=21)
    tensors = case.tensors(torch.float32, "cuda")
    (output, grads), (again, grads_again) = (gradients(case.call, tensors) for _ in range(2))
    assert torch.equal(output, again)
    assert_close(grads[1:], grads_again[1:], rtol=0, atol=0)


@cuda
def test_a_gradient_may_be_asked_for_in_order_after_the_forward():
    x, offset, mask, weight = Case().tensors(torch.float32, "cuda")
    total = modulated_deform_conv2d(x.requires_grad_(), offset, mask, weight, padding=1).sum()
    (expected,) = torch.autograd.grad(total, x, retain_graph=True)
    with in_order():
        grads = [torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)
    assert_close(grads[0], expected, rtol=1e-4, atol=1e-4)

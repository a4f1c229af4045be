"""The kernels of roi_pool, sigmoid_focal_loss, carafe and soft_nms against their references, and their promises."""

import functools
from typing import NamedTuple

import pytest
import torch
from torch.library import opcheck

from visdet.ops import _library, carafe, nms, roi_pool, sigmoid_focal_loss, soft_nms
from visdet.ops.carafe import carafe_reference
from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.nms import SOFT_METHODS, soft_nms_reference
from visdet.ops.roi_pool import roi_pool_reference, roi_pool_with_argmax

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Setup(NamedTuple):
    """An operator's overload, its reference, arguments, and which of them have gradients."""

    op: object
    reference: object
    arguments: tuple
    differentiable: tuple


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rois_of(N, B, H, W, seed=0):
    """Return regions, some across the border, one of no image and one without area."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([W, H], dtype=torch.float64)
    corner = (torch.rand(N, 2, generator=generator, dtype=torch.float64) * 1.4 - 0.3) * size
    extent = torch.rand(N, 2, generator=generator, dtype=torch.float64) * size
    rois = torch.cat([torch.randint(0, B, (N, 1), generator=generator), corner, corner + extent], 1)
    if N > 3:
        rois[1, 0], rois[2, 0] = B, -1
        rois[3, 3:] = rois[3, 1:3] - 2
    return rois


def make_roi_pool(dtype, device, B=2, C=3, H=9, W=11, N=7, PH=3, PW=2, scale=0.7):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments = (
        draw(B, C, H, W).to(device, dtype),
        rois_of(N, B, H / scale, W / scale).to(device, wide),
        PH,
        PW,
        scale,
    )
    return Setup(torch.ops.visdet.roi_pool.default, roi_pool_reference, arguments, (0,))


def make_far_apart(dtype, device):
    """Two small regions in corners of a map: on the CPU each is laid out by itself."""
    setup = make_roi_pool(dtype, device, B=1, C=19, H=40, W=50, N=2, PH=3, PW=4, scale=1.0)
    rois = setup.arguments[1].new_tensor([[0, 1, 2, 6, 5], [0, 44.5, 33, 49, 41]])
    return setup._replace(arguments=(setup.arguments[0], rois, *setup.arguments[2:]))


def make_focal(dtype, device, N=13, C=7, gamma=2.0, weighted=True):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target = torch.randint(-1, C + 2, (N,), generator=torch.Generator().manual_seed(1))
    weight = draw(C if weighted else 0, seed=2).abs().to(device, wide)
    arguments = ((draw(N, C) * 4).to(device, dtype), target.to(device), weight, gamma, 0.3)
    op = torch.ops.visdet.sigmoid_focal_loss.default
    return Setup(op, sigmoid_focal_loss_reference, arguments, (0,))


def make_carafe(dtype, device, B=2, C=6, H=5, W=7, K=3, G=2, s=2):
    masks = draw(B, G * K * K, H * s, W * s, seed=1)
    arguments = (draw(B, C, H, W).to(device, dtype), masks.to(device, dtype), K, G, s)
    return Setup(torch.ops.visdet.carafe.default, carafe_reference, arguments, (0, 1))


CASES = {
    "roi_pool": make_roi_pool,
    "roi_pool-large-bins": functools.partial(make_roi_pool, H=40, W=50, PH=1, PW=3, N=4, C=1),
    "roi_pool-many-bins": functools.partial(make_roi_pool, PH=14, PW=13, N=5, C=17, scale=1.0),
    "roi_pool-far-apart": make_far_apart,
    "roi_pool-one-pixel": functools.partial(make_roi_pool, H=1, W=1),
    "focal": make_focal,
    "focal-one-class": functools.partial(make_focal, N=333, C=1, weighted=False),
    "focal-80": functools.partial(make_focal, N=70, C=80, gamma=1.5, weighted=False),
    "focal-gamma-0": functools.partial(make_focal, N=5, C=33, gamma=0.0),
    "focal-packed": functools.partial(make_focal, N=9, C=64),
    "carafe": make_carafe,
    "carafe-wide": functools.partial(make_carafe, B=1, C=9, H=3, W=37, K=5, G=1),
    "carafe-one": functools.partial(make_carafe, B=1, C=2, H=1, W=1, K=7, G=2, s=3),
    "carafe-no-scale": functools.partial(make_carafe, C=20, G=1, K=1, s=1),
}
EMPTY = {
    "roi_pool-no-region": functools.partial(make_roi_pool, N=0),
    "roi_pool-no-channel": functools.partial(make_roi_pool, C=0),
    "roi_pool-no-image": functools.partial(make_roi_pool, B=1, H=0),
    "focal-no-row": functools.partial(make_focal, N=0),
    "focal-no-class": functools.partial(make_focal, C=0),
    "carafe-no-image": functools.partial(make_carafe, B=0),
    "carafe-no-channel": functools.partial(make_carafe, C=0),
    "carafe-no-row": functools.partial(make_carafe, H=0),
}


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


def run(function, setup, grad_output=None, exact=False):
    """Return the output and the gradients, of the arguments in float64 on the CPU if ``exact``."""
    arguments = [
        a.double().cpu() if exact and isinstance(a, torch.Tensor) and a.is_floating_point()
        else a.cpu() if exact and isinstance(a, torch.Tensor) else a
        for a in setup.arguments
    ]  # fmt: skip
    leaves = [arguments[i].detach().clone().requires_grad_() for i in setup.differentiable]
    for i, leaf in zip(setup.differentiable, leaves, strict=True):
        arguments[i] = leaf
    output = first_of(function(*arguments))
    if grad_output is None:
        grad_output = draw(*output.shape, seed=5).to(output)
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.to(output), allow_unused=True)


def assert_near(actual, expected, dtype):
    scale = max(expected.abs().max().item(), 1e-30) if expected.numel() else 1.0
    assert actual.shape == expected.shape and actual.dtype == dtype
    torch.testing.assert_close(actual.double().cpu() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, device):
    setup = CASES[case](dtype, device)
    # Regions, which round to bins, stay in the type the operator computes them in.
    function = setup.reference if "roi_pool" not in case else reference_of_pooled
    output, grads = run(setup.op, setup)
    grad_output = draw(*output.shape, seed=5).to(dtype).double()
    expected, expected_grads = run(function, setup, grad_output, exact="roi_pool" not in case)
    assert_near(output, expected.double().cpu(), dtype)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_near(grad, wanted.double().cpu(), dtype)


def reference_of_pooled(input, rois, *settings):
    return roi_pool_reference(input, rois, *settings)[0]


@pytest.mark.parametrize("device", DEVICES)
def test_argmax_is_the_references(device):
    for case in (name for name in CASES if "roi_pool" in name):
        setup = CASES[case](torch.float32, device)
        expected = roi_pool_reference(*(a.cpu() if torch.is_tensor(a) else a for a in setup.arguments))
        for found, wanted in zip(setup.op(*setup.arguments), expected, strict=True):
            assert torch.equal(found.cpu(), wanted) and found.dtype == wanted.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_regions_without_end_have_a_result(device):
    values = draw(1, 2, 5, 6).float()
    inf, nan = float("inf"), float("nan")
    boxes = [
        (0, 0, inf, 3),
        (-inf, 0, inf, 3),
        (nan, 0, 3, 3),
        (0, 0, nan, nan),
        (1e30, 0, 2e30, 3),
        (-1e30, 0, 1e30, 9),
    ]
    rois = torch.tensor([(0, *box) for box in boxes] + [(nan, 0, 0, 3, 3), (1e30, 0, 0, 3, 3)])
    found = roi_pool_with_argmax(values.to(device), rois.to(device), (2, 2), 1.0)
    for one, wanted in zip(found, roi_pool_reference(values, rois, 2, 2, 1.0), strict=True):
        assert torch.equal(one.cpu(), wanted)
    assert (found[1].cpu() >= 0).any() and (found[1].cpu() < 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_not_a_number_is_never_the_maximum(device):
    values = torch.tensor(
        [[[[float("nan"), 1.0, -float("inf")], [2.0, float("nan"), float("inf")]]]], device=device
    )
    rois = torch.tensor(
        [[0.0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 2, 0, 2, 0], [0, 0, 0, 2, 1]], device=device
    )
    pooled, argmax = roi_pool_with_argmax(values, rois, (1, 1), 1.0)
    assert argmax.flatten().tolist() == [3, 1, 0, 2, 5]
    assert pooled.flatten().nan_to_num(7.0).tolist() == [2, 1, 7, -float("inf"), float("inf")] or (
        pooled[2].isnan().all() and pooled[3].isneginf().all() and pooled[4].isposinf().all()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_of_extreme_logits(dtype, device):
    logits = torch.tensor(
        [[0.0, 1e-8, -1e-8, 30.0, -30.0, 87.5, -87.5, 700.0, -700.0, 1e30, -1e30]], dtype=dtype, device=device
    )
    for target in (11, 3, 4, 9):
        arguments = (logits, torch.tensor([target], device=device), logits.new_empty(0), 2.0, 0.25)
        found = torch.ops.visdet.sigmoid_focal_loss(*arguments)
        expected = sigmoid_focal_loss_reference(
            logits.double(), *arguments[1:2], logits.double().new_empty(0), 2.0, 0.25
        )
        rtol = 1e-12 if dtype == torch.float64 else 1e-5 if device == "cpu" else 5e-5  # __expf
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-37)
        grad = torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(logits), *arguments)
        assert grad.isfinite().all()
    nan = torch.full((1, 20), float("nan"), device=device, dtype=dtype)
    arguments = (nan, torch.tensor([0], device=device), logits.new_empty(0), 2.0, 0.25)
    assert torch.ops.visdet.sigmoid_focal_loss(*arguments).isnan().all()
    assert torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(nan), *arguments).isnan().all()


@pytest.mark.parametrize("case", ["roi_pool", "focal", "focal-gamma-0", "carafe", "carafe-one"])
def test_gradients_numerically(case):
    setup = CASES[case](torch.float64, "cpu")
    leaves = tuple(setup.arguments[i].requires_grad_() for i in setup.differentiable)

    def function(*leaves):
        arguments = list(setup.arguments)
        for i, leaf in zip(setup.differentiable, leaves, strict=True):
            arguments[i] = leaf
        return first_of(setup.op(*arguments))

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["roi_pool", "focal", "carafe"])
def test_registration(case, device):
    setup = CASES[case](torch.float32, device)
    for i in setup.differentiable:
        setup.arguments[i].requires_grad_()
    opcheck(setup.op, setup.arguments)
    output = setup.op(*setup.arguments)
    tensors = [a.detach() for a in setup.arguments if torch.is_tensor(a)]
    settings = [a for a in setup.arguments if not torch.is_tensor(a)]
    grad = torch.ones_like(first_of(output)).detach()
    if case == "roi_pool":
        B, _, H, W = tensors[0].shape
        opcheck(torch.ops.visdet.roi_pool_backward.default, (grad, tensors[1], output[1], B, H, W))
    else:
        opcheck(
            getattr(torch.ops.visdet, f"{setup.op._schema.name.split('::')[1]}_backward").default,
            (grad, *tensors, *settings),
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EMPTY)
def test_sizes_of_zero(case, dtype, device):
    setup = EMPTY[case](dtype, device)
    output, grads = run(setup.op, setup)
    expected = first_of(setup.reference(*setup.arguments))
    assert torch.equal(output, expected) and output.dtype == dtype
    for i, grad in zip(setup.differentiable, grads, strict=True):
        assert grad.shape == setup.arguments[i].shape and not grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["roi_pool", "focal", "focal-packed", "carafe"])
def test_strides_do_not_matter(case, device):
    setup = CASES[case](torch.float32, device)

    def strided(a):
        if not torch.is_tensor(a) or a.numel() == 0:
            return a
        return (
            torch.stack([a, a + 1], -1)[..., 0]
            if a.dim() == 1
            else a.transpose(0, 1).contiguous().transpose(0, 1)
        )

    moved = setup._replace(arguments=tuple(map(strided, setup.arguments)))
    for (out, grads), (wanted, wanted_grads) in [(run(setup.op, moved), run(setup.op, setup))]:
        assert torch.equal(out, wanted)
        for grad, wanted in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(grad, wanted)
    output = first_of(setup.op(*setup.arguments))
    one = torch.ones((), device=device).expand(output.shape)  # the gradient of a sum
    for first, second in zip(
        run(setup.op, setup, one)[1], run(setup.op, setup, one.contiguous())[1], strict=True
    ):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["roi_pool-many-bins", "focal-80", "carafe"])
def test_threads_do_not_change_a_bit(case, dtype):
    setup, before, results = CASES[case](dtype, "cpu"), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(run(setup.op, setup))
    finally:
        torch.set_num_threads(before)
    for output, grads in results[1:]:
        assert all(map(torch.equal, (output, *grads), (results[0][0], *results[0][1])))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["roi_pool-many-bins", "roi_pool-one-pixel", "focal", "carafe"])
def test_deterministic_backward(case, device):
    setup = CASES[case](torch.float32, device)
    expected = run(setup.op, setup)[1]
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(setup.op, setup)[1], run(setup.op, setup)[1]
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


ROIS = rois_of(5, 2, 9, 11)
PUBLIC = {
    "roi_pool": (lambda x: roi_pool(x, ROIS.to(x), (3, 2)), (2, 3, 9, 11)),
    "sigmoid_focal_loss": (
        lambda x: sigmoid_focal_loss(x, torch.arange(len(x), device=x.device) % 6, reduction="sum"),
        (9, 5),
    ),
    "carafe": (
        lambda x: carafe(x, x[:, :1].expand(-1, 9, -1, -1).repeat(1, 1, 2, 2).softmax(1), 3, 1, 2),
        (2, 3, 4, 5),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PUBLIC)
def test_compiles_to_one_graph(name, device):
    function, shape = PUBLIC[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for extra in (0, 1):
        x = draw(shape[0] + extra, *shape[1:]).float().to(device).requires_grad_()
        expected, found = function(x), compiled(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", PUBLIC)
def test_exports(name):
    function, shape = PUBLIC[name]

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x = draw(*shape).float()
    program = torch.export.export(Module(), (x,))
    torch.testing.assert_close(program.module()(x), function(x))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_keeps_the_type(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for function, shape in PUBLIC.values():
            assert function(draw(*shape).float().to(device)).dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "position", "replacement", "message"),
    [
        ("roi_pool", 0, lambda t: t[0], r"roi_pool: input must be \[B, C, H, W\], got \[3, 9, 11\]"),
        (
            "roi_pool",
            0,
            lambda t: t.int(),
            "roi_pool: input must be float64, float32, float16 or bfloat16, got Int",
        ),
        ("roi_pool", 1, lambda t: t[:, 1:], r"roi_pool: rois must be \[N, 5\], got \[7, 4\]"),
        (
            "roi_pool",
            1,
            lambda t: t.double(),
            "roi_pool: rois must be Float for input of type Float, got Double",
        ),
        ("roi_pool", 2, lambda _: 0, "roi_pool: output_size must be positive, got 0 x 2"),
        ("focal", 0, lambda t: t[0], r"sigmoid_focal_loss: input must be \[N, C\], got \[7\]"),
        ("focal", 0, lambda t: t.int(), "input must be float64, float32, float16 or bfloat16, got Int"),
        ("focal", 1, lambda t: t[1:], r"target must be \[13\], got \[12\]"),
        ("focal", 1, lambda t: t.int(), "target must be int64, got Int"),
        ("focal", 2, lambda t: t[1:], r"weight must be \[7\] or empty, got \[6\]"),
        ("focal", 2, lambda t: t.double(), "weight must be Float for input of type Float, got Double"),
        ("carafe", 0, lambda t: t[0], r"carafe: features must be \[B, C, H, W\], got \[6, 5, 7\]"),
        ("carafe", 0, lambda t: t.int(), "features must be float64, float32, float16 or bfloat16, got Int"),
        ("carafe", 1, lambda t: t[:, 1:], r"masks must be \[2, 18, 10, 14\], got \[2, 17, 10, 14\]"),
        ("carafe", 1, lambda t: t.double(), "masks must be Float, the type of features, got Double"),
        ("carafe", 2, lambda _: 2, "kernel_size must be odd and below 256, got 2"),
        ("carafe", 3, lambda _: 4, "features must have a multiple of 4 channels, got 6"),
        ("carafe", 4, lambda _: 0, "scale_factor must be from 1 to 255, got 0"),
    ],
)
def test_rejections(case, position, replacement, message):
    setup = CASES[case](torch.float32, "cpu")
    arguments = list(setup.arguments)
    arguments[position] = replacement(arguments[position])
    with pytest.raises(RuntimeError, match=message):
        setup.op(*arguments)


def test_rejections_of_gradients():
    setup = make_roi_pool(torch.float32, "cpu")
    pooled, argmax = setup.op(*setup.arguments)
    rois, backward = setup.arguments[1], torch.ops.visdet.roi_pool_backward
    for arguments, message in [
        ((pooled[1:], rois, argmax, 2, 9, 11), r"grad_output must be \[7, C, PH, PW\], got \[6, 3, 3, 2\]"),
        ((pooled, rois, argmax[1:], 2, 9, 11), r"argmax must be \[7, 3, 3, 2\], got \[6, 3, 3, 2\]"),
        ((pooled, rois, argmax.long(), 2, 9, 11), "argmax must be int32, got Long"),
        ((pooled, rois, argmax, -2, 9, 11), "input's sizes must not be negative, got -2, 9, 11"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            backward(*arguments)
    logits, *rest = make_focal(torch.float32, "cpu").arguments
    for grad, message in [
        (logits[1:], r"grad_output must be \[13, 7\], got \[12, 7\]"),
        (logits.double(), "grad_output must be Float, the type of input, got Double"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.visdet.sigmoid_focal_loss_backward(grad, logits, *rest)
    setup = make_carafe(torch.float32, "cpu")
    with pytest.raises(RuntimeError, match=r"grad_output must be \[2, 6, 10, 14\], got \[2, 6, 5, 7\]"):
        torch.ops.visdet.carafe_backward(setup.arguments[0], *setup.arguments)


def soft_boxes(N, dtype, grid=False):
    generator = torch.Generator().manual_seed(N)
    corner = torch.rand(N, 2, generator=generator) * 60
    extent = torch.rand(N, 2, generator=generator) * 40 + 1
    scores = torch.rand(N, generator=generator)
    if grid:  # many equal overlaps and scores
        corner, extent, scores = corner.round(), torch.full_like(extent, 20), (scores * 8).round() / 8
    return torch.cat([corner, corner + extent], 1).to(dtype), scores.to(dtype)


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("N", [0, 1, 2, 15, 16, 17, 300])
@pytest.mark.parametrize("method", range(3))
def test_soft_nms_matches_reference(method, N, dtype, grid):
    boxes, scores = soft_boxes(N, dtype, grid)
    for offset, min_score in ((0, 1e-3), (1, 0.2)):
        settings = (0.3, 0.5, min_score, method, offset)
        dets, keep = torch.ops.visdet.soft_nms(boxes, scores, *settings)
        expected, expected_keep = soft_nms_reference(boxes, scores, *settings)
        assert torch.equal(keep, expected_keep)
        torch.testing.assert_close(dets, expected, rtol=1e-5 if dtype == torch.float32 else 1e-11, atol=0)


@pytest.mark.parametrize("method", SOFT_METHODS)
def test_soft_nms_of_what_is_no_box(method):
    boxes, scores = soft_boxes(20, torch.float64)
    boxes[3], boxes[5, 2], boxes[7] = boxes[3, 0], float("nan"), float("inf")  # no area, no number, no end
    scores[2], scores[9], scores[11] = float("nan"), float("inf"), -float("inf")
    settings = (0.3, 0.5, 1e-3, SOFT_METHODS.index(method), 0)
    found, expected = (
        torch.ops.visdet.soft_nms(boxes, scores, *settings),
        soft_nms_reference(boxes, scores, *settings),
    )
    assert torch.equal(found[1], expected[1]) and found[1][-1] == 2
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)


def test_soft_nms_registration():
    boxes, scores = soft_boxes(9, torch.float32)
    opcheck(torch.ops.visdet.soft_nms.default, (boxes, scores, 0.3, 0.5, 1e-3, 1, 0))
    program = torch.export.export(SoftNms(), (boxes, scores))
    for found, wanted in zip(program.module()(boxes, scores), soft_nms(boxes, scores), strict=True):
        assert torch.equal(found, wanted)


class SoftNms(torch.nn.Module):
    def forward(self, boxes, scores):
        return soft_nms(boxes, scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3, 5), torch.zeros(3)), r"soft_nms: boxes must be \[N, 4\], got \[3, 5\]"),
        ((torch.zeros(3, 4).half(), torch.zeros(3)), "soft_nms: boxes must be float64 or float32, got Half"),
        ((torch.zeros(3, 4), torch.zeros(2)), r"soft_nms: scores must be \[3\], got \[2\]"),
        ((torch.zeros(3, 4), torch.zeros(3).double()), "scores must be Float, the type of boxes, got Double"),
        ((torch.zeros(3, 4), torch.zeros(3), 0.3, 0.5, 0.0, 3), "method must be 0, 1 or 2, got 3"),
        ((torch.zeros(3, 4), torch.zeros(3), 0.3, 0.0, 0.0, 2), "sigma must be positive, got 0"),
    ],
)
def test_soft_nms_rejections(arguments, message):
    settings = (0.3, 0.5, 0.0, 1, 0)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.visdet.soft_nms(*arguments, *settings[len(arguments) - 2 :])
    with pytest.raises(ValueError, match="soft_nms: sigma must be positive, got 0"):
        soft_nms(torch.zeros(3, 4), torch.zeros(3), sigma=0, method="gaussian")


def test_without_the_library_the_reference_runs(monkeypatch):
    boxes, scores = soft_boxes(30, torch.float32)
    x, logits = draw(1, 4, 3, 3).float(), draw(5, 3).float()
    masks, target, rois = (
        draw(1, 9, 6, 6).float(),
        torch.tensor([0, 3, 1, 2, 0]),
        torch.tensor([[0.0, 0, 0, 2, 2]]),
    )

    def everything():
        return [
            *soft_nms(boxes, scores),
            roi_pool(x, rois, 2),
            carafe(x, masks, 3, 1, 2),
            sigmoid_focal_loss(logits, target),
        ]

    served = everything()
    monkeypatch.setattr(_library, "is_loaded", lambda name: False)
    for one, other in zip(served, everything(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["roi_pool", "focal", "carafe"])
def test_streams_and_graphs(case):
    setup = CASES[case](torch.float32, "cuda")
    expected = first_of(setup.op(*setup.arguments))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = first_of(setup.op(*setup.arguments))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = first_of(setup.op(*setup.arguments))
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.cuda
def test_more_elements_than_32_bits_count():
    rows = (1 << 31) // 1024 + 3
    logits = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
    target = torch.full((rows,), 1024, device="cuda")
    target[-1] = 1023
    logits[-1, 1023] = 3
    loss = torch.ops.visdet.sigmoid_focal_loss(logits, target, torch.empty(0, device="cuda"), 2.0, 0.25)
    expected = sigmoid_focal_loss(logits[-1:].float().cpu(), torch.tensor([1023]), reduction="none")
    torch.testing.assert_close(loss[-1:].float().cpu(), expected, rtol=1e-2, atol=1e-3)
    del loss, logits
    maps = torch.zeros(1, 1, 70, 70, device="cuda", dtype=torch.bfloat16)
    maps[0, 0, 69, 69] = 2
    regions = torch.tensor([[0.0, 69, 69, 69, 69]], device="cuda").expand((1 << 31) // 4900 + 5, 5)
    assert roi_pool(maps, regions, 70)[-1].eq(2).all()


@pytest.mark.cuda
def test_soft_nms_of_cuda_boxes():
    boxes, scores = soft_boxes(200, torch.float32)
    for found, wanted in zip(soft_nms(boxes.cuda(), scores.cuda()), soft_nms(boxes, scores), strict=True):
        assert found.is_cuda and torch.equal(found.cpu(), wanted)
    assert nms(boxes.cuda(), scores.cuda(), 0.5)[1].tolist() == nms(boxes, scores, 0.5)[1].tolist()

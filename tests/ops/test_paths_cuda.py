"""Every path of ms_deform_attn on a GPU: the right numbers, and the choices that other GPUs would make."""

import contextlib

import pytest
import torch
from path_cases import PYRAMID, attention, fused, needs_library, of_two_types
from torch.testing import assert_close

from tests.fuzz.problem import Seeded
from visdet import ops
from visdet.execution.tensor_tree import map_tensors
from visdet.ops import explain
from visdet.ops.devices import DEVICES, present_device
from visdet.ops.explain import choose_for, choose_only


@contextlib.contextmanager
def backward_only(path):
    """Choose a path of the backward. Where float32 numbers are few, strips serve deterministic calls alone."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(path == "strips", warn_only=True)
    try:
        with choose_only("ms_deform_attn_backward", path):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def floating(given):
    """Return the names of the arguments that are floating-point tensors."""
    return [
        name for name, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def results(function, given, grad_output):
    leaves = {name: given[name].detach().clone().requires_grad_() for name in floating(given)}
    out = function(**{**given, **leaves})
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad_output)]


def assert_matches(function, given, dtype, seed=0):
    """Compare output and gradients on CUDA with those of float64 on the CPU."""
    exact = given | {name: given[name].double() for name in floating(given)}
    out = function(**exact)
    grad_output = Seeded(seed).normal(*out.shape).to(dtype)
    expected = results(function, exact, grad_output.double())
    found = results(function, map_tensors(torch.Tensor.cuda, given), grad_output.cuda())
    tolerance = {torch.float64: 1e-11, torch.float32: 4e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for name, one, other in zip(("output", *floating(given)), found, expected, strict=True):
        error = (one.double().cpu() - other).norm() / other.norm().clamp(min=1e-30)
        assert error < tolerance, f"{name}: {error}"


SMALL = [(24, 30), (12, 15), (6, 8), (3, 4)]
FUNCTIONS = {attention: ops.ms_deform_attn, fused: ops.ms_deform_attn_fused}
plain_and_fused = pytest.mark.parametrize("make", [attention, fused], ids=["plain", "fused"])


def path_of(form):
    """Return the path of an entry of FORMS or BACKWARD_FORMS, with which its name begins."""
    return form.partition("-")[0]


# Calls that need every form of the forward's kernels. C decides whether a row has 4, 8 or 16 lanes or single values. Q
# decides whether a row has one, two or four sets of lanes. P and the levels decide whether the samples are one chunk or
# several, and whether levels come by fours. Some forms are compiled for the sizes of most models. "tables" puts the
# level tables on the GPU, where only the kernel reads them.
FIVE_LEVELS = [(24, 30), (20, 26), *SMALL[1:]]
FORMS = {
    "decoder-C32": dict(Q=77),
    "decoder-C32-Q700": dict(Q=700),
    "decoder-C32-Q1500": dict(Q=1500),
    "decoder-C16": dict(Q=77, C=16),
    "decoder-C16-Q700": dict(Q=700, C=16),
    "decoder-C16-Q1500": dict(Q=1500, C=16),
    "decoder-C64": dict(Q=77, C=64),
    "decoder-C64-Q700": dict(Q=700, C=64),
    "decoder-K12": dict(Q=77, shapes=SMALL[:3]),
    "decoder-K20-Q700": dict(Q=700, shapes=FIVE_LEVELS),
    "decoder-K20-Q1500": dict(Q=1500, shapes=FIVE_LEVELS),
    "decoder-K32": dict(Q=77, P=8),
    "decoder-tables": dict(Q=77, tables=True),
    "encoder-K16": dict(Q=None),
    "encoder-K12": dict(Q=None, shapes=SMALL[:3]),
    "encoder-K20": dict(Q=None, shapes=FIVE_LEVELS),
    "encoder-K4": dict(Q=None, shapes=SMALL[:1], dtype=torch.float32),
    "encoder-G3": dict(Q=None, G=3),
    "encoder-C16": dict(Q=None, C=16),
    "encoder-C64": dict(Q=None, G=4, C=64),
    "encoder-tables": dict(Q=None, tables=True),
    "rows-C16": dict(Q=301, C=16),
    "rows-C16-P3": dict(Q=301, C=16, P=3),
    "rows-C32": dict(Q=301),
    "rows-C32-P3": dict(Q=301, P=3),
    "rows-C40": dict(Q=301, G=4, C=40),
    "rows-C64": dict(Q=301, C=64),
    "rows-C64-P3": dict(Q=301, C=64, P=3),
    "rows-C128": dict(Q=301, G=2, C=128),
    "rows-C260": dict(Q=301, G=2, C=260),
    "rows-C31": dict(Q=30, G=2, C=31),
    "rows-float64": dict(Q=301, dtype=torch.float64),
    "rows-tables": dict(Q=301, tables=True),
}


of_all_forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.cuda
@of_two_types
@plain_and_fused
@of_all_forms
def test_every_form_of_the_forward(form, make, dtype):
    sizes = {"shapes": SMALL, "dtype": dtype, "tables": False, **FORMS[form]}
    tables, dtype = sizes.pop("tables"), sizes["dtype"]
    given = make(**sizes, device="cpu")
    if tables:
        given["level_shapes"] = torch.tensor(sizes["shapes"])
    with choose_only("ms_deform_attn", path_of(form)):
        assert_matches(FUNCTIONS[make], given, dtype)


@needs_library
@of_two_types
@of_all_forms
def test_every_form_of_the_forward_is_served_on_an_h200(form, dtype):
    path, sizes = path_of(form), {"shapes": SMALL, "dtype": dtype, **FORMS[form]}
    sizes.pop("tables", None)
    with choose_only("ms_deform_attn", path):
        for make, function in FUNCTIONS.items():
            plan = explain(function, **make(**sizes), device="H200", backward=False).plans[-1]
            assert plan.path == path


@pytest.mark.cuda
def test_a_path_that_does_not_serve_is_refused():
    given = attention(3, shapes=SMALL, dtype=torch.float64, device="cuda")
    with choose_only("ms_deform_attn", "encoder"), pytest.raises(RuntimeError, match='the path "encoder"'):
        ops.ms_deform_attn(**given)


@pytest.mark.cuda
@of_two_types
@pytest.mark.parametrize("device", sorted(DEVICES))
@pytest.mark.parametrize("Q", [None, 384, 1000], ids=["encoder", "Q384", "Q1000"])
def test_choices_of_other_gpus_give_the_right_numbers(Q, device, dtype):
    if DEVICES[device].shared_block > present_device().shared_block:
        pytest.skip(
            "this GPU cannot stand for one with more shared memory; its choices are planned without a GPU"
        )
    with choose_for(device):
        assert_matches(ops.ms_deform_attn, attention(Q, shapes=SMALL, dtype=dtype, device="cpu"), dtype)
        assert_matches(ops.ms_deform_attn_fused, fused(Q, shapes=SMALL, dtype=dtype, device="cpu"), dtype)


# Shapes on which launches failed.
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        ([(80, 94), (40, 47), (20, 24), (10, 12)], torch.bfloat16),
        ([(64, 82), (32, 41), (16, 21), (8, 11)], torch.float32),
    ],
    ids=["640x752-bfloat16", "512x656-float32"],
)
def test_backward_of_an_encoder_whose_chunks_take_just_48_kib(shapes, dtype):
    given = fused(None, B=1, shapes=shapes, dtype=dtype, device="cuda")
    value, offsets = given["value"].requires_grad_(), given["offsets"].requires_grad_()
    grads = torch.autograd.grad(ops.ms_deform_attn_fused(**given).sum(), (value, offsets))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.cuda
def test_rows_of_one_channel_and_more_heads_than_a_block_has_groups():
    given = attention(1000, B=1, G=32, C=1, shapes=[(20, 25)], device="cpu")
    assert_matches(ops.ms_deform_attn, given, torch.float32)


# Calls that need every form of the backward's kernels:
# - C: rows of every number of lanes, of more channels than lanes take at once, and filled up to 16 bytes (1, 30, 31);
# - "dense": texels that one group of lanes owns, and several groups;
# - bfloat16 and a C that is a multiple of 32: the gather by tensor cores;
# - P: encoders whose points take one pass, and several;
# - K: pieces of one query, and of several;
# - one texel: bins that are too large for shared memory; 256 levels: more bins than a block counts there.
# "tables" puts the level tables on the GPU, where only kernels read them.
BACKWARD_FORMS = {
    "strips-C16": dict(Q=77, C=16),
    "strips-C32": dict(Q=77),
    "strips-C30": dict(Q=77, C=30),
    "strips-C64": dict(Q=77, G=4, C=64),
    "strips-C100": dict(Q=77, G=2, C=100),
    "strips-P3": dict(Q=77, G=2, P=3),
    "strips-P60": dict(Q=21, G=2, P=60),
    "strips-one-row": dict(Q=77, shapes=[(1, 40), (20, 1), (1, 1)]),
    "strips-wide": dict(Q=77, G=3, shapes=[(2, 700), (9, 11)]),
    "strips-dense": dict(Q=300, G=2, shapes=[(3, 4), (2, 2)]),
    "strips-one-texel": dict(Q=300, G=2, shapes=[(1, 1)]),
    "strips-float16": dict(Q=77, dtype=torch.float16),
    "direct-C16": dict(Q=77, C=16),
    "direct-C32": dict(Q=77),
    "direct-C30": dict(Q=77, C=30),
    "direct-C64": dict(Q=77, G=4, C=64),
    "direct-C100": dict(Q=77, G=2, C=100),
    "direct-C160": dict(Q=77, G=2, C=160),
    "direct-float16": dict(Q=77, dtype=torch.float16),
    "direct-tables": dict(Q=77, tables=True),
    "encoder-C1": dict(Q=None, C=1),
    "encoder-C16": dict(Q=None, C=16),
    "encoder-C32": dict(Q=None),
    "encoder-C31": dict(Q=None, G=4, C=31),
    "encoder-C64": dict(Q=None, G=4, C=64),
    "encoder-P3": dict(Q=None, P=3),
    "encoder-P9": dict(Q=None, P=9),
    "encoder-one-row": dict(Q=None, shapes=[(1, 40), (20, 1), (1, 1)]),
    "encoder-float16": dict(Q=None, dtype=torch.float16),
    "encoder-tables": dict(Q=None, tables=True),
    "sorted-C1": dict(Q=301, G=4, C=1),
    "sorted-C31": dict(Q=301, G=4, C=31),
    "sorted-C32": dict(Q=301),
    "sorted-C40": dict(Q=301, G=4, C=40),
    "sorted-C96": dict(Q=301, G=2, C=96),
    "sorted-K600": dict(Q=21, G=2, P=150),
    "sorted-dense": dict(Q=1500, G=2, shapes=[(3, 4), (2, 2)]),
    "sorted-one-texel": dict(Q=3000, G=2, shapes=[(1, 1)]),
    "sorted-256-levels": dict(Q=5, B=1, G=1, C=4, P=1, shapes=[(8, 16)] * 256, tables=True),
    "sorted-float16": dict(Q=301, dtype=torch.float16),
    "sorted-float64": dict(Q=301, C=33, dtype=torch.float64),
    "sorted-tables": dict(Q=301, tables=True),
}


def backward_form(name, make, dtype, device):
    """Return the path of an entry of BACKWARD_FORMS, its arguments on a device and the type of its values."""
    sizes = dict(B=2, shapes=SMALL, dtype=dtype) | BACKWARD_FORMS[name]
    tables = sizes.pop("tables", False)
    given = make(**sizes, device=device)
    if tables:
        shapes = torch.tensor(sizes["shapes"])
        given["level_shapes"] = shapes.to(device)
        given["level_starts"] = (shapes.prod(1).cumsum(0) - shapes.prod(1)).to(device)
    return path_of(name), given, sizes["dtype"]


# The fused function names at most 16 levels.
FORM_CASES = [
    pytest.param(make, name, id=f"{'plain' if make is attention else 'fused'}-{name}")
    for make in FUNCTIONS
    for name, sizes in BACKWARD_FORMS.items()
    if make is attention or len(sizes.get("shapes", SMALL)) <= 16
]


of_all_cases = pytest.mark.parametrize(("make", "name"), FORM_CASES)


@needs_library
@of_two_types
@of_all_cases
def test_paths_of_the_backward_serve_their_forms(make, name, dtype):
    path, given, _ = backward_form(name, make, dtype, "meta")
    for device in ("H200", "T4"):
        with backward_only(path):
            plan = explain(FUNCTIONS[make], **given, device=device)
        assert plan.paths()["ms_deform_attn_backward"] == path


@pytest.mark.cuda
@of_two_types
@of_all_cases
def test_every_form_of_the_backward(make, name, dtype):
    path, given, dtype = backward_form(name, make, dtype, "cpu")
    with backward_only(path):
        assert_matches(FUNCTIONS[make], given, dtype)


@needs_library
def test_what_the_tuned_paths_of_the_backward_decline():
    declined = {
        "strips": [
            dict(Q=77, dtype=torch.float64),
            dict(Q=1700),
            dict(Q=3, P=600),
            dict(Q=300, shapes=[(200, 268), *PYRAMID]),
        ],
        "encoder": [dict(Q=None, C=65), dict(Q=None, dtype=torch.float64), dict(Q=77)],
        "direct": [dict(Q=77, dtype=torch.float64), dict(Q=60000, B=1)],
    }
    for path, cases in declined.items():
        for sizes in cases:
            plan = explain("ms_deform_attn", **attention(**sizes), device="H200").plans[-1]
            assert path in [name for name, _ in plan.declined] and plan.path != path, (path, sizes)


@needs_library
def test_strips_need_levels_that_the_host_knows_and_that_fill_value():
    given = attention(77)
    starts = torch.tensor([0, 13400, 16750, 17600])
    for level_starts in (starts.to("meta"), starts - torch.tensor([0, 0, 1, 0])):
        plan = explain("ms_deform_attn", **given | dict(level_starts=level_starts), device="H200").plans[-1]
        assert dict(plan.declined)["strips"].startswith("the host does not know") and plan.path == "direct"


MOST_QUERIES = 1450  # of the path "strips" with four points on an H200: their records fill its shared memory


@needs_library
def test_strips_serve_what_shared_memory_holds():
    for Q, path in ((MOST_QUERIES, "strips"), (MOST_QUERIES + 150, "direct")):
        assert explain("ms_deform_attn", **attention(Q), device="H200").plans[-1].path == path


@pytest.mark.cuda
@of_two_types
def test_strips_with_the_most_samples_in_one_cell(dtype):
    given = attention(MOST_QUERIES, B=1, G=1, shapes=SMALL, dtype=dtype, device="cpu")
    given["locations"] = (given["locations"] * 0.01 + 0.501).contiguous()
    if present_device().shared_block < DEVICES["H200"].shared_block:
        pytest.skip("this GPU has less shared memory than an H200")
    with choose_only("ms_deform_attn_backward", "strips"):
        assert_matches(ops.ms_deform_attn, given, dtype)


@pytest.mark.cuda
@plain_and_fused
def test_strips_leave_out_positions_that_are_no_numbers_and_do_not_differ_between_runs(make):
    given = make(300, shapes=SMALL, dtype=torch.bfloat16, device="cuda")
    positions_of = given["locations" if make is attention else "offsets"].view(2, 300, 8, 16, 2)
    for query, bad in enumerate((float("nan"), float("inf"), -float("inf"), 1e30)):
        positions_of[:, query::9, :, query, query % 2] = bad
    grad_output = torch.randn(2, 300, 256, device="cuda").bfloat16()
    found = {}
    for path in ("strips", "sorted"):
        with backward_only(path):
            found[path] = results(FUNCTIONS[make], given, grad_output)[1:]
    with choose_only("ms_deform_attn_backward", "strips"):
        again = results(FUNCTIONS[make], given, grad_output)[1:]
    for grad, expected, same in zip(found["strips"], found["sorted"], again, strict=True):
        assert torch.equal(grad, same)
        assert_close(grad, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize(("path", "Q"), [("strips", 77), ("direct", 77), ("encoder", None), ("sorted", 301)])
def test_backward_of_values_between_vectors(path, Q):
    given = attention(Q, B=1, shapes=SMALL, device="cuda")
    grad_output = torch.randn(1, given["locations"].shape[1], 8 * 32, device="cuda")
    memory = torch.empty(given["value"].numel() + 1, device="cuda")
    moved = memory[1:].view_as(given["value"]).copy_(given["value"])
    assert moved.data_ptr() % 16 == 4
    with backward_only(path):
        expected = results(ops.ms_deform_attn, given, grad_output)[1:]
        leaves = [tensor.requires_grad_() for tensor in (moved, given["locations"], given["weights"])]
        out = ops.ms_deform_attn(leaves[0], SMALL, None, *leaves[1:])
        found = torch.autograd.grad(out, leaves, grad_output)
    assert_close(found, expected)

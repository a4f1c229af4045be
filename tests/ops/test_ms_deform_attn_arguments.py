"""What ms_deform_attn takes for its levels and types, and what it refuses."""

import pytest
import torch
from attention_cases import CASES, make_case
from calls import gradients

from visdet.ops import feature_maps_format, ms_deform_attn, ms_deform_attn_reference


@pytest.mark.cuda
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in-order", "levels-in-another-order"])
@pytest.mark.parametrize("is_encoder", [False, True], ids=["decoder", "encoder"])
def test_level_tables_of_both_devices_mix_without_a_synchronisation(is_encoder, order):
    sizes = [(12, 15), (6, 8), (3, 4), (2, 2)]
    Q = sum(height * width for height, width in sizes) if is_encoder else 17
    value, shapes, _, locations, weights = make_case(2, Q, 8, 32, 4, sizes, dtype=torch.float32)
    starts = torch.zeros(4, dtype=torch.int64)
    row = 0
    for level in order:
        starts[level] = row
        row += int(shapes[level].prod())
    grad_output = torch.randn(2, Q, 256, generator=torch.Generator().manual_seed(3))
    expected = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
    given = [tensor.cuda() for tensor in (value, locations, weights)]
    on_gpu = shapes.cuda(), starts.cuda()
    grad_output = grad_output.cuda()
    torch.cuda.synchronize()
    for level_shapes, level_starts in (
        (shapes.tolist(), on_gpu[1]),
        (shapes, on_gpu[1]),
        (on_gpu[0], starts.tolist()),
        (on_gpu[0], starts),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = gradients(ms_deform_attn, (given[0], level_shapes, level_starts, *given[1:]), grad_output)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_level_starts_on_the_device_that_leave_value_yield_nan():
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device="cuda"
    )
    wrong = starts.cuda() + 1
    output = ms_deform_attn(value, shapes.tolist(), wrong, locations, weights)
    assert output.isnan().all()


@pytest.mark.cuda
def test_levels_on_the_device_that_leave_value_yield_nan():
    value, shapes, starts, locations, weights = make_case(
        *CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32, device="cuda"
    )
    wrong = shapes.clone()
    wrong[1] = torch.tensor([1 << 40, 1 << 40])
    output, grads = gradients(
        ms_deform_attn,
        (value, wrong.cuda(), starts.cuda(), locations, weights),
        torch.ones(2, 13, 60, device="cuda"),
    )
    assert (
        output.isnan().all() and grads[2][:, :, :, 1].isnan().all() and grads[2][:, :, :, 0].isfinite().all()
    )


@pytest.mark.cuda
def test_more_levels_than_travel_with_a_launch():
    case = make_case(1, 5, 2, 8, 2, [(3, 4)] * 20, dtype=torch.float32, device="cuda")
    expected = ms_deform_attn_reference(*case)
    torch.testing.assert_close(ms_deform_attn(*case), expected, rtol=1e-5, atol=1e-5)


def rejection_case():
    value, shapes, starts, locations, weights = make_case(
        2, 5, 2, 4, 3, [(3, 2), (2, 2)], dtype=torch.float32
    )
    return dict(value=value, level_shapes=shapes, level_starts=starts, locations=locations, weights=weights)


REJECTIONS = {
    "value-3d": (dict(value=torch.zeros(2, 10, 8)), r"value must be \[B, S, G, C\], got \[2, 10, 8\]"),
    "value-int": (
        dict(value=torch.zeros(2, 10, 2, 4, dtype=torch.int32)),
        "value must be float64, float32, float16 or bfloat16",
    ),
    "shapes-1d": (
        dict(level_shapes=torch.tensor([3, 2])),
        r"level_shapes must be \[L, 2\] \(height, width\), got \[2\]",
    ),
    "shapes-sum": (
        dict(level_shapes=torch.tensor([[3, 2], [1, 3]])),
        "sum of height . width over level_shapes must be S = 10, got 9",
    ),
    "shapes-zero": (
        dict(level_shapes=torch.tensor([[3, 2], [0, 2]])),
        r"level_shapes\[1\] must be a positive",
    ),
    "shapes-huge": (
        dict(level_shapes=torch.tensor([[3, 2], [2**40, 2**40]])),
        r"level_shapes\[1\] must be a positive",
    ),
    "starts-outside": (
        dict(level_starts=torch.tensor([0, 7])),
        "level 1 .rows 7 to 11. must lie within the S = 10 rows",
    ),
    "starts-negative": (dict(level_starts=torch.tensor([-1, 6])), "level 0 .rows -1 to 5. must lie within"),
    "starts-length": (dict(level_starts=torch.tensor([0])), r"level_starts must be \[L\] = \[2\], got \[1\]"),
    "locations-5d": (
        dict(locations=torch.zeros(2, 5, 2, 2, 3)),
        r"locations must be \[B, Q, G, L, P, 2\] = \[2, Q, 2, 2, P, 2\]",
    ),
    "locations-3-coordinates": (
        dict(locations=torch.zeros(2, 5, 2, 2, 3, 3)),
        r"locations must be .*got \[2, 5, 2, 2, 3, 3\]",
    ),
    "locations-batch": (
        dict(locations=torch.zeros(1, 5, 2, 2, 3, 2)),
        r"locations must be .*got \[1, 5, 2, 2, 3, 2\]",
    ),
    "weights-points": (
        dict(weights=torch.zeros(2, 5, 2, 2, 4)),
        r"weights must be \[B, Q, G, L, P\] = \[2, 5, 2, 2, 3\], got",
    ),
    "weights-device": (
        dict(weights=torch.zeros(2, 5, 2, 2, 3, device="meta")),
        "weights must be on value's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name):
    change, message = REJECTIONS[name]
    with pytest.raises(RuntimeError, match=message) as caught:
        ms_deform_attn(**(rejection_case() | change))
    assert "ms_deform_attn: " in str(caught.value)


def test_operator_itself_rejects_coordinates_of_another_type():
    case = rejection_case()
    with pytest.raises(RuntimeError, match="locations must be Float for value of type Float, got Double"):
        torch.ops.visdet.ms_deform_attn(*(case | dict(locations=case["locations"].double())).values())
    with pytest.raises(RuntimeError, match="weights must be Double for value of type Double, got Float"):
        torch.ops.visdet.ms_deform_attn(
            *(case | dict(value=case["value"].double(), locations=case["locations"].double())).values()
        )


def test_sequences_are_tables_on_the_cpu_whatever_the_default_device():
    value, locations, weights = (
        torch.rand(1, 12, 1, 2),
        torch.rand(1, 3, 1, 1, 2, 2),
        torch.rand(1, 3, 1, 1, 2),
    )
    expected = ms_deform_attn(value, [(3, 4)], None, locations, weights)
    with torch.device("meta"):
        assert torch.equal(ms_deform_attn(value, [(3, 4)], None, locations, weights), expected)
        assert all(
            table.device.type == "cpu" for table in feature_maps_format([[torch.rand(1, 2, 4, 3, 5)]])[1:]
        )

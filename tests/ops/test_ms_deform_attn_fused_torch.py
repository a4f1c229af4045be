"""What ms_deform_attn_fused refuses, its determinism, and graphs."""

import pytest
import torch
from fused_attention_cases import CASES, DEVICES, make_case

from visdet.ops import ms_deform_attn, ms_deform_attn_fused


def rejection_case():
    names = ("value", "level_shapes", "level_starts", "reference_points", "offsets", "logits", "num_points")
    return dict(zip(names, make_case(2, 5, 2, 4, [3, 3], [(3, 2), (2, 2)], dtype=torch.float32), strict=True))


REJECTIONS = {
    "value-3d": (dict(value=torch.zeros(2, 10, 8)), r"value must be \[B, S, G, C\], got \[2, 10, 8\]"),
    "shapes-sum": (
        dict(level_shapes=torch.tensor([[3, 2], [1, 3]])),
        "sum of height . width over level_shapes must be S = 10, got 9",
    ),
    "points-count": (
        dict(num_points=[3, 3, 3]),
        "num_points must be a number for each of the 2 levels, got 3",
    ),
    "points-negative": (dict(num_points=[7, -1]), "num_points must be 0 to 2.31 - 1, got -1"),
    "points-sum": (
        dict(num_points=[3, 4]),
        r"offsets must be \[B, Q, G, K, 2\] = \[2, Q, 2, 7, 2\], got \[2, 5, 2, 6, 2\]",
    ),
    "offsets-6d": (
        dict(offsets=torch.zeros(2, 5, 2, 2, 3, 2)),
        r"offsets must be \[B, Q, G, K, 2\] = \[2, Q, 2, 6, 2\], got \[2, 5, 2, 2, 3, 2\]",
    ),
    "offsets-device": (
        dict(offsets=torch.zeros(2, 5, 2, 6, 2, device="meta")),
        "offsets must be on value's device cpu, got meta",
    ),
    "logits-shape": (
        dict(logits=torch.zeros(2, 5, 2, 7)),
        r"logits must be \[B, Q, G, K\] = \[2, 5, 2, 6\], got \[2, 5, 2, 7\]",
    ),
    "logits-device": (
        dict(logits=torch.zeros(2, 5, 2, 6, device="meta")),
        "logits must be on value's device cpu, got meta",
    ),
    "references-3d": (
        dict(reference_points=torch.zeros(2, 5, 2)),
        r"reference_points must be \[B, Q, L, 2 or 4\] = \[2, 5, 2, 2 or 4\], got \[2, 5, 2\]",
    ),
    "references-size": (
        dict(reference_points=torch.zeros(2, 5, 2, 3)),
        r"reference_points must be .*got \[2, 5, 2, 3\]",
    ),
    "references-queries": (
        dict(reference_points=torch.zeros(2, 4, 2, 2)),
        r"reference_points must be .*got \[2, 4, 2, 2\]",
    ),
    "references-device": (
        dict(reference_points=torch.zeros(2, 5, 2, 2, device="meta")),
        "reference_points must be on value's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejects(name):
    change, message = REJECTIONS[name]
    with pytest.raises(RuntimeError, match=message) as caught:
        ms_deform_attn_fused(**(rejection_case() | change))
    assert "ms_deform_attn" in str(caught.value)


def test_operator_itself_rejects_other_types():
    op, case = torch.ops.visdet.ms_deform_attn_fused, rejection_case()
    with pytest.raises(
        RuntimeError, match="reference_points must be Float for value of type Float, got Double"
    ):
        op(*(case | dict(reference_points=case["reference_points"].double())).values())
    with pytest.raises(RuntimeError, match="offsets must be Float for value of type Float, got Half"):
        op(*(case | dict(offsets=case["offsets"].half())).values())
    with pytest.raises(RuntimeError, match="logits must be Float, the type of offsets, got Double"):
        op(*(case | dict(logits=case["logits"].double())).values())


@pytest.mark.parametrize("device", DEVICES)
def test_saved_for_backward_is_the_inputs_and_nothing_else(device):
    value, shapes, starts, *others, points = make_case(
        *CASES["B3-Q17-G8-C32-P4-4-4-4"], dtype=torch.float32, device=device
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ms_deform_attn_fused(
            value.requires_grad_(), shapes, starts, *[tensor.requires_grad_() for tensor in others], points
        )
    inputs = {tensor.data_ptr() for tensor in (value, shapes, starts, *others)}
    assert {tensor.data_ptr() for tensor in saved} == inputs


@pytest.mark.parametrize("device", DEVICES)
def test_references_of_all_levels_are_copied_once_for_both_directions(device):
    value, shapes, starts, references, *others, points = make_case(
        *CASES["B3-Q17-G8-C32-P4-4-4-4"], dtype=torch.float32, device=device
    )
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ms_deform_attn_fused(value.requires_grad_(), shapes, starts, references[:1, :, :1], *others, points)
    (copied,) = (tensor for tensor in saved if tensor.shape == references.shape)
    assert copied.is_contiguous()


@pytest.mark.cuda
def test_peak_memory_of_the_forward_is_the_output():
    case = make_case(1, 4000, 8, 32, [4, 4], [(20, 20), (10, 10)], dtype=torch.float32, device="cuda")
    ms_deform_attn_fused(*case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = ms_deform_attn_fused(*case)
    assert torch.cuda.max_memory_allocated() - before == out.numel() * out.element_size()
    composed = ms_deform_attn(*case[:3], *_composed(case))
    torch.testing.assert_close(out, composed, rtol=1e-4, atol=1e-5)


def _composed(case):
    _, shapes, _, references, offsets, logits, num_points = case
    level, P = len(num_points), num_points[0]
    size = shapes.flip(1).to(offsets)
    locations = references[:, :, None, :, None] + offsets.unflatten(3, (level, P)) / size[:, None]
    return locations, logits.softmax(-1).unflatten(3, (level, P))

"""Which kernels calls of attention take on which GPU: without a GPU, on tensors without data."""

import re
from pathlib import Path

import pytest
import torch
from calls import in_order
from path_cases import attention, fused, needs_library

from visdet import ops
from visdet.ops import explain

CSRC = Path(ops.__file__).parent / "csrc"

CHOICES = {
    "encoder-H200": (dict(Q=None), "H200", "encoder", "encoder"),
    "encoder-bf16-L4": (dict(Q=None, dtype=torch.bfloat16), "L4", "encoder", "encoder"),
    "encoder-T4": (dict(Q=None), "T4", "encoder", "encoder"),
    "encoder-float64-H200": (dict(Q=None, B=1, dtype=torch.float64), "H200", "rows", "sorted"),
    "decoder-Q300-H200": (dict(Q=300), "H200", "decoder", "strips"),
    "decoder-Q900-bf16-H200": (dict(Q=900, dtype=torch.bfloat16), "H200", "decoder", "strips"),
    "decoder-Q384-L4": (dict(Q=384), "L4", "decoder", "strips"),
    "decoder-Q900-L4": (dict(Q=900), "L4", "decoder", "direct"),
    "decoder-Q900-T4": (dict(Q=900), "T4", "decoder", "direct"),
    "decoder-Q900-5090": (dict(Q=900), "RTX 5090", "decoder", "direct"),
    "decoder-P3-H200": (dict(Q=300, P=3), "H200", "rows", "strips"),
    "d-fine-n-H200": (dict(Q=300, B=1, C=16, P=6, shapes=[(40, 40), (20, 20)]), "H200", "rows", "direct"),
    "rf-detr-H200": (dict(Q=300, B=1, G=16, C=16, P=2, shapes=[(40, 40)]), "H200", "rows", "direct"),
    "rf-detr-bf16-H200": (
        dict(Q=300, B=1, G=16, C=16, P=2, shapes=[(40, 40)], dtype=torch.bfloat16),
        "H200",
        "rows",
        "strips",
    ),
    "queries-60000-H200": (dict(Q=60000, B=1), "H200", "rows", "sorted"),
    "one-head-bf16-H200": (dict(Q=15422, B=48, G=1, P=8, dtype=torch.bfloat16), "H200", "rows", "sorted"),
    "one-level-H200": (dict(Q=None, shapes=[(50, 67)]), "H200", "encoder", "encoder"),
    "one-level-bf16-H200": (
        dict(Q=None, shapes=[(50, 67)], dtype=torch.bfloat16),
        "H200",
        "rows",
        "encoder",
    ),
    "channels-30-A100": (dict(Q=None, B=1, C=30), "A100", "encoder", "encoder"),
}


@needs_library
@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_ms_deform_attn(name):
    sizes, device, forward, backward = CHOICES[name]
    for operator, inputs in (("ms_deform_attn", attention), (ops.ms_deform_attn_fused, fused)):
        plan = explain(operator, **inputs(**sizes), device=device)
        assert plan.paths() == {"ms_deform_attn": forward, "ms_deform_attn_backward": backward}


@needs_library
@pytest.mark.parametrize(
    ("operator", "arguments", "kernels"),
    [
        ("soft_nms", ([3, 4], [3]), set()),
        ("nms", ([3, 4], [3], 0.5), {"nms"}),
        ("nms3d", ([3, 7], [3], 0.5), {"nms"}),
        ("box_iou_rotated", ([3, 5], [4, 5]), {"box_iou_rotated"}),
        ("deform_roi_pool", ([1, 4, 5, 5], [2, 5], None, 2), {"roi_align", "roi_align_backward"}),
        (
            "deform_roi_pool",
            ([1, 4, 5, 5], [2, 5], [2, 2, 2, 2], 2),
            {"deform_roi_pool", "deform_roi_pool_backward"},
        ),
        ("bbox_overlaps", ([3, 4], [3, 4]), set()),
    ],
)
def test_functions_with_constants_and_without_kernels_are_explained(operator, arguments, kernels):
    given = [torch.zeros(size) if isinstance(size, list) else size for size in arguments]
    plan = explain(operator, *given, device="L4")
    assert {found.op for found in plan.plans} == kernels
    assert ("starts no kernel of visdet's" in str(plan)) == (not kernels)


@needs_library
def test_the_gradients_of_fused_aggregation_are_explained():
    key_points, projection, logits = (
        torch.zeros(size) for size in ([1, 3, 2, 3], [1, 1, 4, 4], [1, 3, 1, 1, 2, 4])
    )
    plan = explain(
        "deformable_aggregation_fused",
        torch.zeros(1, 10, 8),
        [[(2, 5)]],
        [[0]],
        key_points,
        projection,
        torch.ones(1, 1, 2),
        logits,
        device="L4",
    )
    assert "finish_kernel" in str(plan)


LONG, SINGLE = "a row of value has more than 64 channels", "rows of value cannot be read 16 bytes at a time"
UNEVEN, DOUBLE = "the samples of a row on each level are no multiple of 4", "the values are float64"
DECLINED = {
    "decoder-P3": (dict(Q=300, P=3), "decoder", UNEVEN, "rows"),
    "decoder-C128": (dict(Q=300, C=128), "decoder", LONG, "rows"),
    "decoder-C64-bf16": (dict(Q=300, C=64, dtype=torch.bfloat16), None, None, "decoder"),
    "decoder-C72-bf16": (dict(Q=300, C=72, dtype=torch.bfloat16), "decoder", LONG, "rows"),
    "decoder-C31": (dict(Q=300, C=31), "decoder", SINGLE, "rows"),
    "decoder-float64": (dict(Q=300, dtype=torch.float64), "decoder", DOUBLE, "rows"),
    "encoder-P3": (dict(Q=None, P=3), "encoder", UNEVEN, "rows"),
    "encoder-C64": (dict(Q=None, B=1, C=64), None, None, "encoder"),
    "encoder-C128": (dict(Q=None, B=1, C=128), "encoder", LONG, "rows"),
    "encoder-float64": (dict(Q=None, B=1, dtype=torch.float64), "encoder", DOUBLE, "rows"),
}


@needs_library
@pytest.mark.parametrize("name", DECLINED)
def test_why_a_path_of_the_forward_declines(name):
    sizes, declining, reason, chosen = DECLINED[name]
    for function, make in ((ops.ms_deform_attn, attention), (ops.ms_deform_attn_fused, fused)):
        plan = explain(function, **make(**sizes), device="H200", backward=False).plans[-1]
        assert plan.path == chosen
        assert declining is None or dict(plan.declined)[declining].startswith(reason)


@needs_library
def test_deterministic_mode_sorts():
    with in_order():
        plan = explain("ms_deform_attn", **attention(None, B=1), device="H100")
    backward = plan.plans[-1]
    assert backward.path == "sorted"
    assert [path for path, reason in backward.declined if "deterministic" in reason] == ["encoder", "direct"]
    assert "not 'encoder': it adds in no fixed order" in str(plan)


@needs_library
def test_an_explanation_names_the_kernels():
    forward, backward = explain("ms_deform_attn", **attention(300), device="H200").plans
    assert [launch.kernel for launch in forward.launches] == ["decoder_kernel"]
    assert {launch.kernel for launch in backward.launches} == {"strips_kernel"}
    assert (
        explain("ms_deform_attn", **attention(300), device="H200", backward=False).plans[-1].op
        == "ms_deform_attn"
    )


def test_on_the_cpu_there_is_nothing_to_choose():
    plan = explain("ms_deform_attn", **attention(3, shapes=[(4, 5)], device="cpu"))
    assert plan.plans == [] and "CPU" in str(plan)


@pytest.mark.parametrize(
    ("operator", "device", "message"),
    [
        (
            "ms_deform_atn",
            "H200",
            "operator must be a function of visdet.ops or its name, got 'ms_deform_atn'",
        ),
        pytest.param("ms_deform_attn", "H20", "device must be one of .*got 'H20'", marks=needs_library),
    ],
)
def test_explain_rejects(operator, device, message):
    with pytest.raises(ValueError, match=message):
        explain(operator, **attention(3), device=device)


def test_every_kernel_starts_through_the_launcher_and_has_bounds():
    sources = [path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    for path in sources:
        text = path.read_text()
        if path.name != "launch.h":
            assert "<<<" not in text, f"{path.name} starts a kernel without launch()"
            if path.name not in ("launch.cu", "cuda_errors.h"):
                calls = re.findall(
                    r"cuda(?:FuncSetAttribute|DeviceGetAttribute|GetDevice\w*|MemsetAsync|Occupancy\w*)", text
                )
                assert not calls, f"{path.name} asks CUDA itself: {calls}"
        for declaration in re.findall(r"__global__ void(.{0,80})", text, flags=re.DOTALL):
            assert re.match(r"\s*__(launch_bounds|maxnreg)__", declaration), (
                f"{path.name}: {declaration.strip()[:60]}"
            )

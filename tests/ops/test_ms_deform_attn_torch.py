"""ms_deform_attn under torch.compile and graphs, its determinism, threads, and its limits on CUDA."""

import pytest
import torch
from attention_cases import CASES, make_case

from visdet.ops import ms_deform_attn, ms_deform_attn_fused


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_runs_in_an_aot_inductor_package(fused, tmp_path):
    value, _, _, locations, weights = make_case(*CASES["B2-Q13-G3-C20-P4-L2"], dtype=torch.float32)

    class Plain(torch.nn.Module):
        def forward(self, value, locations, weights):
            return ms_deform_attn(value * 2, [(7, 5), (3, 4)], [0, 35], locations, weights).relu()

    class Fused(torch.nn.Module):
        def forward(self, value, points, offsets, logits):
            return ms_deform_attn_fused(
                value * 2, [(7, 5), (3, 4)], [0, 35], points, offsets, logits, [3, 1]
            ).relu()

    generator = torch.Generator().manual_seed(2)
    arguments = (value, locations, weights)
    if fused:
        sizes = ((2, 13, 2, 4), (2, 13, 3, 4, 2), (2, 13, 3, 4))
        arguments = (value, *[torch.rand(size, generator=generator) for size in sizes])
    module = Fused() if fused else Plain()
    program = torch.export.export(module, arguments, strict=False)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "op.pt2"))
    packaged = torch._inductor.aoti_load_package(path)
    for scale in (1.0, 0.5):
        inputs = (arguments[0] * scale, *arguments[1:])
        torch.testing.assert_close(packaged(*inputs), module(*inputs))


def wide(*shape, dtype=torch.float32):
    """Return zeros of any size that take no memory."""
    return torch.zeros((), dtype=dtype, device="cuda").expand(shape)


CUDA_LIMITS = {
    "rows": (
        dict(value=(1, 2**31, 1, 0), locations=(1, 1, 1, 1, 1, 2), weights=(1, 1, 1, 1, 1)),
        "value must have fewer than 2.31 rows S, got 2147483648",
    ),
    "samples": (
        dict(value=(1, 4, 1, 1), locations=(1, 2**20, 1, 1, 2**11, 2), weights=(1, 2**20, 1, 1, 2**11)),
        r"Q \* G \* L \* P must be under 2.31, got 1048576 \* 1 \* 2048",
    ),
    "channels": (
        dict(value=(1, 4, 2, 2**27), locations=(1, 1, 2, 1, 1, 2), weights=(1, 1, 2, 1, 1)),
        r"G \* C must be under 2.28, got 2 \* 134217728",
    ),
    "heads": (
        dict(value=(2**30, 4, 2, 1), locations=(2**30, 0, 2, 1, 1, 2), weights=(2**30, 0, 2, 1, 1)),
        r"B \* G must be under 2.31, got 1073741824 \* 2",
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", CUDA_LIMITS)
def test_cuda_size_limits(name):
    shapes, message = CUDA_LIMITS[name]
    arguments = {key: wide(*shape) for key, shape in shapes.items()}
    with pytest.raises(RuntimeError, match="ms_deform_attn: " + message):
        ms_deform_attn(arguments["value"], [(2, 2)], [0], arguments["locations"], arguments["weights"])


@pytest.mark.cuda
def test_cuda_size_limit_of_the_backward():
    # 2^30 queries of 3 points: a record numbers its query and point in 31 bits.
    with pytest.raises(RuntimeError, match=r"Q \* P must be under 2.31 .*got 715827882 \* 3"):
        torch.ops.visdet.ms_deform_attn_backward(
            wide(1, 715827882, 1),
            wide(1, 4, 1, 1),
            torch.tensor([[2, 2]]),
            torch.tensor([0]),
            wide(1, 715827882, 1, 1, 3, 2),
            wide(1, 715827882, 1, 1, 3),
            False,
        )


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # value has 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled.
    G, C, H, W = 8, 128, 1024, 2050
    value = torch.zeros(1, H * W, G, C, dtype=torch.bfloat16, device="cuda")
    value[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, G, 1, 1, 2)
    out = ms_deform_attn(value, [(H, W)], [0], centre, torch.ones(1, 2, G, 1, 1, device="cuda"))
    torch.testing.assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)

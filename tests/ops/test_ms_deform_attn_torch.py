"""ms_deform_attn under torch.compile and graphs, its determinism, threads, and its limits on CUDA."""

import pytest
import torch
from attention_cases import CASES, DEVICES, TOLERANCE, make_case
from calls import captured, gradients, relative_error

from visdet.ops import ms_deform_attn, ms_deform_attn_fused, ms_deform_attn_reference


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole_with_a_dynamic_batch(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda v, x, w: ms_deform_attn(v, [(7, 5), (3, 4)], None, x, w).sin(), fullgraph=True, dynamic=None
    )
    for batch in (2, 3, 5):
        value, shapes, starts, locations, weights = make_case(
            batch, *CASES["B2-Q13-G3-C20-P4-L2"][1:], torch.float32, device
        )
        leaves = [tensor.clone().requires_grad_() for tensor in (value, locations, weights)]
        out = compiled(*leaves)
        torch.testing.assert_close(out, ms_deform_attn(value, shapes, starts, locations, weights).sin())
        expected = gradients(
            lambda *case: ms_deform_attn(*case).sin(),
            (value, shapes, starts, locations, weights),
            torch.ones_like(out),
        )[1]
        for actual, wanted in zip(torch.autograd.grad(out.sum(), leaves), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


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


# Seven threads share the second case's two heads, so that none of them has the samples to copy the larger level.
@pytest.mark.parametrize(
    "sizes", [(2, 301, 4, 20, 4, [(9, 11), (5, 6)]), (1, 301, 2, 16, 4, [(20, 15), (9, 11)])]
)
def test_result_does_not_depend_on_the_number_of_threads(sizes):
    case = make_case(*sizes, dtype=torch.float32)
    B, Q, G, C = sizes[:4]
    grad_output = torch.randn(B, Q, G * C, generator=torch.Generator().manual_seed(3))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            results.append(gradients(ms_deform_attn, case, grad_output))
    finally:
        torch.set_num_threads(threads)
    for output, grads in results[1:]:
        assert torch.equal(output, results[0][0])
        assert all(torch.equal(grad, first) for grad, first in zip(grads, results[0][1], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode_repeats_bit_for_bit(dtype, device):
    # Every query samples the same few texels, so the order of sums matters.
    value, shapes, starts, locations, weights = make_case(
        2, 400, 4, 32, 4, [(2, 3), (1, 2)], dtype=dtype, device=device
    )
    grad_output = torch.randn(2, 400, 128, generator=torch.Generator().manual_seed(3)).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
        for _ in range(3):
            again = gradients(ms_deform_attn, (value, shapes, starts, locations, weights), grad_output)
            assert torch.equal(again[0], first[0])
            assert all(torch.equal(grad, same) for grad, same in zip(again[1], first[1], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [
        tensor.double().cpu() if tensor.is_floating_point() else tensor
        for tensor in (value, shapes, starts, locations, weights)
    ]
    expected = gradients(ms_deform_attn_reference, exact, grad_output.to(dtype).double().cpu())[1]
    for grad, wanted in zip(first[1], expected, strict=True):
        assert relative_error(grad, wanted) < max(TOLERANCE[dtype], 2e-5)


@pytest.mark.cuda
def test_current_stream_and_graph_capture():
    case = make_case(*CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32, device="cuda")
    expected = ms_deform_attn(*case)
    graph, out = captured(lambda: ms_deform_attn(*case))
    case[0].mul_(2)
    graph.replay()
    torch.testing.assert_close(out, expected * 2)


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


@pytest.mark.cuda(devices=2)
def test_second_gpu_while_the_first_is_current():
    case = make_case(*CASES["B3-Q17-G8-C32-P4-L4"], dtype=torch.float32)
    grad_output = torch.ones(3, 17, 256)
    expected, wanted = gradients(ms_deform_attn, case, grad_output)
    there = [tensor.to("cuda:1") for tensor in case]
    assert torch.cuda.current_device() == 0
    output, grads = gradients(ms_deform_attn, there, grad_output.to("cuda:1"))
    assert output.device == torch.device("cuda:1")
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-5)
    for grad, same in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.cpu(), same, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_more_than_two_to_the_31_elements():
    # value has 2^31 + 2^20 elements in bfloat16 (4.3 GB); the last rows are sampled.
    G, C, H, W = 8, 128, 1024, 2050
    value = torch.zeros(1, H * W, G, C, dtype=torch.bfloat16, device="cuda")
    value[:, -1] = 3
    centre = torch.tensor([(W - 0.5) / W, (H - 0.5) / H], device="cuda").expand(1, 2, G, 1, 1, 2)
    out = ms_deform_attn(value, [(H, W)], [0], centre, torch.ones(1, 2, G, 1, 1, device="cuda"))
    torch.testing.assert_close(out, torch.full_like(out, 3), rtol=1e-2, atol=0)

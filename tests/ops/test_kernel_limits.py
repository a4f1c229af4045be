"""Kernels at the ends of their limits, and each path of an operator that has several, against one another."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_sample_ops import OPS, SIZES, gradients, make_case, relative_error

from visdet.ops import carafe, ms_deform_attn, roi_pool, sample_dot, sample_dot_reference
from visdet.ops.explain import choose_only
from visdet.ops.roi_pool import roi_pool_with_argmax

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("octaves", [11, 12, 27, 28, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sample_dot_with_every_number_of_octaves(dtype, octaves, device):
    # With 12 octaves in float64, 28 in float32, static and dynamic shared memory together pass 48 KB.
    tensors, rest = make_case("dot", 2, 64, 5, 7, 3, 200, 2, octaves, dtype=dtype, device=device)
    exact = [tensor.double().cpu() for tensor in tensors]
    grad_output = torch.randn(2, 2, 3, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    output, grads = gradients(sample_dot, [*tensors, *rest], grad_output)
    expected, wanted = gradients(sample_dot_reference, [*exact, *rest], grad_output.double())
    # The encoding of a depth d turns 2^octaves d times: float64's own rounding of its angle is 2^octaves eps.
    tolerance = {torch.float64: 1e-11 + 2.0**octaves * 1e-15, torch.float32: 5e-5, torch.bfloat16: 8e-3}[
        dtype
    ]
    assert relative_error(output, expected) < tolerance
    for grad, of_reference in zip(grads, wanted, strict=True):
        assert relative_error(grad, of_reference) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", OPS)
def test_sample_ops_give_the_same_by_every_path(name, sizes):
    tensors, rest = make_case(name, *SIZES[sizes], dtype=torch.float32, device="cuda")
    with choose_only(f"sample_{name}", "copy_first"):
        expected = OPS[name][0](*tensors, *rest)
    with choose_only(f"sample_{name}", "in_place"):
        tensors[0] = tensors[0].to(memory_format=torch.channels_last)
        assert torch.equal(OPS[name][0](*tensors, *rest), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("Q, D", [(40, 60), (300, 400), (600, 800)], ids=["2400", "120000", "480000"])
def test_all_samples_in_one_cell(Q, D):
    # Deterministic mode orders the records of a cell: here one cell has all of them.
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 4, 6, 7, generator=generator, dtype=torch.float64)
    pixels = torch.tensor([2.0, 3.0]) + 0.1 + 0.8 * torch.rand(1, Q, D, 2, generator=generator)
    samples = ((pixels + 0.5) / torch.tensor([7.0, 6.0]) * 2 - 1).double()
    weights = torch.rand(1, 1, Q, D, generator=generator).double()
    exact = [images, samples, weights]
    grad_output = torch.ones(1, dtype=torch.float64)
    _, expected = gradients(OPS["sum"][1], exact, grad_output)
    tensors = [tensor.float().cuda() for tensor in exact]
    torch.use_deterministic_algorithms(True)
    try:
        runs = [gradients(OPS["sum"][0], tensors, grad_output)[1] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for grads in runs:
        assert all(torch.equal(*pair) for pair in zip(grads, runs[0], strict=True))
        assert relative_error(grads[0], expected[0]) < 1e-3


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [(1 << 24) + 1, (1 << 24) + 3], ids=str)
def test_roi_pool_of_more_rows_than_float32_counts(rows):
    # As float32, 2^24 + 1 is 2^24 and 2^24 + 3 is 2^24 + 4. A bin that ends at the end of the map must have its last
    # row, and must not reach into the next channel.
    images = torch.zeros(1, 2, rows, 1, device="cuda")
    images[0, 1, 0, 0] = 5
    images[0, 1, -1, 0] = 7
    rois = torch.tensor([[0, 0, 0, 0, 3e7]], device="cuda")
    output, argmax = roi_pool_with_argmax(images, rois, (1, 1), 1.0)
    assert output.flatten().tolist() == [0, 7]
    assert (argmax >= 0).all() and (argmax < rows).all()


@pytest.mark.cuda
def test_roi_pool_of_more_images_than_float32_counts():
    B = (1 << 24) + 1  # which is 2^24 as float32
    images = torch.ones(B, 1, 1, 1, device="cuda")
    rois = torch.tensor([[float(1 << 24) + 2, 0, 0, 0, 0], [float(1 << 24), 0, 0, 0, 0]], device="cuda")
    assert roi_pool(images, rois, 1, 1.0).flatten().tolist() == [0, 1]


@pytest.mark.cuda
def test_carafe_of_many_images():
    # More groups of channels of images than the second dimension of a grid has blocks.
    features = torch.randn(66000, 2, 2, 1, device="cuda", requires_grad=True)
    masks = torch.randn(66000, 1, 4, 2, device="cuda", requires_grad=True)
    output = carafe(features, masks, 1, 1, 2)
    wide = features.repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(output, wide * masks)
    grads = torch.autograd.grad(output.square().sum(), (features, masks))
    expected = torch.autograd.grad((wide * masks).square().sum(), (features, masks))
    torch.testing.assert_close(grads, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deform_conv2d_gives_the_same_by_every_path(dtype):
    def draw(*shape):
        return torch.randn(*shape, generator=generator).to("cuda", dtype)

    generator = torch.Generator().manual_seed(0)
    B, C, H, W, M, G = 2, 32, 9, 11, 12, 2
    given = (draw(B, C, H, W), draw(B, G * 18, H, W), draw(B, G * 9, H, W), draw(M, C, 3, 3))
    rest = ([1, 1], [1, 1], [1, 1], G, 32)
    grad_output = draw(B, M, H, W)
    results = {}
    for path in ("packs", "values"):
        with choose_only("deform_conv2d", path), choose_only("deform_conv2d_backward", path):
            results[path] = [
                torch.ops.visdet.deform_conv2d(*given, *rest),
                *torch.ops.visdet.deform_conv2d_backward(grad_output, *given, *rest, True, True, True),
                torch.ops.visdet.deform_conv2d_backward(grad_output, *given, *rest, False, False, True)[3],
            ]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(results["packs"], results["values"], strict=True):
        assert relative_error(one, other) < tolerance
    for path in results:
        *_, of_weight, of_weight_alone = results[path]
        assert relative_error(of_weight_alone, of_weight) < tolerance


@pytest.mark.cuda
def test_threads_do_not_take_shared_memory_from_one_another():
    """The limit of a kernel holds for all threads, each of which knows what it has asked for."""
    value = torch.randn(2, 21760, 8, 32, device="cuda", dtype=torch.bfloat16)
    shapes = [(128, 128), (64, 64), (32, 32), (16, 16)]

    def attend(queries):
        locations = torch.rand(2, queries, 8, 4, 4, 2, device="cuda")
        return ms_deform_attn(value, shapes, None, locations, torch.rand(locations.shape[:-1], device="cuda"))

    # On an H200 or H100, the numbers of queries need 10, 68, 53 and 68 KB.
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for pool, queries in ((one, 300), (other, 2000), (one, 1600), (other, 2000)):
            assert pool.submit(attend, queries).result(timeout=60).isfinite().all()

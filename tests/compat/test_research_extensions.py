"""The functions of InternImage's, DCNv4's, MapTR's and DSVT's extensions."""

import importlib

import pytest
import torch
from torch.nn.functional import grid_sample
from torch.testing import assert_close

from tests.fuzz.problem import generator_of
from visdet.compat import dcnv4_ext, dfa3d_ext, extensions
from visdet.ops import ms_deform_attn_reference


@pytest.fixture
def provide():
    """Return a function that imports a provided module."""
    with extensions.installed():
        yield importlib.import_module


def gradients_of(function, *tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    grad_output = torch.randn_like(out)
    return out, grad_output, torch.autograd.grad(out, leaves, grad_output)


def dcnv3(input, offset, mask, kernel, stride, pad, dilation, groups, scale, points):
    """DCNv3 by one call of grid_sample for each group and each point of the kernel."""
    (B, H, W, C), (Hout, Wout) = input.shape, offset.shape[1:3]
    images = input.view(B, H, W, groups, -1).permute(0, 3, 4, 1, 2).flatten(0, 1)
    offsets = offset.view(B, Hout, Wout, groups, len(points), 2)
    masks = mask.view(B, Hout, Wout, groups, len(points))
    half = [d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)]
    rows = (torch.arange(Hout).double() * stride[0] - pad[0] + half[0])[:, None]
    columns = torch.arange(Wout).double() * stride[1] - pad[1] + half[1]
    out = 0
    for p, (i, j) in enumerate(points):
        x = columns + (i * dilation[1] - half[1] + offsets[..., p, 0].movedim(3, 1)) * scale
        y = rows + (j * dilation[0] - half[0] + offsets[..., p, 1].movedim(3, 1)) * scale
        grid = torch.stack([(2 * x + 1) / W - 1, (2 * y + 1) / H - 1], -1).flatten(0, 1)
        sampled = grid_sample(images, grid, padding_mode="zeros", align_corners=False)
        out = out + sampled.view(B, groups, -1, Hout, Wout) * masks[..., p].movedim(3, 1)[:, :, None]
    return out.permute(0, 3, 4, 1, 2).reshape(B, Hout, Wout, C)


@pytest.mark.parametrize(
    "kernel, stride, pad, dilation, scale, has_center",
    [((3, 3), (1, 1), (1, 1), (1, 1), 1.0, True), ((3, 5), (2, 1), (0, 2), (2, 1), 0.7, False)],
)
def test_dcnv3_equals_grid_sample(kernel, stride, pad, dilation, scale, has_center, provide):
    ext, generator = provide("DCNv3"), generator_of(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, H, W, groups, channels = 2, 9, 7, 2, 3
    size = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip((H, W), kernel, stride, pad, dilation, strict=True)
    ]
    points = [(i, j) for i in range(kernel[1]) for j in range(kernel[0])]
    if not has_center:
        points.remove((kernel[1] // 2, kernel[0] // 2))
    tensors = (
        draw(B, H, W, groups * channels),
        draw(B, *size, groups * len(points) * 2),
        draw(B, *size, groups * len(points)),
    )
    out, grad_output, grads = gradients_of(
        lambda *tensors: dcnv3(*tensors, kernel, stride, pad, dilation, groups, scale, points), *tensors
    )
    options = *kernel, *stride, *pad, *dilation, groups, channels, scale
    extra = () if has_center else (True,)
    assert_close(ext.dcnv3_forward(*tensors, *options, 256, *extra), out)
    found = ext.dcnv3_backward(*tensors, *options, grad_output, 256, *extra)
    assert_close(found, grads)
    with pytest.raises(ValueError, match=r"DCNv3\.dcnv3_backward: grad_output must be"):
        ext.dcnv3_backward(*tensors, *options, grad_output[:1], 256, *extra)


double_or_half = pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
# The sizes of two levels, and where each starts.
SHAPES, STARTS = torch.tensor([[3, 4], [2, 5]]), torch.tensor([0, 12])


@double_or_half
def test_geometric_kernel_attention_takes_whole_pixels(dtype, provide):
    ext = provide("GeometricKernelAttention")
    shapes, starts = SHAPES, STARTS
    B, Q, G, P, C = 2, 3, 2, 4, 5
    value, weight = torch.randn(B, 22, G, C, dtype=dtype), torch.rand(B, Q, G, 2, P, dtype=dtype)
    locations = torch.randint(-2, 8, (B, Q, G, 2, P, 2))

    def by_hand(value, weight):
        x, y = (locations[..., axis].clamp(min=0).minimum(shapes[:, 1 - axis, None] - 1) for axis in range(2))
        rows = starts[:, None] + y * shapes[:, 1, None] + x  # [B, Q, G, L, P]
        images, heads = torch.arange(B).view(-1, 1, 1, 1, 1), torch.arange(G)[:, None, None]
        return (value[images, rows, heads] * weight[..., None]).sum((3, 4)).flatten(2)

    out, grad_output, grads = gradients_of(by_hand, value, weight)
    arguments = value, shapes, starts, locations, weight
    tolerances = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.float16 else {}
    assert_close(ext.geometric_kernel_attn_cuda_forward(*arguments, 64), out, **tolerances)
    found = ext.geometric_kernel_attn_cuda_backward(*arguments, grad_output, 64)
    assert_close(found, grads, **tolerances)


@pytest.mark.parametrize("softmax", [False, True])
def test_dcnv4_is_dcnv3_of_packed_numbers(softmax):
    G, C, P = 2, 3, 8
    points = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    value = torch.randn(2, 5, 6, G * C, dtype=torch.float64)
    packed = torch.randn(2, 5, 6, G * 3 * P + 8, dtype=torch.float64)  # padded

    def expected(value, packed):
        groups = packed[..., : G * 3 * P].reshape(2, 5, 6, G, 3 * P)
        offsets, weights = groups[..., : 2 * P].flatten(3), groups[..., 2 * P :]
        weights = (weights.softmax(-1) if softmax else weights).flatten(3)
        return dcnv3(value, offsets, weights, (3, 3), (1, 1), (1, 1), (1, 1), G, 0.5, points)

    out, grad_output, grads = gradients_of(expected, value, packed)
    options = *(3, 3, 1, 1, 1, 1, 1, 1), G, C, 0.5, 256
    assert_close(dcnv4_ext.dcnv4_forward(value, packed, *options, 1, 8, 512, softmax), out)
    found = dcnv4_ext.dcnv4_backward(value, packed, *options, grad_output, 1, 2, 256, softmax)
    assert_close(found, grads)


@double_or_half
def test_flash_deform_attn_takes_the_softmax_over_all_levels(dtype):
    shapes, starts = SHAPES, STARTS
    value = torch.randn(2, 22, 2, 8, dtype=dtype)
    packed = torch.cat([torch.rand(2, 7, 2, 2 * 4 * 2), torch.randn(2, 7, 2, 2 * 4)], -1).to(dtype)

    def expected(value, packed):
        locations, weights = packed[..., :16].view(2, 7, 2, 2, 4, 2), packed[..., 16:].softmax(-1)
        return ms_deform_attn_reference(value, shapes, starts, locations, weights.view(2, 7, 2, 2, 4))

    out, grad_output, grads = gradients_of(expected, value.double(), packed.double())
    tolerances = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.float16 else {}
    arguments = value, shapes, starts, packed
    found = dcnv4_ext.flash_deform_attn_forward(*arguments, 64, 4, 8, 512)
    assert_close(found, out.to(dtype), **tolerances)
    found = dcnv4_ext.flash_deform_attn_backward(*arguments, grad_output.to(dtype), 64, 4, 2, 256)
    assert_close(found, grads, **tolerances, check_dtype=False)


def test_places_in_groups_count_equal_numbers_before(provide):
    groups = torch.tensor([5, 2, 5, 5, -1, 2])
    out = torch.full_like(groups, -1)
    provide("ingroup_inds_cuda").forward(groups, out)
    assert out.tolist() == [0, 0, 1, 2, 0, 1]
    provide("ingroup_inds_cuda").forward(groups[:0], out[:0])


def test_attention_with_depth_is_that_to_a_volume():
    """Features times the numbers of their depths are a volume, of which grid_sample takes the samples."""
    ext, generator = dfa3d_ext, generator_of(0)
    sizes, starts = [(3, 4, 5), (2, 6, 4)], torch.tensor([0, 12])
    shapes, (B, Q, G, P, C) = torch.tensor(sizes), (2, 7, 2, 3, 4)

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    value, numbers, weights = draw(B, 24, G, C), draw(B, 24, G, 5), draw(B, Q, G, 2, P)
    locations = draw(B, Q, G, 2, P, 3) * 1.6 - 0.3

    def expected(value, numbers, locations, weights):
        total = 0
        for level, (H, W, D) in enumerate(sizes):
            rows = slice(starts[level], starts[level] + H * W)
            volume = torch.einsum("bsgc,bsgd->bgcds", value[:, rows], numbers[:, rows, :, :D])
            grid = 2 * locations[:, :, :, level].transpose(1, 2).reshape(B * G, Q, P, 1, 3) - 1
            samples = grid_sample(volume.reshape(B * G, C, D, H, W), grid, align_corners=False)
            samples = samples.view(B, G, C, Q, P).permute(0, 3, 1, 4, 2)
            total = total + (samples * weights[:, :, :, level, :, None]).sum(3)
        return total.flatten(2)

    out, grad_output, grads = gradients_of(expected, value, numbers, locations, weights)
    scores = ext.ms_depth_score_sample_forward(numbers, shapes, starts, locations, im2col_step=64)
    given = value, shapes[:, :2], starts, locations[..., :2], weights, scores
    assert_close(ext.wms_deform_attn_forward(*given, im2col_step=64), out)
    found = [torch.zeros_like(one) for one in (value, locations[..., :2], weights, scores)]
    ext.wms_deform_attn_backward(*given, grad_output, *found, im2col_step=64)
    of_numbers, of_locations = torch.zeros_like(numbers), torch.zeros_like(locations)
    ext.ms_depth_score_sample_backward(numbers, shapes, starts, locations, found[3], of_numbers, of_locations)
    assert not of_locations[..., :2].any()
    of_locations[..., :2] = found[1]
    assert_close((found[0], of_numbers, of_locations, found[2]), grads)

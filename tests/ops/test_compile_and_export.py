"""Every operator and module compiles whole and exports with sizes that change, down to two rows, one and none."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.fuzz.operators import OPERATORS
from tests.fuzz.problem import rand
from visdet import ops

SIZES = (5, 2, 1, 0)  # what is traced first, then what else must work


def boxes(n):
    corners = rand(n, 2) * 5
    return torch.cat([corners, corners + 3], 1)


def rois(n, B=2):
    return torch.cat([torch.arange(n)[:, None] % B * 1.0, boxes(n)], 1)


class Function(nn.Module):
    """A module of a function."""

    def __init__(self, function, *options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *inputs):
        return self.function(*inputs, *self.options)


def layer_of(operator, of_size):
    """Return an operator as a module of its tensors, and the function of a size that returns them."""
    problem = of_size(SIZES[0])
    names = [name for name, value in problem.arguments.items() if isinstance(value, torch.Tensor)]
    rest = {name: value for name, value in problem.arguments.items() if name not in names}

    def call(*tensors):
        given = {
            name: tensor if name in problem.differentiable else tensor.detach()
            for name, tensor in zip(names, tensors, strict=True)
        }
        return operator.call(**given, **rest)

    return Function(call), lambda n: tuple(of_size(n).arguments[name] for name in names)


MASKED = ops.MaskedConv2d(3, 4, 3, padding=1).eval()


def masked_convolution(x, mask):
    return ops.masked_conv2d(x, mask, MASKED.weight, MASKED.bias, 1)


def cases():
    """Yield (name, module, function of a size that returns the inputs)."""
    torch.manual_seed(0)
    x = rand(2, 3, 8, 9)
    yield "roi_align-max", ops.RoIAlign((2, 3), 0.5, 2, "max"), lambda n: (x, rois(n))
    turned = lambda n: torch.cat([rois(n), boxes(n)[:, :1]], 1)  # noqa: E731
    for ratio in (0, 2):
        yield f"roi_align_rotated-{ratio}", ops.RoIAlignRotated(2, 0.8, ratio), lambda n: (x, turned(n))
    yield "riroi_align_rotated", ops.RiRoIAlignRotated(2, 0.5, 2, 3), lambda n: (x, turned(n))
    align = Function(ops.rotated_feature_align, 0.5, 5)
    yield "rotated_feature_align", align, lambda n: (rand(n, 3, 4, 5), rand(n, 4, 5, 5))
    yield (
        "diff_iou_rotated",
        Function(ops.diff_iou_rotated_2d),
        lambda n: (1 + rand(1, n, 5), 1 + rand(1, n, 5)),
    )
    yield "roi_align-images", ops.RoIAlign(2), lambda n: (rand(n, 3, 8, 9), rois(3, 1))
    yield "deform_roi_pool-modulated", ops.ModulatedDeformRoIPoolPack(2, 3, 8), lambda n: (x, rois(n))
    yield "simple_roi_align-corners", ops.SimpleRoIAlign(2, 1.0, False), lambda n: (x, rois(n))
    yield "point_sample-images", Function(ops.point_sample), lambda n: (rand(n, 3, 5, 6), rand(n, 4, 2))
    yield "point_sample-bfloat16", Function(ops.point_sample), lambda n: (x.bfloat16(), rand(2, n, 2))
    yield "grid_sample", Function(ops.bilinear_grid_sample), lambda n: (x, rand(2, n, 3, 2))
    layer = Function(ops.rel_roi_point_to_rel_img_point, (5, 6))
    yield "rel_roi_point", layer, lambda n: (rois(n), rand(n, 4, 2))
    yield (
        "masked_conv2d",
        Function(masked_convolution),
        lambda n: (rand(1, 3, n + 3, 5), rand(1, n + 3, 5).round()),
    )
    yield "corner_pool", ops.CornerPool("top"), lambda n: (rand(1, 2, n, 5),)
    yield "carafe-pack", ops.CARAFEPack(4, 2), lambda n: (rand(2, 4, n + 3, 5),)
    for mode, is_aligned in (("iou", False), ("iof", True)):
        layer = Function(ops.bbox_overlaps, mode, is_aligned)
        yield (
            f"bbox_overlaps-{mode}-{is_aligned}",
            layer,
            lambda n, m=is_aligned: (boxes(n), boxes(n if m else 3)),
        )
    for function, reduction in ((ops.sigmoid_focal_loss, "none"), (ops.softmax_focal_loss, "mean")):
        layer = Function(lambda s, t, w, f=function, r=reduction: f(s, t, weight=w, reduction=r))
        yield function.__name__, layer, lambda n: (rand(n, 4), torch.arange(n) % 4, rand(4))
    for pack in (ops.DeformConv2dPack, ops.ModulatedDeformConv2dPack, ops.SAConv2d, ops.ConvAWS2d):
        yield pack.__name__, pack(4, 2, 3, padding=1), lambda n: (rand(n, 4, 6, 7),)
    for operator in OPERATORS.values():
        for number, of_size in enumerate(operator.of_size):
            yield f"{operator.name}-{number}", *layer_of(operator, of_size)


SLOW = ("deform_roi_pool-modulated",)
CASES = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, *case in cases()
]


of_all_layers = pytest.mark.parametrize(("layer", "inputs_of"), CASES)


@of_all_layers
def test_compiles_whole_for_any_size(layer, inputs_of):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in SIZES:
        inputs = [one.requires_grad_(one.is_floating_point()) for one in inputs_of(size)]
        expected, found = layer(*inputs), compiled(*inputs)
        assert_close(found, expected, equal_nan=True)
        if isinstance(expected, torch.Tensor) and expected.requires_grad:
            leaves = [one for one in inputs if one.requires_grad]
            grads = [
                torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True)
                for out in (found, expected)
            ]
            assert_close(*grads, equal_nan=True)


@of_all_layers
def test_exports_with_a_size_that_changes(layer, inputs_of):
    first, second = inputs_of(SIZES[0]), inputs_of(SIZES[1])
    changes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]}
        for one, other in zip(first, second, strict=True)
    )
    program = torch.export.export(
        layer, first, dynamic_shapes=(changes,) if isinstance(layer, Function) else changes
    ).module()
    for size in SIZES:
        inputs = inputs_of(size)
        assert_close(program(*inputs), layer(*inputs), equal_nan=True)

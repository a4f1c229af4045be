"""Extensions that programs compile when they run, and those of mmdetection 2.0 to 2.2."""

import importlib

import pytest
import torch
from entries import check_entries, device, leaf  # noqa: F401
from programs import run_python
from torch.nn.functional import grid_sample
from torch.testing import assert_close
from torch.utils import cpp_extension

from visdet import ops
from visdet.compat import extensions
from visdet.compat._counts import CALLS

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def provide():
    with extensions.installed():
        yield importlib.import_module


@pytest.fixture
def compiled(monkeypatch):
    """Return the names that are compiled, without compiling them."""
    names = []

    def load(name, *_, **__):
        names.append(name)

    def load_inline(name, *_, **__):
        names.append(name)

    for function in (load, load_inline):
        monkeypatch.setattr(cpp_extension, function.__name__, function)
    return names


@pytest.mark.parametrize("function", ["load", "load_inline"])
def test_a_known_name_is_served_and_counted_and_another_is_compiled(compiled, function):
    with extensions.installed():
        load = getattr(cpp_extension, function)
        loaded = CALLS[f"{function}('MultiScaleDeformableAttention')"]
        module = load("MultiScaleDeformableAttention", ["no_such_file.cu"], verbose=True)
        assert load(name="MultiScaleDeformableAttention", sources=[]) is module
        assert importlib.import_module("MultiScaleDeformableAttention") is module
        assert CALLS[f"{function}('MultiScaleDeformableAttention')"] == loaded + 2
        before = CALLS["MultiScaleDeformableAttention.get_compiler_version"]
        module.get_compiler_version()
        assert CALLS["MultiScaleDeformableAttention.get_compiler_version"] == before + 1
        assert load("bev_pool_v2_ext", []).__name__ == "bev_pool_v2_ext" and not compiled
        for name in ("mine", "pkg_resources", "numba.errors", "torch._six"):
            load(name, ["mine.cpp"])
        load("MultiScaleDeformableAttention", [], is_python_module=False)
        load("MultiScaleDeformableAttention", [], is_standalone=True)
    cpp_extension.load("MultiScaleDeformableAttention", [])
    assert compiled == ["mine", "pkg_resources", "numba.errors", "torch._six"] + 3 * [
        "MultiScaleDeformableAttention"
    ]


def test_a_program_that_compiles_its_attention(tmp_path):
    """The call of Relation-DETR and Salience-DETR, and of transformers up to 4.50."""
    (tmp_path / "detector.py").write_text(
        "import torch\nfrom torch.utils.cpp_extension import load\n"
        "_C = load('MultiScaleDeformableAttention', ['nothing.cpp'], with_cuda=True, extra_cflags=['-O2'])\n"
        "args = torch.ones(1, 4, 1, 2), torch.tensor([[2, 2]]), torch.zeros(1, dtype=torch.long)\n"
        "print(_C.ms_deform_attn_forward(*args, torch.full((1, 1, 1, 1, 1, 2), .5), torch.ones(1, 1, 1, 1, 1), 64))\n"
    )
    out, error = run_python("-m", "visdet.compat", "run", tmp_path / "detector.py")
    assert out == "tensor([[[1., 1.]]])\n"
    assert "MultiScaleDeformableAttention.ms_deform_attn_forward (1)" in error


BOXES = [[0.0, 0, 10, 10, 0.9], [1, 1, 10, 10, 0.8], [20, 20, 30, 30, 0.7], [21, 20, 30, 30, 0.6]]


def test_suppression(provide):
    ext, dets = provide("nms_ext"), torch.tensor(BOXES)
    assert ext.nms(dets, 0.5).tolist() == [0, 2]
    assert ext.nms_match(dets, 0.5) == [[0, 1], [2, 3]]
    kept, index = ops.soft_nms(dets[:, :4], dets[:, 4], 0.3, 0.5, 1e-3, "gaussian")
    found = ext.soft_nms(dets, 0.3, 2, 0.5, 1e-3)
    assert torch.equal(found, torch.cat([kept, index[:, None].to(kept)], 1))


ROIS = [[0, 1.5, 2, 6, 7.25], [1, 0, 0, 3, 9], [1, 4, 4, 4.2, 4.1]]


def legacy_align(features, rois, size, scale, samples):
    """ROIAlignForwardV1 of mmdetection, for regions within the map."""
    H, W = features.shape[2:]
    outs = []
    for batch, x1, y1, x2, y2 in rois.tolist():
        grid = [
            start * scale
            + (end + 1 - start) * scale * (torch.arange(size * samples).double() + 0.5) / (size * samples)
            for start, end in ((y1, y2), (x1, x2))
        ]
        y, x = torch.meshgrid(*[line.to(features).clamp(min=0) for line in grid], indexing="ij")
        place = torch.stack([2 * x / (W - 1) - 1, 2 * y / (H - 1) - 1], -1)
        sampled = grid_sample(
            features[int(batch)][None], place[None], align_corners=True, padding_mode="border"
        )
        outs.append(torch.nn.functional.avg_pool2d(sampled, samples)[0])
    return torch.stack(outs)


def test_regions(provide):
    ext, rois = provide("roi_align_ext"), torch.tensor(ROIS, dtype=torch.float64)
    features = leaf(2, 3, 12, 10)
    sizes = 2, 2, 0.5, 2
    check_entries(
        lambda x: legacy_align(x, rois, 2, 0.5, 2),
        [features],
        lambda x, out: ext.forward_v1(x, rois, *sizes, out),
        lambda grad, x, out: ext.backward_v1(grad, rois, *sizes, out),
    )
    expected = ops.roi_align(features, rois, 2, 0.5, 2, "avg", True)
    grad = torch.randn_like(expected)
    assert torch.equal(ext.forward_v2(features, rois, 0.5, 2, 2, 2, True), expected)
    found = ext.backward_v2(grad, rois, 0.5, 2, 2, *features.shape, 2, True)
    assert_close(found, torch.autograd.grad(expected, features, grad)[0])
    pool, argmax = provide("roi_pool_ext"), torch.zeros(3, 3, 2, 2, dtype=torch.int32)
    check_entries(
        lambda x: ops.roi_pool(x, rois, 2, 0.5),
        [features],
        lambda x, out: pool.forward(x, rois, 2, 2, 0.5, out, argmax),
        lambda grad, x, out: pool.backward(grad, rois, argmax, 0.5, out),
    )


def test_the_focal_loss(provide):
    ext, logits = provide("sigmoid_focal_loss_ext"), leaf(4, 3)
    target = torch.tensor([0, 2, 3, 1])  # 3 is the background.
    expected = ops.sigmoid_focal_loss(logits, target, 2.0, 0.25, None, "none")
    assert torch.equal(ext.forward(logits, target, 3, 2.0, 0.25), expected)
    grad = torch.randn_like(expected)
    found = ext.backward(logits, target, grad, 3, 2.0, 0.25)
    assert_close(found, torch.autograd.grad(expected, logits, grad, retain_graph=True)[0])
    ext, weight, out = provide("e2e_sigmoid_focal_loss_ext"), torch.zeros(0), torch.zeros_like(expected)
    ext.sigmoid_focal_loss_forward_cuda(logits, target, weight, out, gamma=2.0, alpha=0.25)
    assert torch.equal(out, expected)
    ext.sigmoid_focal_loss_backward_cuda(logits, target, weight, out, gamma=2.0, alpha=0.25)
    assert_close(out, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("name", ["carafe_ext", "carafe_naive_ext"])
def test_carafe(provide, name):
    ext, settings = provide(name), (3, 1, 2)
    spare = [torch.zeros(0)] * 4
    extra = name == "carafe_ext"

    def forward(x, masks, out):
        kept = torch.zeros_like(x)
        ext.forward(x, kept, masks, spare[0], *settings, spare[1], out) if extra else ext.forward(
            x, masks, *settings, out
        )

    def backward(grad, x, masks, *outs):
        ext.backward(grad, x, masks, *settings, *(spare if extra else []), *outs)

    features, masks = leaf(1, 2, 4, 3), leaf(1, 9, 8, 6)
    check_entries(lambda x, m: ops.carafe(x, m, *settings), [features, masks], forward, backward)


@pytest.mark.parametrize("mode", ["top", "bottom", "left", "right"])
def test_corner_pooling(provide, mode):
    ext, x = provide("corner_pool_ext"), leaf(1, 2, 4, 3)
    expected = ops.corner_pool(x, mode)
    grad = torch.randn_like(expected)
    assert torch.equal(getattr(ext, f"{mode}_pool_forward")(x), expected)
    found = getattr(ext, f"{mode}_pool_backward")(x, grad)
    assert_close(found, torch.autograd.grad(expected, x, grad)[0])


def test_masked_convolution_and_deformable_convolution(provide):
    ext, x = provide("masked_conv2d_ext"), torch.randn(1, 2, 4, 5)
    rows, columns = torch.tensor([0, 3]), torch.tensor([1, 4])
    column = torch.zeros(18, 2)
    ext.masked_im2col_forward(x, rows, columns, 3, 3, 1, 1, column)
    unfolded = torch.nn.functional.unfold(x, 3, padding=1)[0][:, [1, 19]]
    assert torch.equal(column, unfolded)
    out = torch.zeros(1, 18, 4, 5)
    ext.masked_col2im_forward(column, rows, columns, 4, 5, 18, out)
    assert torch.equal(out[0, :, [0, 3], [1, 4]], column)
    ext = provide("deform_conv_ext")
    x, offset, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 18, 5, 4), torch.randn(3, 2, 3, 3)
    out, settings = torch.zeros(1, 3, 5, 4), (3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 64)
    ext.deform_conv_forward(x, weight, offset, out, torch.zeros(0), torch.zeros(0), *settings)
    assert_close(out, ops.deform_conv2d(x, offset, weight, 1, 1))


def test_rays_through_occupancy(provide):
    dvr, grid = provide("dvr"), [2, 1, 1, 4]
    times = torch.tensor([[0.0, 0, 1, -1]])
    ends = torch.tensor([[[2.5, 0.5, 0.5], [9, 0.5, 0.5], [1, 0.5, 0.5], [0, 0, 0]]])
    occupancy = dvr.init(ends, times, grid)
    assert occupancy.tolist() == [[[[[0, 0, 1, 0]]], [[[0, 1, 0, 0]]]]]
    rays = torch.tensor([[[-1.5, 0.5, 0.5], [4.5, 0.5, 0.5]]]), ends, times
    for phase, lengths in (("test", [4, 10.5, 3.5, -1]), ("train", [4, 5.5, 3.5, -1])):
        found = [one.tolist() for one in dvr.render_forward(occupancy, *rays, grid, phase)]
        assert found == [[[4.5, 4.5, 3.5, -1]], [lengths], [[[2, 0, 0], [2, 0, 0], [1, 0, 0], [0, 0, 0]]]]
    for loss in ("l1", "l2", "absrel"):
        leaf = occupancy.clone().requires_grad_()
        expected, _ = ops.render_rays(leaf, *rays[:2], times.long())
        distances, lengths, gradient = dvr.render(occupancy, *rays, loss)
        assert torch.equal(distances, expected) and torch.equal(lengths[0], torch.tensor([4, 5.5, 3.5, -1]))
        error = expected.detach() - lengths
        slope = {"l1": error.sign(), "l2": error, "absrel": error.sign() / lengths}[loss]
        assert_close(gradient, torch.autograd.grad(expected, leaf, slope)[0])
    with pytest.raises(ValueError, match=r"dvr\.render: loss_name must be .*, got 'mse'"):
        dvr.render(occupancy, *rays, "mse")
    with pytest.raises(ValueError, match=r"dvr\.render_forward: phase_name must be .*, got 'val'"):
        dvr.render_forward(occupancy, *rays, grid, "val")


def test_pooled_features_of_cameras(provide):
    depth, feat = torch.rand(1, 1, 2, 2, 2), torch.rand(1, 1, 2, 2, 3)
    ranks = [torch.tensor(values, dtype=torch.int32) for values in ([0, 3, 5], [0, 3, 1], [1, 1, 2])]
    given = *ranks, torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    outs = []
    for version in ("v2", "v3"):
        out = torch.zeros(1, 1, 2, 2, 3)
        getattr(provide(f"bev_pool_{version}_ext"), f"bev_pool_{version}_forward")(depth, feat, out, *given)
        grads = torch.zeros_like(depth), torch.zeros_like(feat)
        sorted_again = (3, *given) if version == "v3" else ()
        backward = getattr(provide(f"bev_pool_{version}_ext"), f"bev_pool_{version}_backward")
        backward(torch.ones_like(out), *grads, depth, feat, *given[: 3 if sorted_again else 5], *sorted_again)
        outs.append((out, *grads))
    assert all(map(torch.equal, *outs)) and outs[0][0].any()
    points, cells = torch.rand(3, 2), torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    pooled = provide("occ_pool_ext").occ_pool_forward(points, cells, *given[3:], 1, 1, 2, 2)
    assert torch.equal(
        pooled, provide("bev_pool_ext").bev_pool_forward(points, cells, *given[3:], 1, 1, 2, 2)
    )

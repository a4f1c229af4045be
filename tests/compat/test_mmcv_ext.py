"""The stand-in for mmcv._ext: its entries write into given tensors, as mmcv's wrappers expect."""

import importlib
import subprocess
import sys

import pytest
import torch

from visdet import ops
from visdet.compat import mmcv_ext, mmcv_ops

ROIS = torch.tensor([[0, 0.5, 1, 5.3, 4], [1, 1, 2, 5, 4.5]]).double()


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(out, inputs):
    grad = leaf(*out.shape, seed=9).detach()
    return grad, torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_roi_align(mode):
    x = leaf(2, 3, 6, 7)
    expected = ops.roi_align(x, ROIS, 2, 1.0, 2, mode)
    grad, (grad_expected,) = gradients(expected, [x])
    settings = dict(aligned_height=2, aligned_width=2, spatial_scale=1.0, sampling_ratio=2, aligned=True)
    settings["pool_mode"] = ("max", "avg").index(mode)
    out, argmax_y, argmax_x, grad_x = (
        torch.zeros_like(expected),
        x.new_zeros(0),
        x.new_zeros(0),
        torch.zeros_like(x),
    )
    mmcv_ext.roi_align_forward(x.detach(), ROIS, out, argmax_y, argmax_x, **settings)
    mmcv_ext.roi_align_backward(grad, ROIS, argmax_y, argmax_x, grad_x, **settings)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad_x, grad_expected)


def test_roi_pool():
    x = leaf(2, 3, 6, 7)
    expected = ops.roi_pool(x, ROIS, 2)
    grad, (grad_expected,) = gradients(expected, [x])
    out, argmax, grad_x = torch.zeros_like(expected), torch.zeros(2, 3, 2, 2).int(), torch.zeros_like(x)
    settings = dict(pooled_height=2, pooled_width=2, spatial_scale=1.0)
    mmcv_ext.roi_pool_forward(x.detach(), ROIS, out, argmax, **settings)
    mmcv_ext.roi_pool_backward(grad, ROIS, argmax, grad_x, **settings)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad_x, grad_expected)


@pytest.mark.parametrize("name", ["sigmoid", "softmax"])
@pytest.mark.parametrize("weighted", [False, True])
def test_focal_losses(name, weighted):
    logits, target = leaf(5, 4), torch.tensor([0, 3, 2, 1, 1])
    weight = torch.rand(4, dtype=torch.float64) if weighted else torch.zeros(0, dtype=torch.float64)
    loss = getattr(ops, f"{name}_focal_loss")
    expected = loss(logits, target, 2.0, 0.25, weight if weighted else None, "none")
    (grad_expected,) = torch.autograd.grad(expected.sum(), logits)
    out, grad = torch.zeros_like(expected), torch.zeros_like(logits)
    given = logits.detach() if name == "sigmoid" else logits.detach().softmax(1)
    buffer = [] if name == "sigmoid" else [torch.zeros(5, dtype=torch.float64)]
    getattr(mmcv_ext, f"{name}_focal_loss_forward")(given, target, weight, out, gamma=2.0, alpha=0.25)
    getattr(mmcv_ext, f"{name}_focal_loss_backward")(
        given, target, weight, *buffer, grad, gamma=2.0, alpha=0.25
    )
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(grad, grad_expected)


def test_modulated_deform_conv():
    x, offset, mask, weight, bias = (
        leaf(2, 4, 5, 6),
        leaf(2, 18, 5, 6),
        leaf(2, 9, 5, 6),
        leaf(3, 4, 3, 3),
        leaf(3),
    )
    inputs = [x, offset, mask, weight, bias]
    expected = ops.modulated_deform_conv2d(x, offset, mask, weight, bias, 1, 1)
    grad, grads_expected = gradients(expected, inputs)
    settings = dict(
        kernel_h=3, kernel_w=3, stride_h=1, stride_w=1, pad_h=1, pad_w=1, dilation_h=1, dilation_w=1
    )
    settings |= dict(group=1, deformable_group=1, with_bias=True)
    x, offset, mask, weight, bias = (t.detach() for t in inputs)
    out, empty = torch.zeros_like(expected), x.new_empty(0)
    mmcv_ext.modulated_deform_conv_forward(x, weight, bias, empty, offset, mask, out, empty, **settings)
    torch.testing.assert_close(out, expected.detach())
    gx, go, gm, gw, gb = (torch.zeros_like(t) for t in inputs)
    mmcv_ext.modulated_deform_conv_backward(
        x, weight, bias, empty, offset, mask, empty, gx, gw, gb, go, gm, grad, **settings
    )
    for found, wanted in zip((gx, go, gm, gw, gb), grads_expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_carafe_and_masked_convolution():
    x, masks = leaf(1, 4, 3, 3), leaf(1, 9, 6, 6)
    expected = ops.carafe(x, masks, 3, 1, 2)
    grad, grads_expected = gradients(expected, [x, masks])
    out, kept, gx, gm = (
        torch.zeros_like(expected),
        torch.zeros_like(x),
        torch.zeros_like(x),
        torch.zeros_like(masks),
    )
    sizes = dict(kernel_size=3, group_size=1, scale_factor=2)
    mmcv_ext.carafe_forward(x.detach(), masks.detach(), kept, None, None, out, **sizes)
    mmcv_ext.carafe_backward(grad, kept, masks.detach(), None, None, None, None, gx, gm, **sizes)
    for found, wanted in zip((out, gx, gm), (expected.detach(), *grads_expected), strict=True):
        torch.testing.assert_close(found, wanted)
    column = torch.zeros(4 * 9, 2, dtype=torch.float64)
    rows, columns = torch.tensor([0, 2]), torch.tensor([1, 2])
    mmcv_ext.masked_im2col_forward(
        x.detach(), rows, columns, column, kernel_h=3, kernel_w=3, pad_h=1, pad_w=1
    )
    unfolded = torch.nn.functional.unfold(x.detach(), 3, padding=1)[0]
    torch.testing.assert_close(column, unfolded[:, [1, 8]])


def test_other_entries_say_what_to_do():
    with pytest.raises(NotImplementedError, match=r"mmcv\._ext\.knn_forward.*pip install mmcv"):
        mmcv_ext.knn_forward(torch.zeros(1))


@pytest.fixture(autouse=True)
def no_trace_of_mmcv():
    """Leave the modules and finders as they were: later tests must not find the package made here."""
    finders, modules = (
        list(sys.meta_path),
        {name: module for name, module in sys.modules.items() if _is_mmcv(name)},
    )
    yield
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if _is_mmcv(name)]:
        del sys.modules[name]
    sys.modules.update(modules)
    importlib.invalidate_caches()


def _is_mmcv(name):
    return name == "mmcv" or name.startswith("mmcv.")


def fake_mmcv(folder, monkeypatch, with_ext):
    package = folder / "mmcv"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if with_ext:
        (package / "_ext.py").write_text("own = True")
    monkeypatch.syspath_prepend(folder)
    for name in ("mmcv", "mmcv._ext"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_install_provides_what_is_missing(tmp_path, monkeypatch):
    fake_mmcv(tmp_path, monkeypatch, with_ext=False)
    assert mmcv_ops.install() and mmcv_ops.install()
    assert importlib.import_module("mmcv._ext") is mmcv_ext


def test_install_leaves_a_compiled_mmcv_alone(tmp_path, monkeypatch):
    fake_mmcv(tmp_path, monkeypatch, with_ext=True)
    assert not mmcv_ops.install()
    assert importlib.import_module("mmcv._ext").own


def test_scripts_run_with_it(tmp_path):
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text("import sys, mmcv._ext as e; print(e.get_compiler_version(), sys.argv[1:])")
    command = [sys.executable, "-m", "visdet.compat.mmcv_ops", str(script), "--a", "b"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:."})
    assert done.stdout.strip() == "none: operators by visdet ['--a', 'b']", done.stderr

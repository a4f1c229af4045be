"""Kernels of the detection operators: against their plain-torch definitions."""

import pytest
import torch
from detection_cases import CASES, DEVICES, TOLERANCE, assert_near, draw, first_of, run

from visdet.ops.focal_loss import sigmoid_focal_loss_reference
from visdet.ops.roi_pool import roi_pool_reference, roi_pool_with_argmax


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(case, dtype, device):
    setup = CASES[case](dtype, device)
    # Regions, which round to bins, stay in the type the operator computes them in.
    function = setup.reference if "roi_pool" not in case else reference_of_pooled
    output, grads = run(setup.op, setup)
    grad_output = draw(*output.shape, seed=5).to(dtype).double()
    expected, expected_grads = run(function, setup, grad_output, exact="roi_pool" not in case)
    assert_near(output, expected.double().cpu(), dtype)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert_near(grad, wanted.double().cpu(), dtype)


def reference_of_pooled(input, rois, *settings):
    return roi_pool_reference(input, rois, *settings)[0]


@pytest.mark.parametrize("device", DEVICES)
def test_argmax_is_the_references(device):
    for case in (name for name in CASES if "roi_pool" in name):
        setup = CASES[case](torch.float32, device)
        expected = roi_pool_reference(*(a.cpu() if torch.is_tensor(a) else a for a in setup.arguments))
        for found, wanted in zip(setup.op(*setup.arguments), expected, strict=True):
            assert torch.equal(found.cpu(), wanted) and found.dtype == wanted.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_regions_without_end_have_a_result(device):
    values = draw(1, 2, 5, 6).float()
    inf, nan = float("inf"), float("nan")
    boxes = [
        (0, 0, inf, 3),
        (-inf, 0, inf, 3),
        (nan, 0, 3, 3),
        (0, 0, nan, nan),
        (1e30, 0, 2e30, 3),
        (-1e30, 0, 1e30, 9),
    ]
    rois = torch.tensor([(0, *box) for box in boxes] + [(nan, 0, 0, 3, 3), (1e30, 0, 0, 3, 3)])
    found = roi_pool_with_argmax(values.to(device), rois.to(device), (2, 2), 1.0)
    for one, wanted in zip(found, roi_pool_reference(values, rois, 2, 2, 1.0), strict=True):
        assert torch.equal(one.cpu(), wanted)
    assert (found[1].cpu() >= 0).any() and (found[1].cpu() < 0).any()


@pytest.mark.parametrize("device", DEVICES)
def test_not_a_number_is_never_the_maximum(device):
    values = torch.tensor(
        [[[[float("nan"), 1.0, -float("inf")], [2.0, float("nan"), float("inf")]]]], device=device
    )
    rois = torch.tensor(
        [[0.0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 2, 0, 2, 0], [0, 0, 0, 2, 1]], device=device
    )
    pooled, argmax = roi_pool_with_argmax(values, rois, (1, 1), 1.0)
    assert argmax.flatten().tolist() == [3, 1, 0, 2, 5]
    assert pooled.flatten().nan_to_num(7.0).tolist() == [2, 1, 7, -float("inf"), float("inf")] or (
        pooled[2].isnan().all() and pooled[3].isneginf().all() and pooled[4].isposinf().all()
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_losses_of_extreme_logits(dtype, device):
    logits = torch.tensor(
        [[0.0, 1e-8, -1e-8, 30.0, -30.0, 87.5, -87.5, 700.0, -700.0, 1e30, -1e30]], dtype=dtype, device=device
    )
    for target in (11, 3, 4, 9):
        arguments = (logits, torch.tensor([target], device=device), logits.new_empty(0), 2.0, 0.25)
        found = torch.ops.visdet.sigmoid_focal_loss(*arguments)
        expected = sigmoid_focal_loss_reference(
            logits.double(), *arguments[1:2], logits.double().new_empty(0), 2.0, 0.25
        )
        rtol = 1e-12 if dtype == torch.float64 else 1e-5 if device == "cpu" else 5e-5  # __expf
        torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=1e-37)
        grad = torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(logits), *arguments)
        assert grad.isfinite().all()
    nan = torch.full((1, 20), float("nan"), device=device, dtype=dtype)
    arguments = (nan, torch.tensor([0], device=device), logits.new_empty(0), 2.0, 0.25)
    assert torch.ops.visdet.sigmoid_focal_loss(*arguments).isnan().all()
    assert torch.ops.visdet.sigmoid_focal_loss_backward(torch.ones_like(nan), *arguments).isnan().all()


@pytest.mark.parametrize("case", ["roi_pool", "focal", "focal-gamma-0", "carafe", "carafe-one"])
def test_gradients_numerically(case):
    setup = CASES[case](torch.float64, "cpu")
    leaves = tuple(setup.arguments[i].requires_grad_() for i in setup.differentiable)

    def function(*leaves):
        arguments = list(setup.arguments)
        for i, leaf in zip(setup.differentiable, leaves, strict=True):
            arguments[i] = leaf
        return first_of(setup.op(*arguments))

    assert torch.autograd.gradcheck(function, leaves)

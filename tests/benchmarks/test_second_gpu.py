"""Every operator with a tiny benchmark case: on the second GPU, while the first is the current one."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # the benchmarks are no part of the installed package

from benchmarks.run import all_cases

TINY = [case for case in all_cases() if case.name == "tiny"]


def results(case, device):
    """Return the output and the gradients of a case on a device, on the CPU."""
    call = case.call(case.make(torch.float32, torch.device(device)))
    arguments = list(call.arguments)
    for position in call.differentiable:
        arguments[position] = arguments[position].detach().requires_grad_()
    output = call.function(*arguments)
    assert output.device == torch.device(device)
    leaves = [arguments[position] for position in call.differentiable]
    grads = torch.autograd.grad(output.square().sum(), leaves)
    return [tensor.detach().cpu() for tensor in (output, *grads)]


@pytest.mark.cuda(devices=2)
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.op)
def test_second_gpu_while_the_first_is_current(case):
    assert torch.cuda.current_device() == 0
    for actual, expected in zip(results(case, "cuda:1"), results(case, "cuda:0"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_every_operator_of_ours_has_a_tiny_case():
    assert {"ms_deform_attn", "deformable_aggregation", "sample_sum", "sample_dot", "gaussian_field"} <= {
        case.op for case in TINY
    }

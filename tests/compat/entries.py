"""What the tests of mmcv._ext share: an entry writes into tensors that it is given, as mmcv's wrappers expect."""

import pytest
import torch
from torch.testing import assert_close


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])])
def device(request):
    """Make every tensor of a test on this device."""
    torch.manual_seed(0)
    with torch.device(request.param):
        yield request.param


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def check_entries(function, inputs, forward, backward):
    """Compare a forward entry and a backward entry, given output tensors, with the function and its gradients."""
    expected = function(*inputs)
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, inputs, grad)
    values = [tensor.detach() for tensor in inputs]
    out, outs = torch.zeros_like(expected), [torch.zeros_like(tensor) for tensor in values]
    forward(*values, out)
    assert_close(out, expected.detach())
    backward(grad, *values, *outs)
    assert_close(outs, grads)
    with pytest.raises(ValueError, match=r"_(ext|C)\.\w+: \w+ must be \["):
        forward(*values, out[:0])

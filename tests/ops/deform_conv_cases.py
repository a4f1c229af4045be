"""Problems of deform_conv2d of all shapes, their tensors, and what the definition makes of them in float64."""

from typing import NamedTuple

import torch

from visdet.ops.deform_conv2d import deform_conv2d_reference

# Of the greatest number: operands and result of the products are rounded to the type, by half an eps each, and so are
# the gradients of the columns; torch's float32 products sum thousands of terms.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 1.5 * torch.finfo(torch.float16).eps,
}


class Case(NamedTuple):
    B: int = 2
    C: int = 16
    M: int = 8
    H: int = 6
    W: int = 7
    kernel: tuple = (3, 3)
    stride: tuple = (1, 1)
    padding: tuple = (1, 1)
    dilation: tuple = (1, 1)
    groups: int = 1
    G: int = 1
    step: int = 32
    masked: bool = True
    reach: float = 2.0  # pixels, of offsets

    @property
    def settings(self):
        return self.stride, self.padding, self.dilation, self.G

    def tensors(self, dtype, device):
        """Return input, offset, mask and weight."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        KH, KW = self.kernel
        height, width = (
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, k, step, pad, dil in zip(
                (self.H, self.W), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        tensors = (
            draw(self.B, self.C, self.H, self.W),
            draw(self.B, self.G * 2 * KH * KW, height, width) * self.reach,
            draw(self.B, self.G * KH * KW, height, width).sigmoid() if self.masked else None,
            draw(self.M, self.C // self.groups, KH, KW),
        )
        return [None if t is None else t.to(device, dtype) for t in tensors]


CASES = {
    "usual": Case(),
    "no-mask": Case(masked=False),
    "no-offset": Case(reach=0.0),  # every tap of the padding at exactly -1
    "far": Case(reach=9.0),
    "settings": Case(C=4, M=6, kernel=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(2, 1), groups=2, G=2),
    "groups": Case(B=3, C=24, M=6, groups=3, G=2, step=2),
    "narrow-groups": Case(B=3, C=32, M=8, groups=4, step=2),
    "group-of-each-channel": Case(C=6, M=6, groups=6, G=2),
    "deform-groups": Case(C=64, G=4),
    "in-turns": Case(B=5, step=2),
    "odd-channels": Case(C=13, M=5),
    "three-channels": Case(B=1, C=3, M=5, H=9, W=9, kernel=(5, 7), stride=(2, 2), padding=(3, 2), G=3),
    "wide": Case(B=1, C=264, H=3, W=3, groups=2),
    "one-tap": Case(kernel=(1, 1), padding=(0, 0)),
    "one-place": Case(H=3, W=3, padding=(0, 0)),
    "one-pixel": Case(H=1, W=1),
    "two-tiles": Case(H=17, W=23),
}


def run(case, tensors, grad_output=None):
    """Return output and gradients of the operator."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    output = torch.ops.visdet.deform_conv2d(*leaves, *case.settings, case.step)
    if grad_output is None:
        grad_output = gradient_of(output)
    return output.detach(), torch.autograd.grad(output, [t for t in leaves if t is not None], grad_output)


def gradient_of(output):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def expect(case, tensors, grad_output):
    """Return the same in float64 on the CPU."""
    leaves = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    x, offset, mask, weight = leaves
    output = deform_conv2d_reference(x, offset, mask, weight, None, *case.settings)
    leaves = [t for t in leaves if t is not None]
    return output.detach(), torch.autograd.grad(output, leaves, grad_output.cpu().double())


def assert_near(found, wanted, dtype):
    assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
    scale = max(wanted.abs().max().item(), 1e-30)
    torch.testing.assert_close(found.cpu().double() / scale, wanted / scale, rtol=0, atol=TOLERANCE[dtype])

// Schemas of deform_conv2d. Fake tensors, autograd, the plain-torch definition and who serves where a library is
// missing are in visdet/ops/deform_conv2d.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor? mask, Tensor weight, int[] stride, int[] padding,"
      " int[] dilation, int deform_groups, int im2col_step) -> Tensor");
  m.def(
      "deform_conv2d_backward(Tensor grad_output, Tensor input, Tensor offset, Tensor? mask, Tensor weight,"
      " int[] stride, int[] padding, int[] dilation, int deform_groups, int im2col_step, bool needs_input,"
      " bool needs_offset, bool needs_weight)"
      " -> (Tensor grad_input, Tensor grad_offset, Tensor grad_mask, Tensor grad_weight)");
}

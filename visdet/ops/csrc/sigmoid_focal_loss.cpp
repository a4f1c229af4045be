// Schemas of sigmoid_focal_loss. Fake tensors, autograd and the plain-torch definition are in
// visdet/ops/focal_loss.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("sigmoid_focal_loss(Tensor input, Tensor target, Tensor weight, float gamma, float alpha) -> Tensor");
  m.def(
      "sigmoid_focal_loss_backward(Tensor grad_output, Tensor input, Tensor target, Tensor weight, float gamma,"
      " float alpha) -> Tensor grad_input");
}

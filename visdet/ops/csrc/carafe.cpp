// Schemas of carafe. Fake tensors, autograd and the plain-torch definition are in visdet/ops/carafe.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("carafe(Tensor features, Tensor masks, int kernel_size, int group_size, int scale_factor) -> Tensor");
  m.def(
      "carafe_backward(Tensor grad_output, Tensor features, Tensor masks, int kernel_size, int group_size,"
      " int scale_factor) -> (Tensor grad_features, Tensor grad_masks)");
}

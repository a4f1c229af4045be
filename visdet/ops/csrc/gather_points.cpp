// The schemas of gather_points.h, and its functions for CPU tensors.
#include "gather_points.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("gather_points(Tensor features, Tensor indices, Tensor weight, bool zeros_outside) -> Tensor");
  m.def(
      "gather_points_backward(Tensor grad_output, Tensor features, Tensor indices, Tensor weight, bool zeros_outside,"
      " bool needs_features, bool needs_weight) -> (Tensor grad_features, Tensor grad_weight)");
  m.def("stacked_indices(Tensor indices, Tensor sizes, Tensor groups) -> Tensor");
}

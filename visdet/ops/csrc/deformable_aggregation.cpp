// Schemas of deformable_aggregation. Fake tensors, autograd and the plain-torch definition are in
// visdet/ops/deformable_aggregation.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deformable_aggregation(Tensor features, Tensor level_shapes, Tensor level_starts, Tensor locations,"
      " Tensor weights) -> Tensor");
  m.def(
      "deformable_aggregation_backward(Tensor grad_output, Tensor features, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_locations, Tensor grad_weights)");
}

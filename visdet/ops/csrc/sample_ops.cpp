// Schemas of sample_sum and sample_dot. Fake tensors, autograd and the plain-torch definitions are in
// visdet/ops/sample_sum.py and visdet/ops/sample_dot.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("sample_sum(Tensor images, Tensor samples, Tensor weights) -> Tensor");
  m.def(
      "sample_sum_backward(Tensor grad_output, Tensor images, Tensor samples, Tensor weights, bool deterministic)"
      " -> (Tensor grad_images, Tensor grad_samples, Tensor grad_weights)");
  m.def("sample_dot(Tensor images, Tensor samples, Tensor queries, Tensor depths, int num_octaves) -> Tensor");
  m.def(
      "sample_dot_backward(Tensor grad_output, Tensor images, Tensor samples, Tensor queries, Tensor depths,"
      " int num_octaves, bool deterministic)"
      " -> (Tensor grad_images, Tensor grad_samples, Tensor grad_queries, Tensor grad_depths)");
}

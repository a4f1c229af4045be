// Schemas of box_key_points. Fake tensors, autograd and the plain-torch definition are in visdet/ops/box_key_points.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("box_key_points(Tensor anchors, Tensor fixed, Tensor logits, float max_log_size) -> Tensor");
  m.def(
      "box_key_points_backward(Tensor grad_output, Tensor anchors, Tensor fixed, Tensor logits, float max_log_size)"
      " -> (Tensor grad_anchors, Tensor grad_logits)");
}

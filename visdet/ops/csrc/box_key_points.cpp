// box_key_points: schemas. On the CPU, plain torch computes it.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("box_key_points(Tensor anchors, Tensor fixed, Tensor logits, float max_log_size) -> Tensor");
  m.def(
      "box_key_points_backward(Tensor grad_output, Tensor anchors, Tensor fixed, Tensor logits, float max_log_size)"
      " -> (Tensor grad_anchors, Tensor grad_logits)");
}

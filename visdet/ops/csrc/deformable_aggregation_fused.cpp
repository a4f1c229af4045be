// deformable_aggregation_fused: schemas. On the CPU, plain torch makes the arguments of deformable_aggregation.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deformable_aggregation_fused(Tensor features, Tensor level_shapes, Tensor level_starts, Tensor key_points,"
      " Tensor projection, Tensor image_wh, Tensor logits, Tensor camera_logits, Tensor keep, float keep_scale)"
      " -> Tensor");
  m.def(
      "deformable_aggregation_fused_backward(Tensor grad_output, Tensor features, Tensor level_shapes,"
      " Tensor level_starts, Tensor key_points, Tensor projection, Tensor image_wh, Tensor logits,"
      " Tensor camera_logits, Tensor keep, float keep_scale, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_key_points, Tensor grad_logits, Tensor grad_camera_logits)");
}

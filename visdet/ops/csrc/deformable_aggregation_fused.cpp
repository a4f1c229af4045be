// Schemas of deformable_aggregation_fused. Its CPU kernels, fake tensors, autograd and plain-torch definition are in
// visdet/ops/deformable_aggregation_fused.py.
#include "deformable_aggregation_fused.h"

#include <torch/csrc/stable/library.h>

namespace visdet {
namespace {

void check(const Tensor& features, const Tensor& level_shapes, const Tensor& key_points, const Tensor& projection,
           const Tensor& image_wh, const Tensor& logits, const Tensor& camera_logits, const Tensor& keep) {
  check_deformable_aggregation_fused(features, level_shapes, key_points, projection, image_wh, logits, camera_logits,
                                     keep);
}

}  // namespace
}  // namespace visdet

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
  m.def(
      "check_deformable_aggregation_fused(Tensor features, Tensor level_shapes, Tensor key_points, Tensor projection,"
      " Tensor image_wh, Tensor logits, Tensor camera_logits, Tensor keep) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) { m.impl("check_deformable_aggregation_fused", TORCH_BOX(&visdet::check)); }

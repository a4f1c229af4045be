// Deformable aggregation of what a head predicts: key points in space and the logits of the weights.
//
// clang-format off
// features, level_shapes, level_starts: as in deformable_aggregation.h
// key_points    [B, Q, P, 3]           float64 for float64 features, float32 otherwise, as all but logits and keep
// projection    [B, V, 4, 4]           to pixels: (u d, v d, d, 1) = projection (x, y, z, 1)
// image_wh      [B, V, 2]              width and height in pixels
// logits        [B, Q, V, L, P, G]     the type of key_points or that of features;
//               [B, Q, L, P, G]        with camera_logits, which are added
// camera_logits [B, V, L, P, G] or [0] the type of logits
// keep          [B, Q, V, P] or [0]    bool: pairs that count; all, without
// out           [B, Q, C]              the type of features
// clang-format on
//
// locations = (u d, v d) / max(d, 1e-5) / image_wh, and outside the image where keep is false;
// weights = keep_scale * softmax of the logits over V, L and P together; then deformable_aggregation.h.
#pragma once

#include "common/checks.h"

namespace visdet {

constexpr double kMinDepth = 1e-5;

struct FusedAggregationProblem {
  int64_t B, Q, V, L, P, G;
  bool has_camera, has_keep;
};

inline FusedAggregationProblem check_deformable_aggregation_fused(const Tensor& features, const Tensor& level_shapes,
                                                                  const Tensor& key_points, const Tensor& projection,
                                                                  const Tensor& image_wh, const Tensor& logits,
                                                                  const Tensor& camera_logits, const Tensor& keep) {
  constexpr const char* op = "deformable_aggregation_fused";
  check_values(op, "features", features, {"B", "S", "C"});
  check_shape(op, "level_shapes", level_shapes, {"V", "L", 2}, " (height, width)");
  const int64_t B = features.size(0), V = level_shapes.size(0), L = level_shapes.size(1);
  check_beside(op, "key_points", key_points, {{"B", B}, "Q", "P", 3}, "features", features);
  const int64_t Q = key_points.size(1), P = key_points.size(2);
  check_beside(op, "projection", projection, {{"B", B}, {"V", V}, 4, 4}, "features", features);
  check_beside(op, "image_wh", image_wh, {{"B", B}, {"V", V}, 2}, "features", features);
  const bool has_camera = camera_logits.dim() != 1, has_keep = keep.dim() != 1;
  if (has_camera) {
    check_shape(op, "logits", logits, {{"B", B}, {"Q", Q}, {"L", L}, {"P", P}, "G"}, " beside camera_logits");
    check_shape(op, "camera_logits", camera_logits, {{"B", B}, {"V", V}, {"L", L}, {"P", P}, {"G", logits.size(4)}});
    check_same_type(op, "camera_logits", camera_logits, "logits", logits);
  } else {
    check_shape(op, "logits", logits, {{"B", B}, {"Q", Q}, {"V", V}, {"L", L}, {"P", P}, "G"});
  }
  if (has_keep) {
    check_typed(op, "keep", keep, {{"B", B}, {"Q", Q}, {"V", V}, {"P", P}}, ScalarType::Bool, "features", features);
  }
  check_accumulate_type(op, "logits", logits, "features", features.scalar_type(), true);
  check_device(op, "logits", logits, "features", features);
  check_device(op, "camera_logits", camera_logits, "features", features);
  return {B, Q, V, L, P, logits.size(logits.dim() - 1), has_camera, has_keep};
}

// The inputs of a call, checked and contiguous, and the arguments of deformable_aggregation, which are made of them.
struct FusedAggregationInputs {
  FusedAggregationProblem problem;
  Tensor key_points, projection, image_wh, logits, camera_logits, keep;
  double keep_scale;
  Tensor locations, weights;

  FusedAggregationInputs(const Tensor& features, const Tensor& level_shapes, const Tensor& key_points,
                         const Tensor& projection, const Tensor& image_wh, const Tensor& logits,
                         const Tensor& camera_logits, const Tensor& keep, double keep_scale)
      : problem(check_deformable_aggregation_fused(features, level_shapes, key_points, projection, image_wh, logits,
                                                   camera_logits, keep)),
        key_points(dense(key_points)),
        projection(dense(projection)),
        image_wh(dense(image_wh)),
        logits(dense(logits)),
        camera_logits(dense(camera_logits)),
        keep(dense(keep)),
        keep_scale(keep_scale),
        locations(new_empty(key_points, {problem.B, problem.Q, problem.P, problem.V, 2})),
        weights(new_empty(key_points, {problem.B, problem.Q, problem.P, problem.V, problem.L, problem.G})) {}
};

}  // namespace visdet

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
  VISDET_CHECK(op, features.dim() == 3, "features must be [B, S, C], got ", shape_text(features));
  VISDET_CHECK(op, is_value_dtype(features.scalar_type()),
               "features must be float64, float32, float16 or bfloat16, got ", dtype_text(features));
  VISDET_CHECK(op, level_shapes.dim() == 3 && level_shapes.size(2) == 2,
               "level_shapes must be [V, L, 2] (height, width), got ", shape_text(level_shapes));
  FusedAggregationProblem problem{};
  problem.B = features.size(0), problem.V = level_shapes.size(0), problem.L = level_shapes.size(1);
  const int64_t B = problem.B, V = problem.V, L = problem.L;
  VISDET_CHECK(op, key_points.dim() == 4 && key_points.size(0) == B && key_points.size(3) == 3,
               "key_points must be [B, Q, P, 3] = [", B, ", Q, P, 3], got ", shape_text(key_points));
  problem.Q = key_points.size(1), problem.P = key_points.size(2);
  const int64_t Q = problem.Q, P = problem.P;
  VISDET_CHECK(op,
               projection.dim() == 4 && projection.size(0) == B && projection.size(1) == V && projection.size(2) == 4 &&
                   projection.size(3) == 4,
               "projection must be [B, V, 4, 4] = [", B, ", ", V, ", 4, 4], got ", shape_text(projection));
  VISDET_CHECK(op, image_wh.dim() == 3 && image_wh.size(0) == B && image_wh.size(1) == V && image_wh.size(2) == 2,
               "image_wh must be [B, V, 2] = [", B, ", ", V, ", 2], got ", shape_text(image_wh));
  problem.has_camera = camera_logits.dim() != 1;
  problem.has_keep = keep.dim() != 1;
  if (problem.has_camera) {
    VISDET_CHECK(
        op,
        logits.dim() == 5 && logits.size(0) == B && logits.size(1) == Q && logits.size(2) == L && logits.size(3) == P,
        "logits must be [B, Q, L, P, G] = [", B, ", ", Q, ", ", L, ", ", P, ", G] beside camera_logits, got ",
        shape_text(logits));
    problem.G = logits.size(4);
    VISDET_CHECK(op,
                 camera_logits.dim() == 5 && camera_logits.size(0) == B && camera_logits.size(1) == V &&
                     camera_logits.size(2) == L && camera_logits.size(3) == P && camera_logits.size(4) == problem.G,
                 "camera_logits must be [B, V, L, P, G] = [", B, ", ", V, ", ", L, ", ", P, ", ", problem.G, "], got ",
                 shape_text(camera_logits));
    VISDET_CHECK(op, camera_logits.scalar_type() == logits.scalar_type(), "camera_logits must have logits' type ",
                 dtype_text(logits), ", got ", dtype_text(camera_logits));
  } else {
    VISDET_CHECK(op,
                 logits.dim() == 6 && logits.size(0) == B && logits.size(1) == Q && logits.size(2) == V &&
                     logits.size(3) == L && logits.size(4) == P,
                 "logits must be [B, Q, V, L, P, G] = [", B, ", ", Q, ", ", V, ", ", L, ", ", P, ", G], got ",
                 shape_text(logits));
    problem.G = logits.size(5);
  }
  if (problem.has_keep) {
    VISDET_CHECK(op,
                 keep.dim() == 4 && keep.size(0) == B && keep.size(1) == Q && keep.size(2) == V && keep.size(3) == P &&
                     keep.scalar_type() == ScalarType::Bool,
                 "keep must be bool [B, Q, V, P] = [", B, ", ", Q, ", ", V, ", ", P, "], got ", dtype_text(keep), " ",
                 shape_text(keep));
  }
  const ScalarType wide = accumulate_dtype(features.scalar_type());
  const Tensor* const of_space[] = {&key_points, &projection, &image_wh};
  const char* const names[] = {"key_points", "projection", "image_wh"};
  for (int i = 0; i < 3; ++i) {
    VISDET_CHECK(op, of_space[i]->scalar_type() == wide, names[i], " must be ", torch::headeronly::toString(wide),
                 " for features of type ", dtype_text(features), ", got ", dtype_text(*of_space[i]));
  }
  VISDET_CHECK(op, logits.scalar_type() == wide || logits.scalar_type() == features.scalar_type(), "logits must be ",
               torch::headeronly::toString(wide), " or of features' type ", dtype_text(features), ", got ",
               dtype_text(logits));
  const Tensor* const others[] = {&key_points, &projection, &image_wh, &logits, &camera_logits, &keep};
  const char* const other_names[] = {"key_points", "projection", "image_wh", "logits", "camera_logits", "keep"};
  for (int i = 0; i < 6; ++i) {
    VISDET_CHECK(op, on_device_of(features, *others[i]), other_names[i], " must be on the device of features");
  }
  return problem;
}

}  // namespace visdet

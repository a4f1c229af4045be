// Deformable aggregation: the contract.
//
//   out[b, q, c] = sum over p, v, l of weights[b, q, p, v, l, g(c)]
//                  * bilinear(features[b, camera v, level l, c], locations[b, q, p, v]),   g(c) = c / (C / G)
//
// clang-format off
// features     [B, S, C]           float64, float32, float16 or bfloat16; rows camera by camera, level by level
// level_shapes [V, L, 2]           int64 (height, width) of each camera's levels
// level_starts [V, L]              int64, first row of each map in S
// locations    [B, Q, P, V, 2]     (x, y) in 0..1 of the image; float64 for float64 features, float32 otherwise
// weights      [B, Q, P, V, L, G]  the type of locations or that of features
// out          [B, Q, C]           the type of features
// clang-format on
//
// A (point, camera) pair counts iff 0 < x < 1 and 0 < y < 1, strictly; NaN does not. A pair that does not count adds
// nothing, whatever its weight, and has zero gradients. One that counts is sampled in every level at
// (x * W - 0.5, y * H - 0.5), border rule of common/bilinear.h. Every sum is taken in the type of locations.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "common/checks.h"

namespace visdet {

struct DeformableAggregationProblem {
  int64_t B, S, C, V, L, Q, P, G;
};

inline DeformableAggregationProblem check_deformable_aggregation(const Tensor& features, const Tensor& level_shapes,
                                                                 const Tensor& level_starts, const Tensor& locations,
                                                                 const Tensor& weights) {
  constexpr const char* op = "deformable_aggregation";
  VISDET_CHECK(op, features.dim() == 3, "features must be [B, S, C], got ", shape_text(features));
  VISDET_CHECK(op, is_value_dtype(features.scalar_type()),
               "features must be float64, float32, float16 or bfloat16, got ", dtype_text(features));
  VISDET_CHECK(op, level_shapes.dim() == 3 && level_shapes.size(2) == 2,
               "level_shapes must be [V, L, 2] (height, width), got ", shape_text(level_shapes));
  DeformableAggregationProblem problem{};
  problem.B = features.size(0), problem.S = features.size(1), problem.C = features.size(2);
  problem.V = level_shapes.size(0), problem.L = level_shapes.size(1);
  VISDET_CHECK(op, level_starts.dim() == 2 && level_starts.size(0) == problem.V && level_starts.size(1) == problem.L,
               "level_starts must be [V, L] = [", problem.V, ", ", problem.L, "], got ", shape_text(level_starts));
  VISDET_CHECK(op, level_shapes.scalar_type() == ScalarType::Long, "level_shapes must be int64, got ",
               dtype_text(level_shapes));
  VISDET_CHECK(op, level_starts.scalar_type() == ScalarType::Long, "level_starts must be int64, got ",
               dtype_text(level_starts));
  VISDET_CHECK(op,
               locations.dim() == 5 && locations.size(0) == problem.B && locations.size(3) == problem.V &&
                   locations.size(4) == 2,
               "locations must be [B, Q, P, V, 2] = [", problem.B, ", Q, P, ", problem.V, ", 2], got ",
               shape_text(locations));
  problem.Q = locations.size(1), problem.P = locations.size(2);
  VISDET_CHECK(op,
               weights.dim() == 6 && weights.size(0) == problem.B && weights.size(1) == problem.Q &&
                   weights.size(2) == problem.P && weights.size(3) == problem.V && weights.size(4) == problem.L,
               "weights must be [B, Q, P, V, L, G] = [", problem.B, ", ", problem.Q, ", ", problem.P, ", ", problem.V,
               ", ", problem.L, ", G], got ", shape_text(weights));
  problem.G = weights.size(5);
  VISDET_CHECK(op, problem.C == 0 || (problem.G > 0 && problem.C % problem.G == 0),
               "the groups G of weights must divide the channels C = ", problem.C, " of features, got G = ", problem.G);
  VISDET_CHECK(op, level_shapes.is_cpu() == level_starts.is_cpu(),
               "level_shapes and level_starts must be on the same device");
  VISDET_CHECK(op,
               level_shapes.is_cpu() ||
                   (!features.is_cpu() && on_device_of(features, level_shapes) && on_device_of(features, level_starts)),
               "level_shapes and level_starts must be on the CPU or on the device of features");
  const ScalarType coordinates = accumulate_dtype(features.scalar_type());
  VISDET_CHECK(op, locations.scalar_type() == coordinates, "locations must be ",
               torch::headeronly::toString(coordinates), " for features of type ", dtype_text(features), ", got ",
               dtype_text(locations));
  VISDET_CHECK(op, weights.scalar_type() == coordinates || weights.scalar_type() == features.scalar_type(),
               "weights must be ", torch::headeronly::toString(coordinates), " or of features' type ",
               dtype_text(features), ", got ", dtype_text(weights));
  for (const Tensor* other : {&locations, &weights}) {
    VISDET_CHECK(op, on_device_of(features, *other), other == &locations ? "locations" : "weights",
                 " must be on the device of features");
  }
  return problem;
}

inline void check_deformable_aggregation_grad(const DeformableAggregationProblem& problem, const Tensor& grad_output,
                                              const Tensor& features) {
  constexpr const char* op = "deformable_aggregation_backward";
  VISDET_CHECK(op,
               grad_output.dim() == 3 && grad_output.size(0) == problem.B && grad_output.size(1) == problem.Q &&
                   grad_output.size(2) == problem.C,
               "grad_output must be [B, Q, C] = [", problem.B, ", ", problem.Q, ", ", problem.C, "], got ",
               shape_text(grad_output));
  VISDET_CHECK(op, grad_output.scalar_type() == features.scalar_type(), "grad_output must have features' type ",
               dtype_text(features), ", got ", dtype_text(grad_output));
  VISDET_CHECK(op, on_device_of(features, grad_output), "grad_output must be on the device of features");
}

// The maps of a table on the CPU must be non-empty, lie within the S rows of features and not overlap.
inline void check_camera_levels(const DeformableAggregationProblem& problem, const int64_t* level_shapes,
                                const int64_t* level_starts) {
  constexpr const char* op = "deformable_aggregation";
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t i = 0; i < problem.V * problem.L; ++i) {
    const int64_t H = level_shapes[2 * i], W = level_shapes[2 * i + 1], start = level_starts[i];
    const int64_t v = i / problem.L, l = i % problem.L;
    VISDET_CHECK(op, H > 0 && W > 0 && H <= INT32_MAX / W, "level_shapes[", v, ", ", l,
                 "] must be a positive (height, width) of fewer than 2^31 texels, got (", H, ", ", W, ")");
    VISDET_CHECK(op, start >= 0 && start <= problem.S - H * W, "camera ", v, ", level ", l, " (", H * W,
                 " rows from row ", start, ") must lie within the S = ", problem.S, " rows of features");
    rows.emplace_back(start, start + H * W);
  }
  std::sort(rows.begin(), rows.end());
  for (size_t i = 1; i < rows.size(); ++i) {
    VISDET_CHECK(op, rows[i].first >= rows[i - 1].second, "level_starts must not let maps overlap: rows ",
                 rows[i - 1].first, " to ", rows[i - 1].second, " and ", rows[i].first, " to ", rows[i].second);
  }
}

}  // namespace visdet

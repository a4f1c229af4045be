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
//
// deformable_aggregation_with_depth multiplies each corner of a sample by a number of the corner's texel, interpolated
// between two of its D depths: with n = floor(d) and f = d - n, (1 - f) * depth_probs[n] + f * depth_probs[n + 1],
// where an index outside 0..D - 1 counts as zero.
//
// clang-format off
// features     [B, S, C]           rows may be any distance apart, so that both may share a tensor
// depth_probs  [B, S, D]           the type of features, rows likewise
// locations    [B, Q, P, V, 3]     (x, y, d); d in 0..D - 1
// clang-format on
//
// A pair then counts iff also -1 < d < D.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "common/checks.h"

namespace visdet {

struct DeformableAggregationProblem {
  int64_t B, S, C, V, L, Q, P, G;
  int64_t D = 0;  // without depths
};

inline DeformableAggregationProblem check_deformable_aggregation(const Tensor& features, const Tensor& level_shapes,
                                                                 const Tensor& level_starts, const Tensor& locations,
                                                                 const Tensor& weights,
                                                                 const char* op = "deformable_aggregation",
                                                                 int64_t coordinates = 2) {
  check_values(op, "features", features, {"B", "S", "C"});
  check_shape(op, "level_shapes", level_shapes, {"V", "L", 2}, " (height, width)");
  const int64_t B = features.size(0), C = features.size(2), V = level_shapes.size(0), L = level_shapes.size(1);
  check_shape(op, "level_starts", level_starts, {{"V", V}, {"L", L}});
  check_beside(op, "locations", locations, {{"B", B}, "Q", "P", {"V", V}, coordinates}, "features", features);
  const int64_t Q = locations.size(1), P = locations.size(2);
  check_beside(op, "weights", weights, {{"B", B}, {"Q", Q}, {"P", P}, {"V", V}, {"L", L}, "G"}, "features", features,
               true);
  const int64_t G = weights.size(5);
  VISDET_CHECK(op, C == 0 || (G > 0 && C % G == 0), "the groups G of weights must divide the channels C = ", C,
               " of features, got G = ", G);
  check_table(op, "level_shapes", level_shapes, "features", features);
  check_table(op, "level_starts", level_starts, "features", features);
  VISDET_CHECK(op, level_shapes.is_cpu() == level_starts.is_cpu(),
               "level_shapes and level_starts must be on the same device");
  return {B, features.size(1), C, V, L, Q, P, G};
}

inline DeformableAggregationProblem check_aggregation_with_depth(const Tensor& features, const Tensor& depths,
                                                                 const Tensor& level_shapes, const Tensor& level_starts,
                                                                 const Tensor& locations, const Tensor& weights) {
  constexpr const char* op = "deformable_aggregation_with_depth";
  auto problem = check_deformable_aggregation(features, level_shapes, level_starts, locations, weights, op, 3);
  check_like(op, "depth_probs", depths, {{"B", problem.B}, {"S", problem.S}, "D"}, "features", features);
  problem.D = depths.size(2);
  return problem;
}

inline void check_deformable_aggregation_grad(const DeformableAggregationProblem& problem, const Tensor& grad_output,
                                              const Tensor& features,
                                              const char* op = "deformable_aggregation_backward") {
  check_like(op, "grad_output", grad_output, {{"B", problem.B}, {"Q", problem.Q}, {"C", problem.C}}, "features",
             features);
}

// A tensor [B, S, C] whose rows are equally far apart, or a contiguous copy.
inline Tensor rows_of(const Tensor& tensor) {
  const bool has_rows = tensor.stride(2) == 1 && tensor.stride(1) >= tensor.size(2) &&
                        tensor.stride(0) == tensor.size(1) * tensor.stride(1);
  return has_rows ? tensor : dense(tensor);
}

// Calls f(T{}, TW{}, A{}) for the types of features, of weights and of sums. The caller has included a
// dispatch_value_type(): that of common/values.cuh or that of cpu/dispatch.h.
template <typename F>
void dispatch_types(const Tensor& features, const Tensor& weights, const F& f) {
  const bool same = weights.scalar_type() == features.scalar_type();
  dispatch_value_type(features.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    if constexpr (!std::is_same_v<decltype(value_tag), decltype(accumulate_tag)>) {
      if (same) return f(value_tag, value_tag, accumulate_tag);
    }
    f(value_tag, accumulate_tag, accumulate_tag);
  });
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

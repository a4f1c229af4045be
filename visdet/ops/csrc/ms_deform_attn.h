// Multi-scale deformable attention: the contract.
//
//   out[b, q, g, :] = sum over l, p of weights[b, q, g, l, p] * bilinear(value[b, level l, g, :], locations[b, q, g, l,
//   p])
//
// value        [B, S, G, C]        float64, float32, float16 or bfloat16; S = sum of H_l * W_l, channels last
// level_shapes [L, 2]              int64 (height, width) of each level
// level_starts [L]                 int64, first row of each level in S
// locations    [B, Q, G, L, P, 2]  (x, y) in 0..1 of each level; float64 for float64 values, float32 otherwise
// weights      [B, Q, G, L, P]     the type of locations, any values
// out          [B, Q, G * C]       the type of value
//
// x = loc_x * W - 0.5, y = loc_y * H - 0.5, border rule of common/bilinear.h. With g = d loss / d out, d_ij = <g,
// corner_ij>:
//   grad_value[corner]  += weight * corner_weight * g
//   grad_weight          = sum of corner_weight_ij * d_ij
//   grad_location        = weight * (W * [(1 - fy)(d01 - d00) + fy (d11 - d10)], H * [(1 - fx)(d10 - d00) + fx (d11 -
//   d01)])
// Every sum is taken in the type of locations.
//
// level_shapes and level_starts are each on the CPU or on value's device. If both are on the CPU, the levels are
// checked to lie within S. What is on value's device is read there, with no synchronisation, and a level that does not
// lie within S then yields NaN instead of a stray access.
//
// The fused form takes what the layers before it produce, K = sum of num_points samples a row, level after level:
//
// reference_points [B, Q, L, D]     the type of locations above; D = 2: (x, y) in 0..1, D = 4: (cx, cy, w, h)
// offsets          [B, Q, G, K, 2]  that type, or value's
// logits           [B, Q, G, K]     the type of offsets
//   weights   = softmax of logits over K
//   locations = (x, y) + offset / (W, H)                          for D = 2
//             = (cx, cy) + offset * (w, h) * 0.5 / num_points[l]  for D = 4
// With w = weight: grad_logit = w * (grad_weight - sum over K of w * grad_weight); the other gradients by the chain
// rule from grad_location, where a sample that does not count gives zero.
#pragma once

#include <cstdint>

namespace visdet {

struct MsDeformAttnProblem {
  int64_t B, S, G, C, Q, L;
  int64_t K;            // samples a row: L * P, or the sum of num_points
  int64_t P;            // samples a row and level, the most of any level
  bool levels_on_host;  // both level_shapes and level_starts
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.

#include <vector>

#include "common/checks.h"

namespace visdet {

// What both forms check: value and the level table.
inline MsDeformAttnProblem check_value_and_levels(const char* op, const Tensor& value, const Tensor& level_shapes,
                                                  const Tensor& level_starts) {
  check_values(op, "value", value, {"B", "S", "G", "C"});
  check_shape(op, "level_shapes", level_shapes, {"L", 2}, " (height, width)");
  check_shape(op, "level_starts", level_starts, {{"L", level_shapes.size(0)}});
  check_table(op, "level_shapes", level_shapes, "value", value);
  check_table(op, "level_starts", level_starts, "value", value);
  MsDeformAttnProblem problem{};
  problem.B = value.size(0), problem.S = value.size(1), problem.G = value.size(2), problem.C = value.size(3);
  problem.L = level_shapes.size(0), problem.levels_on_host = level_shapes.is_cpu() && level_starts.is_cpu();
  return problem;
}

inline MsDeformAttnProblem check_ms_deform_attn(const Tensor& value, const Tensor& level_shapes,
                                                const Tensor& level_starts, const Tensor& locations,
                                                const Tensor& weights) {
  constexpr const char* op = "ms_deform_attn";
  MsDeformAttnProblem problem = check_value_and_levels(op, value, level_shapes, level_starts);
  const Dimension B{"B", problem.B}, G{"G", problem.G}, L{"L", problem.L};
  check_beside(op, "locations", locations, {B, "Q", G, L, "P", 2}, "value", value);
  problem.Q = locations.size(1), problem.P = locations.size(4), problem.K = problem.L * problem.P;
  check_beside(op, "weights", weights, {B, {"Q", problem.Q}, G, L, {"P", problem.P}}, "value", value);
  return problem;
}

inline MsDeformAttnProblem check_ms_deform_attn_fused(const Tensor& value, const Tensor& level_shapes,
                                                      const Tensor& level_starts, const Tensor& reference_points,
                                                      const Tensor& offsets, const Tensor& logits,
                                                      const std::vector<int64_t>& num_points) {
  constexpr const char* op = "ms_deform_attn_fused";
  MsDeformAttnProblem problem = check_value_and_levels(op, value, level_shapes, level_starts);
  VISDET_CHECK(op, static_cast<int64_t>(num_points.size()) == problem.L, "num_points must be a number for each of the ",
               problem.L, " levels, got ", num_points.size());
  for (const int64_t points : num_points) {
    VISDET_CHECK(op, points >= 0 && points <= INT32_MAX, "num_points must be 0 to 2^31 - 1, got ", points);
    problem.K += points;
    if (points > problem.P) problem.P = points;
  }
  const Dimension B{"B", problem.B}, G{"G", problem.G}, K{"K", problem.K};
  check_beside(op, "offsets", offsets, {B, "Q", G, K, 2}, "value", value, true);
  problem.Q = offsets.size(1);
  const Dimension Q{"Q", problem.Q};
  check_like(op, "logits", logits, {B, Q, G, K}, "offsets", offsets);
  check_beside(op, "reference_points", reference_points, {B, Q, {"L", problem.L}, "2 or 4"}, "value", value);
  VISDET_CHECK(op, reference_points.size(3) == 2 || reference_points.size(3) == 4,
               "reference_points must be [B, Q, L, 2 or 4], got ", shape_text(reference_points));
  return problem;
}

inline void check_ms_deform_attn_grad(const MsDeformAttnProblem& problem, const Tensor& grad_output,
                                      const Tensor& value) {
  check_like("ms_deform_attn_backward", "grad_output", grad_output,
             {{"B", problem.B}, {"Q", problem.Q}, {"G * C", problem.G * problem.C}}, "value", value);
}

// The levels of a table on the CPU must be non-empty, lie within the S rows of value if level_starts is on the CPU, too
// (else it is null), and take all of these rows together.
inline void check_levels(const MsDeformAttnProblem& problem, const int64_t* level_shapes, const int64_t* level_starts) {
  constexpr const char* op = "ms_deform_attn";
  int64_t total = 0;
  for (int64_t l = 0; l < problem.L; ++l) {
    const int64_t H = level_shapes[2 * l], W = level_shapes[2 * l + 1];
    VISDET_CHECK(op, H > 0 && W > 0 && H <= INT32_MAX / W, "level_shapes[", l,
                 "] must be a positive (height, width) of fewer than 2^31 texels, got (", H, ", ", W, ")");
    total += H * W;
    if (level_starts == nullptr) continue;
    const int64_t rows = H * W, start = level_starts[l];
    VISDET_CHECK(op, start >= 0 && start <= problem.S - rows, "level ", l, " (rows ", start, " to ",
                 start > INT64_MAX - rows ? INT64_MAX : start + rows, ") must lie within the S = ", problem.S,
                 " rows of value");
  }
  VISDET_CHECK(op, total == problem.S || problem.L == 0,
               "the sum of height * width over level_shapes must be S = ", problem.S, ", got ", total);
}

}  // namespace visdet
#endif

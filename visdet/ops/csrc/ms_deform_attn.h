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

#include <vector>

#include "common/checks.h"

namespace visdet {

struct MsDeformAttnProblem {
  int64_t B, S, G, C, Q, L;
  int64_t K;            // samples a row: L * P, or the sum of num_points
  int64_t P;            // samples a row and level, the most of any level
  bool levels_on_host;  // both level_shapes and level_starts
};

// What both forms check: value and the level table.
inline MsDeformAttnProblem check_value_and_levels(const char* op, const Tensor& value, const Tensor& level_shapes,
                                                  const Tensor& level_starts) {
  VISDET_CHECK(op, value.dim() == 4, "value must be [B, S, G, C], got ", shape_text(value));
  VISDET_CHECK(op, is_value_dtype(value.scalar_type()), "value must be float64, float32, float16 or bfloat16, got ",
               dtype_text(value));
  VISDET_CHECK(op, level_shapes.dim() == 2 && level_shapes.size(1) == 2,
               "level_shapes must be [L, 2] (height, width), got ", shape_text(level_shapes));
  MsDeformAttnProblem problem{};
  problem.B = value.size(0), problem.S = value.size(1), problem.G = value.size(2), problem.C = value.size(3);
  problem.L = level_shapes.size(0);
  VISDET_CHECK(op, level_starts.dim() == 1 && level_starts.size(0) == problem.L, "level_starts must be [L] = [",
               problem.L, "], got ", shape_text(level_starts));
  VISDET_CHECK(op, level_shapes.scalar_type() == ScalarType::Long, "level_shapes must be int64, got ",
               dtype_text(level_shapes));
  VISDET_CHECK(op, level_starts.scalar_type() == ScalarType::Long, "level_starts must be int64, got ",
               dtype_text(level_starts));
  VISDET_CHECK(op, level_shapes.is_cpu() || (!value.is_cpu() && on_device_of(value, level_shapes)),
               "level_shapes must be on the CPU or on the device of value");
  VISDET_CHECK(op, level_starts.is_cpu() || (!value.is_cpu() && on_device_of(value, level_starts)),
               "level_starts must be on the CPU or on the device of value");
  problem.levels_on_host = level_shapes.is_cpu() && level_starts.is_cpu();
  return problem;
}

inline MsDeformAttnProblem check_ms_deform_attn(const Tensor& value, const Tensor& level_shapes,
                                                const Tensor& level_starts, const Tensor& locations,
                                                const Tensor& weights) {
  constexpr const char* op = "ms_deform_attn";
  MsDeformAttnProblem problem = check_value_and_levels(op, value, level_shapes, level_starts);
  VISDET_CHECK(op,
               locations.dim() == 6 && locations.size(0) == problem.B && locations.size(2) == problem.G &&
                   locations.size(3) == problem.L && locations.size(5) == 2,
               "locations must be [B, Q, G, L, P, 2] = [", problem.B, ", Q, ", problem.G, ", ", problem.L,
               ", P, 2], got ", shape_text(locations));
  problem.Q = locations.size(1), problem.P = locations.size(4), problem.K = problem.L * problem.P;
  VISDET_CHECK(op,
               weights.dim() == 5 && weights.size(0) == problem.B && weights.size(1) == problem.Q &&
                   weights.size(2) == problem.G && weights.size(3) == problem.L && weights.size(4) == problem.P,
               "weights must be [B, Q, G, L, P] = [", problem.B, ", ", problem.Q, ", ", problem.G, ", ", problem.L,
               ", ", problem.P, "], got ", shape_text(weights));
  const ScalarType coordinates = accumulate_dtype(value.scalar_type());
  VISDET_CHECK(op, locations.scalar_type() == coordinates, "locations must be ",
               torch::headeronly::toString(coordinates), " for values of type ", dtype_text(value), ", got ",
               dtype_text(locations));
  VISDET_CHECK(op, weights.scalar_type() == coordinates, "weights must be ", torch::headeronly::toString(coordinates),
               " for values of type ", dtype_text(value), ", got ", dtype_text(weights));
  VISDET_CHECK(op, on_device_of(value, locations), "locations must be on the device of value");
  VISDET_CHECK(op, on_device_of(value, weights), "weights must be on the device of value");
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
  VISDET_CHECK(op,
               offsets.dim() == 5 && offsets.size(0) == problem.B && offsets.size(2) == problem.G &&
                   offsets.size(3) == problem.K && offsets.size(4) == 2,
               "offsets must be [B, Q, G, K, 2] = [", problem.B, ", Q, ", problem.G, ", ", problem.K, ", 2], got ",
               shape_text(offsets));
  problem.Q = offsets.size(1);
  VISDET_CHECK(op,
               logits.dim() == 4 && logits.size(0) == problem.B && logits.size(1) == problem.Q &&
                   logits.size(2) == problem.G && logits.size(3) == problem.K,
               "logits must be [B, Q, G, K] = [", problem.B, ", ", problem.Q, ", ", problem.G, ", ", problem.K,
               "], got ", shape_text(logits));
  VISDET_CHECK(op,
               reference_points.dim() == 4 && reference_points.size(0) == problem.B &&
                   reference_points.size(1) == problem.Q && reference_points.size(2) == problem.L &&
                   (reference_points.size(3) == 2 || reference_points.size(3) == 4),
               "reference_points must be [B, Q, L, 2 or 4] = [", problem.B, ", ", problem.Q, ", ", problem.L,
               ", 2 or 4], got ", shape_text(reference_points));
  const ScalarType coordinates = accumulate_dtype(value.scalar_type());
  VISDET_CHECK(op, reference_points.scalar_type() == coordinates, "reference_points must be ",
               torch::headeronly::toString(coordinates), " for values of type ", dtype_text(value), ", got ",
               dtype_text(reference_points));
  VISDET_CHECK(op, offsets.scalar_type() == coordinates || offsets.scalar_type() == value.scalar_type(),
               "offsets must be ", torch::headeronly::toString(coordinates), " or of value's type ", dtype_text(value),
               ", got ", dtype_text(offsets));
  VISDET_CHECK(op, logits.scalar_type() == offsets.scalar_type(), "logits must have the type of offsets ",
               dtype_text(offsets), ", got ", dtype_text(logits));
  VISDET_CHECK(op, on_device_of(value, reference_points), "reference_points must be on the device of value");
  VISDET_CHECK(op, on_device_of(value, offsets), "offsets must be on the device of value");
  VISDET_CHECK(op, on_device_of(value, logits), "logits must be on the device of value");
  return problem;
}

inline void check_ms_deform_attn_grad(const MsDeformAttnProblem& problem, const Tensor& grad_output,
                                      const Tensor& value) {
  constexpr const char* op = "ms_deform_attn_backward";
  VISDET_CHECK(op,
               grad_output.dim() == 3 && grad_output.size(0) == problem.B && grad_output.size(1) == problem.Q &&
                   grad_output.size(2) == problem.G * problem.C,
               "grad_output must be [B, Q, G * C] = [", problem.B, ", ", problem.Q, ", ", problem.G * problem.C,
               "], got ", shape_text(grad_output));
  VISDET_CHECK(op, grad_output.scalar_type() == value.scalar_type(), "grad_output must have value's type ",
               dtype_text(value), ", got ", dtype_text(grad_output));
  VISDET_CHECK(op, on_device_of(value, grad_output), "grad_output must be on the device of value");
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

// box_key_points: the contract.
//
// anchors [B, Q, D >= 8]: x, y, z, the logarithms of three sizes, sin and cos of the yaw, and numbers that are not
// read. fixed [F, 3]: offsets from the centre in sizes of the box; logits [B, Q, M * 3]: of M points more, whose
// offsets are sigmoid(logit) - 0.5. Types: float64 or float32, all the same.
//
//   size     = exp(min(log size, max_log_size))        NaN stays
//   p        = offset * size                           of F + M points
//   output   = (cos p.x - sin p.y, sin p.x + cos p.y, p.z) + centre        [B, Q, F + M, 3]
//
// Differentiable with respect to anchors and logits. A logarithm above max_log_size has a gradient of zero.
#pragma once

#include <cstdint>

#include "common/checks.h"

namespace visdet {

struct KeyPointsProblem {
  int64_t B, Q, D, F, M;
};

// The arguments of the kernels. N = B * Q.
template <typename A>
struct KeyPointsArrays {
  int64_t N, D, F, M;
  A max_log_size;
  const A *anchors, *fixed, *logits;  // [N, D], [F, 3], [N, M * 3]
  A* output;                          // [N, F + M, 3], forward
  const A* grad_output;               // [N, F + M, 3], backward
  A *grad_anchors, *grad_logits;
};

inline KeyPointsProblem check_box_key_points(const Tensor& anchors, const Tensor& fixed, const Tensor& logits) {
  constexpr const char* op = "box_key_points";
  VISDET_CHECK(op, anchors.dim() == 3 && anchors.size(2) >= 8, "anchors must be [B, Q, D] with D of at least 8, got ",
               shape_text(anchors));
  check_sum_type(op, "anchors", anchors);
  check_like(op, "fixed", fixed, {"F", 3}, "anchors", anchors);
  check_like(op, "logits", logits, {anchors.size(0), anchors.size(1), "M * 3"}, "anchors", anchors);
  VISDET_CHECK(op, logits.size(2) % 3 == 0, "logits must be [", anchors.size(0), ", ", anchors.size(1),
               ", M * 3], got ", shape_text(logits));
  return {anchors.size(0), anchors.size(1), anchors.size(2), fixed.size(0), logits.size(2) / 3};
}

// The inputs are dense. The caller adds the results and their gradients.
template <typename A>
KeyPointsArrays<A> key_points_arrays(const KeyPointsProblem& problem, const Tensor& anchors, const Tensor& fixed,
                                     const Tensor& logits, double max_log_size) {
  KeyPointsArrays<A> a{problem.B * problem.Q, problem.D, problem.F, problem.M, static_cast<A>(max_log_size)};
  a.anchors = data_of(anchors), a.fixed = data_of(fixed), a.logits = data_of(logits);
  return a;
}

}  // namespace visdet

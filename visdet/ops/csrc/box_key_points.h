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

#include "common/checks.h"

namespace visdet {

struct KeyPointsProblem {
  int64_t B, Q, D, F, M;
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

inline void check_key_points_gradient(const KeyPointsProblem& problem, const Tensor& grad_output,
                                      const Tensor& anchors) {
  const auto [B, Q, D, F, M] = problem;
  check_like("box_key_points_backward", "grad_output", grad_output, {B, Q, F + M, 3}, "anchors", anchors);
}

}  // namespace visdet

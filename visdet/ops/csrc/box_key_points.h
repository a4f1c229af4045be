// box_key_points: the contract.
//
// anchors [B, Q, D >= 8]: x, y, z, the logarithms of three sizes, sin and cos of the yaw, and numbers that are not
// read. fixed [F, 3]: places in sizes from the centre; logits [B, Q, M * 3]: those of M points more, sigmoid(logit) -
// 0.5. Types: float64 or float32, all the same.
//
//   size     = exp(min(log size, max_log_size))        NaN stays
//   p        = place * size                            of F + M points
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
  const ScalarType type = anchors.scalar_type();
  VISDET_CHECK(op, anchors.dim() == 3 && anchors.size(2) >= 8, "anchors must be [B, Q, D] with D of at least 8, got ",
               shape_text(anchors));
  VISDET_CHECK(op, type == ScalarType::Float || type == ScalarType::Double, "anchors must be float64 or float32, got ",
               dtype_text(anchors));
  VISDET_CHECK(op, fixed.dim() == 2 && fixed.size(1) == 3, "fixed must be [F, 3], got ", shape_text(fixed));
  VISDET_CHECK(op,
               logits.dim() == 3 && logits.size(0) == anchors.size(0) && logits.size(1) == anchors.size(1) &&
                   logits.size(2) % 3 == 0,
               "logits must be [", anchors.size(0), ", ", anchors.size(1), ", M * 3], got ", shape_text(logits));
  for (const auto& [name, tensor] : {std::pair<const char*, const Tensor&>{"fixed", fixed}, {"logits", logits}}) {
    VISDET_CHECK(op, tensor.scalar_type() == type, name, " must have anchors' type ", dtype_text(anchors), ", got ",
                 dtype_text(tensor));
    VISDET_CHECK(op, on_device_of(anchors, tensor), name, " must be on the device of anchors");
  }
  return {anchors.size(0), anchors.size(1), anchors.size(2), fixed.size(0), logits.size(2) / 3};
}

inline void check_key_points_gradient(const KeyPointsProblem& problem, const Tensor& grad_output,
                                      const Tensor& anchors) {
  const auto [B, Q, D, F, M] = problem;
  VISDET_CHECK("box_key_points_backward",
               grad_output.dim() == 4 && grad_output.size(0) == B && grad_output.size(1) == Q &&
                   grad_output.size(2) == F + M && grad_output.size(3) == 3 &&
                   grad_output.scalar_type() == anchors.scalar_type() && on_device_of(anchors, grad_output),
               "grad_output must be [", B, ", ", Q, ", ", F + M, ", 3] of anchors' type and device, got ",
               shape_text(grad_output), " of ", dtype_text(grad_output));
}

}  // namespace visdet

// sigmoid_focal_loss: the contract.
//
// input [N, C], target [N] int64, weight [C] or empty (float64 for float64 input, float32 otherwise). With a = -x and
// balance alpha where c is the row's target, a = x and balance 1 - alpha elsewhere, p = sigmoid(a) and
// s = log(1 + exp(a)):
//
//   loss[n, c] = weight[target[n]] * balance * p^gamma * s
//   d loss / d a = weight[target[n]] * balance * p^gamma * (gamma * (1 - p) * s + p)
//
// A target outside 0..C-1 is background: no column is its own, its weight is 1. Computed in float32, float64 for
// float64; results have the type of input. s = max(a, 0) + log1p(exp(-|a|)) loses no digits.
#pragma once

#include "common/checks.h"

namespace visdet {

struct FocalProblem {
  int64_t N, C;
};

inline void check_beside(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  VISDET_CHECK(op, on_device_of(input, tensor), name, " must be on the device of input");
}

inline FocalProblem check_sigmoid_focal_loss(const char* op, const Tensor& input, const Tensor& target,
                                             const Tensor& weight) {
  VISDET_CHECK(op, input.dim() == 2, "input must be [N, C], got ", shape_text(input));
  VISDET_CHECK(op, is_value_dtype(input.scalar_type()), "input must be float64, float32, float16 or bfloat16, got ",
               dtype_text(input));
  VISDET_CHECK(op, target.dim() == 1 && target.size(0) == input.size(0), "target must be [", input.size(0), "], got ",
               shape_text(target));
  VISDET_CHECK(op, target.scalar_type() == ScalarType::Long, "target must be int64, got ", dtype_text(target));
  VISDET_CHECK(op, weight.dim() == 1 && (weight.size(0) == input.size(1) || weight.size(0) == 0), "weight must be [",
               input.size(1), "] or empty, got ", shape_text(weight));
  const ScalarType type = accumulate_dtype(input.scalar_type());
  VISDET_CHECK(op, weight.scalar_type() == type, "weight must be ", torch::headeronly::toString(type), ", got ",
               dtype_text(weight));
  check_beside(op, "target", target, input);
  check_beside(op, "weight", weight, input);
  return {input.size(0), input.size(1)};
}

// grad_output as a kernel reads it: the gradient of a sum is one number seen as [N, C], which is not written out.
inline bool is_one_number(const Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != 0) return false;
  }
  return true;
}

inline void check_focal_gradient(const char* op, const Tensor& grad_output, const Tensor& input) {
  VISDET_CHECK(op,
               grad_output.dim() == 2 && grad_output.size(0) == input.size(0) && grad_output.size(1) == input.size(1),
               "grad_output must be ", shape_text(input), ", got ", shape_text(grad_output));
  VISDET_CHECK(op, grad_output.scalar_type() == input.scalar_type(), "grad_output must have input's type ",
               dtype_text(input), ", got ", dtype_text(grad_output));
  check_beside(op, "grad_output", grad_output, input);
}

}  // namespace visdet

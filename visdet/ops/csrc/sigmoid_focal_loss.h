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

#include <cstdint>

namespace visdet {

struct FocalProblem {
  int64_t N, C;
};

template <typename T, typename A>
struct FocalArrays : FocalProblem {
  const T* input;         // [N, C]
  const int64_t* target;  // [N]
  const A* weight;        // [C], or null
  A gamma, alpha;
  const T* grad_output;  // [N, C], or null: forward
  int64_t grad_step;     // 1, or 0: one number for all
  T* output;             // [N, C]: losses, or their gradients
};

// The kernels write rows [begin, end) of the losses, or of their gradients.
template <typename T, typename A>
struct FocalKernels {
  void (*losses)(const FocalArrays<T, A>& a, int64_t begin, int64_t end);
  void (*gradients)(const FocalArrays<T, A>& a, int64_t begin, int64_t end);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include "common/each.h"

namespace visdet {

inline FocalProblem check_sigmoid_focal_loss(const char* op, const Tensor& input, const Tensor& target,
                                             const Tensor& weight) {
  check_values(op, "input", input, {"N", "C"});
  check_typed(op, "target", target, {input.size(0)}, ScalarType::Long, "input", input);
  VISDET_CHECK(op, weight.dim() == 1 && (weight.size(0) == input.size(1) || weight.size(0) == 0), "weight must be [",
               input.size(1), "] or empty, got ", shape_text(weight));
  check_accumulate_type(op, "weight", weight, "input", input.scalar_type());
  check_device(op, "weight", weight, "input", input);
  return {input.size(0), input.size(1)};
}

// grad_output as a kernel reads it: the gradient of a sum is one number seen as [N, C], which is not written out.
inline bool is_one_number(const Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != 0) return false;
  }
  return true;
}

// Computes the losses, or their gradients.
template <bool GRAD, typename T, typename A>
void compute_focal(const OnDevice& device, const FocalArrays<T, A>& a);

template <bool GRAD>
Tensor run_focal(const char* op, const Tensor* grad_output_in, const Tensor& input_in, const Tensor& target_in,
                 const Tensor& weight_in, double gamma, double alpha) {
  const auto problem = check_sigmoid_focal_loss(op, input_in, target_in, weight_in);
  if (GRAD) check_like(op, "grad_output", *grad_output_in, {problem.N, problem.C}, "input", input_in);
  const OnDevice device(op, input_in);
  const Tensor input = dense(input_in), target = dense(target_in), weight = dense(weight_in);
  Tensor output = new_empty(input, {problem.N, problem.C});
  if (output.numel() == 0) return output;
  const bool one_number = GRAD && is_one_number(*grad_output_in);
  const Tensor grad_output = GRAD && !one_number ? dense(*grad_output_in) : GRAD ? *grad_output_in : input;
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    FocalArrays<T, A> a{problem};
    a.input = data_of(input);
    a.target = data_of(target);
    a.weight = data_of(weight.numel() ? &weight : nullptr);
    a.gamma = static_cast<A>(gamma), a.alpha = static_cast<A>(alpha);
    if (GRAD) a.grad_output = data_of(grad_output);
    a.grad_step = one_number ? 0 : 1;
    a.output = data_of(output);
    compute_focal<GRAD>(device, a);
  });
  return output;
}

inline Tensor focal_loss(const Tensor& input, const Tensor& target, const Tensor& weight, double gamma, double alpha) {
  return run_focal<false>("sigmoid_focal_loss", nullptr, input, target, weight, gamma, alpha);
}

inline Tensor focal_loss_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                                  const Tensor& weight, double gamma, double alpha) {
  return run_focal<true>("sigmoid_focal_loss_backward", &grad_output, input, target, weight, gamma, alpha);
}

VISDET_OPERATORS(sigmoid_focal_loss, m) {
  m.impl("sigmoid_focal_loss", TORCH_BOX(&focal_loss));
  m.impl("sigmoid_focal_loss_backward", TORCH_BOX(&focal_loss_backward));
}

}  // namespace visdet
#endif

// sigmoid_focal_loss: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "sigmoid_focal_loss.h"

#include "cpu/dispatch.h"

namespace visdet {
namespace {

constexpr int64_t kGrain = 1 << 13;  // elements of one piece of work

template <bool GRAD>
Tensor run_focal(const FocalProblem& problem, const Tensor* grad_output_in, const Tensor& input_in,
                 const Tensor& target_in, const Tensor& weight_in, double gamma, double alpha) {
  const Tensor input = dense(input_in), target = dense(target_in), weight = dense(weight_in);
  Tensor output = new_empty(input, {problem.N, problem.C});
  if (output.numel() == 0) return output;
  const bool one_number = GRAD && is_one_number(*grad_output_in);
  const Tensor grad_output = GRAD && !one_number ? dense(*grad_output_in) : GRAD ? *grad_output_in : input;
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    FocalArrays<T, A> a{problem};
    a.input = data_of<T>(input);
    a.target = data_of<int64_t>(target);
    a.weight = weight.numel() ? data_of<A>(weight) : nullptr;
    a.gamma = static_cast<A>(gamma), a.alpha = static_cast<A>(alpha);
    if (GRAD) a.grad_output = data_of<T>(grad_output);
    a.grad_step = one_number ? 0 : 1;
    a.output = mutable_data_of<T>(output);
    const auto run = GRAD ? best_kernels<FocalKernels<T, A>>().gradients : best_kernels<FocalKernels<T, A>>().losses;
    const int64_t grain = std::max<int64_t>(1, kGrain / a.C);
    torch::stable::parallel_for(0, a.N, grain, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  });
  return output;
}

Tensor sigmoid_focal_loss(const Tensor& input, const Tensor& target, const Tensor& weight, double gamma, double alpha) {
  const auto problem = check_sigmoid_focal_loss("sigmoid_focal_loss", input, target, weight);
  return run_focal<false>(problem, nullptr, input, target, weight, gamma, alpha);
}

Tensor sigmoid_focal_loss_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                                   const Tensor& weight, double gamma, double alpha) {
  constexpr const char* op = "sigmoid_focal_loss_backward";
  const auto problem = check_sigmoid_focal_loss(op, input, target, weight);
  check_like(op, "grad_output", grad_output, {problem.N, problem.C}, "input", input);
  return run_focal<true>(problem, &grad_output, input, target, weight, gamma, alpha);
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("sigmoid_focal_loss(Tensor input, Tensor target, Tensor weight, float gamma, float alpha) -> Tensor");
  m.def(
      "sigmoid_focal_loss_backward(Tensor grad_output, Tensor input, Tensor target, Tensor weight, float gamma,"
      " float alpha) -> Tensor grad_input");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("sigmoid_focal_loss", TORCH_BOX(&visdet::sigmoid_focal_loss));
  m.impl("sigmoid_focal_loss_backward", TORCH_BOX(&visdet::sigmoid_focal_loss_backward));
}

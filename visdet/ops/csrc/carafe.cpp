// carafe: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.

#include "carafe.h"

#include "cpu/dispatch.h"

namespace visdet {
namespace {

template <typename T, typename A>
CarafeArrays<T, A> arrays_of(const CarafeProblem& p, const Tensor& features, const Tensor& masks) {
  CarafeArrays<T, A> a{p};
  a.features = data_of<T>(features);
  a.masks = data_of<T>(masks);
  return a;
}

// Calls run(b, g, h, scratch) for every row of every group; each thread has a scratch of `numbers`.
template <typename A, typename Arrays, typename F>
void for_rows(const Arrays& a, int64_t numbers, const F& run) {
  torch::stable::parallel_for(0, a.B * a.G * a.H, 1, [&](int64_t begin, int64_t end) {
    const Scratch<A> scratch(numbers);
    for (int64_t task = begin; task < end; ++task) {
      run(task / (a.G * a.H), task / a.H % a.G, task % a.H, scratch.data());
    }
  });
}

// Returns the memory of the masks by phase, which it fills.
template <typename T, typename A>
Scratch<A> prepare(CarafeArrays<T, A>& a) {
  Scratch<A> phases(a.B * a.G * a.H * a.s * a.s * a.K * a.K * a.W);
  a.phases = phases.data();
  const auto arrange = best_kernels<CarafeKernels<T, A>>().masks_to_phases;
  for_rows<A>(a, 0, [&](int64_t b, int64_t g, int64_t h, A*) { arrange(a, b, g, h); });
  return phases;
}

Tensor carafe(const Tensor& features_in, const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  const auto problem = check_carafe("carafe", features_in, masks_in, K, G, s);
  const Tensor features = dense(features_in), masks = dense(masks_in);
  Tensor output = new_empty(features, {problem.B, problem.C, problem.H * s, problem.W * s});
  if (output.numel() == 0) return output;
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, features, masks);
    a.output = mutable_data_of<T>(output);
    const auto phases = prepare(a);
    const auto run = best_kernels<CarafeKernels<T, A>>().upsample_row;
    for_rows<A>(a, K * (a.W + K - 1) + a.W,
                [&](int64_t b, int64_t g, int64_t h, A* scratch) { run(a, scratch, b, g, h); });
  });
  return output;
}

std::tuple<Tensor, Tensor> carafe_backward(const Tensor& grad_output_in, const Tensor& features_in,
                                           const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe_backward";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  check_carafe_shape(op, "grad_output", grad_output_in, features_in, problem.C, s);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in), masks = dense(masks_in);
  Tensor grad_features = new_like(features), grad_masks = new_like(masks);
  if (grad_output.numel() == 0) return {zero_(grad_features), zero_(grad_masks)};
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    auto a = arrays_of<T, A>(problem, features, masks);
    a.grad_output = data_of<T>(grad_output);
    a.grad_features = mutable_data_of<T>(grad_features);
    a.grad_masks = mutable_data_of<T>(grad_masks);
    const auto phases = prepare(a);
    const auto& kernels = best_kernels<CarafeKernels<T, A>>();
    torch::stable::parallel_for(0, a.B * a.C, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> scratch((a.H + K - 1) * (a.W + K - 1) + a.W);
      for (int64_t map = begin; map < end; ++map) kernels.grad_features_map(a, scratch.data(), map / a.C, map % a.C);
    });
    for_rows<A>(a, K * (a.W + K - 1) + a.W, [&](int64_t b, int64_t g, int64_t h, A* scratch) {
      kernels.grad_masks_row(a, a.phases + ((b * a.G + g) * a.H + h) * s * s * K * K * a.W, scratch, b, g, h);
      kernels.phases_to_masks(a, b, g, h);
    });
  });
  return {grad_features, grad_masks};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("carafe(Tensor features, Tensor masks, int kernel_size, int group_size, int scale_factor) -> Tensor");
  m.def(
      "carafe_backward(Tensor grad_output, Tensor features, Tensor masks, int kernel_size, int group_size,"
      " int scale_factor) -> (Tensor grad_features, Tensor grad_masks)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("carafe", TORCH_BOX(&visdet::carafe));
  m.impl("carafe_backward", TORCH_BOX(&visdet::carafe_backward));
}

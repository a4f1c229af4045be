// box_key_points: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "box_key_points.h"

#include "cpu/dispatch.h"

namespace visdet {
namespace {

constexpr int64_t kGrain = 1 << 12;  // points of one piece of work

template <typename A, typename Kernel>
void run(const KeyPointsArrays<A>& a, const Kernel& kernel) {
  const int64_t points = a.F + a.M, grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, points));
  torch::stable::parallel_for(0, a.N, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(points * 3 + kAnyLanes);
    kernel(a, begin, end, scratch.data());
  });
}

Tensor box_key_points(const Tensor& anchors_in, const Tensor& fixed_in, const Tensor& logits_in, double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  const Tensor anchors = dense(anchors_in), fixed = dense(fixed_in), logits = dense(logits_in);
  Tensor output = new_empty(anchors, {problem.B, problem.Q, problem.F + problem.M, 3});
  if (output.numel() == 0) return output;
  dispatch_sum_type(anchors.scalar_type(), [&]<typename A>(A) {
    auto a = key_points_arrays<A>(problem, anchors, fixed, logits, max_log_size);
    a.output = mutable_data_of<A>(output);
    run(a, best_kernels<KeyPointsKernels<A>>().forward);
  });
  return output;
}

std::tuple<Tensor, Tensor> box_key_points_backward(const Tensor& grad_output_in, const Tensor& anchors_in,
                                                   const Tensor& fixed_in, const Tensor& logits_in,
                                                   double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  const auto [B, Q, D, F, M] = problem;
  check_like("box_key_points_backward", "grad_output", grad_output_in, {B, Q, F + M, 3}, "anchors", anchors_in);
  const Tensor grad_output = dense(grad_output_in), anchors = dense(anchors_in), fixed = dense(fixed_in),
               logits = dense(logits_in);
  Tensor grad_anchors = new_like(anchors), grad_logits = new_like(logits);
  if (grad_anchors.numel() == 0) return {grad_anchors, grad_logits};
  dispatch_sum_type(anchors.scalar_type(), [&]<typename A>(A) {
    auto a = key_points_arrays<A>(problem, anchors, fixed, logits, max_log_size);
    a.grad_output = data_of<A>(grad_output);
    a.grad_anchors = mutable_data_of<A>(grad_anchors);
    a.grad_logits = mutable_data_of<A>(grad_logits);
    run(a, best_kernels<KeyPointsKernels<A>>().backward);
  });
  return {grad_anchors, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("box_key_points(Tensor anchors, Tensor fixed, Tensor logits, float max_log_size) -> Tensor");
  m.def(
      "box_key_points_backward(Tensor grad_output, Tensor anchors, Tensor fixed, Tensor logits, float max_log_size)"
      " -> (Tensor grad_anchors, Tensor grad_logits)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("box_key_points", TORCH_BOX(&visdet::box_key_points));
  m.impl("box_key_points_backward", TORCH_BOX(&visdet::box_key_points_backward));
}

// box_key_points on CUDA. The contract is in ../box_key_points.h.
#include <tuple>

#include "box_key_points.h"
#include "common/launch.h"
#include "common/values.cuh"
#include "common/warp.cuh"

namespace visdet::box_key_points {
namespace {

constexpr const char* kOp = "box_key_points";
constexpr int kThreads = 128;

// An anchor's centre, sizes and heading.
template <typename A>
struct Box {
  A centre[3], size[3], sin, cos;

  __device__ __forceinline__ Box(const KeyPointsArrays<A>& a, int64_t anchor) {
    const A* from = a.anchors + anchor * a.D;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      centre[i] = from[i];
      const A log_size = from[3 + i];
      size[i] = exp(log_size > a.max_log_size ? a.max_log_size : log_size);  // NaN stays
    }
    sin = from[6], cos = from[7];
  }
};

// How far an anchor's p-th point lies from its centre along an axis of the box, in sizes of the box.
template <typename A>
__device__ __forceinline__ A offset_of(const KeyPointsArrays<A>& a, int64_t anchor, int64_t p, int axis) {
  if (p < a.F) return a.fixed[p * 3 + axis];
  return 1 / (1 + exp(-a.logits[(anchor * a.M + p - a.F) * 3 + axis])) - A(0.5);
}

// A thread owns a point. The few numbers of its anchor come from the first-level cache.
template <typename A>
__global__ void __launch_bounds__(kThreads) forward_kernel(const KeyPointsArrays<A> a) {
  const int64_t points = a.F + a.M, i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.N * points) return;
  const int64_t anchor = i / points, p = i - anchor * points;
  const Box<A> box(a, anchor);
  A at[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) at[axis] = offset_of(a, anchor, p, axis) * box.size[axis];
  a.output[i * 3] = box.cos * at[0] - box.sin * at[1] + box.centre[0];
  a.output[i * 3 + 1] = box.sin * at[0] + box.cos * at[1] + box.centre[1];
  a.output[i * 3 + 2] = at[2] + box.centre[2];
}

// A warp owns an anchor, and a lane adds every 32nd of its points. The sums of the lanes are then added in an order
// that is always the same.
template <typename A>
__global__ void __launch_bounds__(kThreads) backward_kernel(const KeyPointsArrays<A> a) {
  const int lane = threadIdx.x % 32;
  const int64_t points = a.F + a.M, anchor = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (anchor >= a.N) return;
  const Box<A> box(a, anchor);
  A sum[8] = {};  // of centre, logarithms of sizes, sin, cos
  for (int64_t p = lane; p < points; p += 32) {
    const A* grad = a.grad_output + (anchor * points + p) * 3;
    const A rotated[3] = {box.cos * grad[0] + box.sin * grad[1], box.cos * grad[1] - box.sin * grad[0], grad[2]};
    A at[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const A offset = offset_of(a, anchor, p, axis);
      at[axis] = offset * box.size[axis];
      sum[axis] += grad[axis];
      sum[3 + axis] += rotated[axis] * at[axis];
      if (p >= a.F) {
        const A slope = (A(0.5) + offset) * (A(0.5) - offset);
        a.grad_logits[(anchor * a.M + p - a.F) * 3 + axis] = rotated[axis] * box.size[axis] * slope;
      }
    }
    sum[6] += grad[1] * at[0] - grad[0] * at[1];
    sum[7] += grad[0] * at[0] + grad[1] * at[1];
  }
  sum_lanes(sum);
  for (int64_t d = lane; d < a.D; d += 32) {
    A grad = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) grad = d == i ? sum[i] : grad;
    if (d >= 3 && d < 6 && a.anchors[anchor * a.D + d] > a.max_log_size) grad = 0;
    a.grad_anchors[anchor * a.D + d] = grad;
  }
}

Tensor forward(const Tensor& anchors_in, const Tensor& fixed_in, const Tensor& logits_in, double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  const DeviceScope scope(anchors_in);
  const Tensor anchors = dense(anchors_in), fixed = dense(fixed_in), logits = dense(logits_in);
  Tensor output = new_empty(anchors, {problem.B, problem.Q, problem.F + problem.M, 3});
  if (output.numel() == 0) return output;
  dispatch_sum_type(anchors.scalar_type(), [&]<typename A>(A) {
    auto a = key_points_arrays<A>(problem, anchors, fixed, logits, max_log_size);
    a.output = data_of(output);
    launch({kOp, "forward_kernel", scope, ceil_div(output.numel() / 3, kThreads), kThreads}, forward_kernel<A>, a);
  });
  return output;
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& anchors_in, const Tensor& fixed_in,
                                    const Tensor& logits_in, double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  const auto [B, Q, D, F, M] = problem;
  check_like("box_key_points_backward", "grad_output", grad_output_in, {B, Q, F + M, 3}, "anchors", anchors_in);
  const DeviceScope scope(anchors_in);
  const Tensor grad_output = dense(grad_output_in), anchors = dense(anchors_in), fixed = dense(fixed_in),
               logits = dense(logits_in);
  Tensor grad_anchors = new_like(anchors), grad_logits = new_like(logits);
  if (grad_anchors.numel() == 0) return {grad_anchors, grad_logits};
  dispatch_sum_type(anchors.scalar_type(), [&]<typename A>(A) {
    auto a = key_points_arrays<A>(problem, anchors, fixed, logits, max_log_size);
    a.grad_output = data_of(grad_output);
    a.grad_anchors = data_of(grad_anchors), a.grad_logits = data_of(grad_logits);
    launch({"box_key_points_backward", "backward_kernel", scope, ceil_div(a.N, kThreads / 32), kThreads},
           backward_kernel<A>, a);
  });
  return {grad_anchors, grad_logits};
}

}  // namespace
}  // namespace visdet::box_key_points

VISDET_CUDA_OPERATORS(box_key_points, m) {
  m.impl("box_key_points", TORCH_BOX(&visdet::box_key_points::forward));
  m.impl("box_key_points_backward", TORCH_BOX(&visdet::box_key_points::backward));
}

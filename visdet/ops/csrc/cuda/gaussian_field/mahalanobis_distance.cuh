// mahalanobis_distance on CUDA. The contract is in gaussian_field.h.
#pragma once

#include <algorithm>
#include <tuple>

#include "common/launch.h"
#include "common/warp.cuh"
#include "cuda/gaussian_field/gaussians.cuh"
#include "cuda/gaussian_field/pairs.cuh"
#include "gaussian_field.h"

namespace visdet::gaussian_field {
namespace {

// A thread owns a Gaussian, and a block one of `parts` parts of the points. Neighbouring threads write neighbouring
// numbers of a row of the output.
template <typename A>
__global__ void __launch_bounds__(kThreads) distance_kernel(const Inputs<A> in, A* __restrict__ output, int parts) {
  const int column = blockIdx.x / parts, part = blockIdx.x % parts;
  const int64_t n = static_cast<int64_t>(column) * kThreads + threadIdx.x;
  if (n >= in.N) return;
  const Gaussian<A> g = read_gaussian(in, n, A(1));
  const int64_t begin = part * in.part, end = min(begin + in.part, in.B);
#pragma unroll 4
  for (int64_t b = begin; b < end; ++b) {
    A v[3];
    output[b * in.N + n] = whiten<true>(g, in.points[3 * b], in.points[3 * b + 1], in.points[3 * b + 2], v);
  }
}

// A warp owns a point, and each of its lanes adds every 32nd Gaussian.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    distance_point_kernel(const Inputs<A> in, const A* __restrict__ grad_output, A* __restrict__ grad_points) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (b >= in.B) return;
  const int lane = threadIdx.x % 32;
  const A x = in.points[3 * b], y = in.points[3 * b + 1], z = in.points[3 * b + 2];
  A sums[3] = {};
  for (int64_t n = lane; n < in.N; n += 32) {
    const Gaussian<A> g = read_gaussian(in, n, A(1));
    A v[3], u[3];
    whiten<true>(g, x, y, z, v);
    whiten_back(g, v, u);
    const A s = grad_output[b * in.N + n];
#pragma unroll
    for (int d = 0; d < 3; ++d) sums[d] += s * u[d];
  }
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const A sum = sum_lanes(sums[d]);
    if (lane == 0) grad_points[3 * b + d] = 2 * sum;
  }
}

Tensor mahalanobis_distance(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in);
  Tensor output = new_empty(points, {problem.B, problem.N});
  if (output.numel() == 0) return output;
  const int64_t columns = ceil_div(problem.N, kThreads);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    auto in = inputs_of<A>(problem, points, means, cholesky);
    in.part = std::clamp<int64_t>(ceil_div(problem.B * columns, 4 * wanted_blocks(scope)), 1, 64);
    const int64_t parts = ceil_div(problem.B, in.part);
    launch({op, "distance_kernel", scope, parts * columns, kThreads}, distance_kernel<A>, in,
           mutable_data_of<A>(output), static_cast<int>(parts));
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> mahalanobis_distance_backward(const Tensor& grad_output_in, const Tensor& points_in,
                                                                 const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance_backward";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_like(op, "grad_output", grad_output_in, {{"B", problem.B}, {"N", problem.N}}, "points", points_in);
  const DeviceScope scope(points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in);
  Tensor grad_points = new_like(points), grad_means = new_like(means), grad_cholesky = new_like(cholesky);
  if (grad_output.numel() == 0) {
    zero_(grad_points), zero_(grad_means), zero_(grad_cholesky);
    return {grad_points, grad_means, grad_cholesky};
  }
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const auto in = inputs_of<A>(problem, points, means, cholesky);
    const A* grad = data_of<A>(grad_output);
    launch({op, "distance_point_kernel", scope, ceil_div(problem.B, kThreads / 32), kThreads}, distance_point_kernel<A>,
           in, grad, mutable_data_of<A>(grad_points));
    launch_pairs<A, Task::kDistanceGradients, false>(
        op, scope, in, points, {grad, nullptr, mutable_data_of<A>(grad_means), mutable_data_of<A>(grad_cholesky)});
  });
  return {grad_points, grad_means, grad_cholesky};
}

}  // namespace
}  // namespace visdet::gaussian_field

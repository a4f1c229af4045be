// mahalanobis_distance on CUDA. The contract is in gaussian_field.h.
#pragma once

#include <algorithm>

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

}  // namespace

void compute_distances(const OnDevice& device, const GaussianTensors& tensors, Tensor& output) {
  if (output.numel() == 0) return;
  const int64_t columns = ceil_div(tensors.problem.N, kThreads);
  dispatch_sum_type(output.scalar_type(), [&]<typename A>(A) {
    auto in = inputs_of<A>(tensors);
    in.part = std::clamp<int64_t>(ceil_div(in.B * columns, 4 * wanted_blocks(device.scope)), 1, 64);
    const int64_t parts = ceil_div(in.B, in.part);
    launch({device.op, "distance_kernel", device.scope, parts * columns, kThreads}, distance_kernel<A>, in,
           data_of(output), static_cast<int>(parts));
  });
}

void compute_distance_gradients(const OnDevice& device, const GaussianTensors& tensors, GaussianGradients& gradients) {
  if (gradients.grad_output.numel() == 0) return;
  dispatch_sum_type(tensors.points.scalar_type(), [&]<typename A>(A) {
    const auto in = inputs_of<A>(tensors);
    const A* grad = data_of(gradients.grad_output);
    launch({device.op, "distance_point_kernel", device.scope, ceil_div(in.B, kThreads / 32), kThreads},
           distance_point_kernel<A>, in, grad, data_of(gradients.points));
    launch_pairs<A, Task::kDistanceGradients, false>(
        device.op, device.scope, in, tensors.points,
        {grad, nullptr, data_of(gradients.means), data_of(gradients.cholesky)});
  });
}

}  // namespace visdet::gaussian_field

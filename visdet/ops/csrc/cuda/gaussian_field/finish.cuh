// Sums over the parts that blocks have written, in order, and gradients of Gaussians from their ten sums.
#pragma once

#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

// A block takes 32 Gaussians: its warps share their ten sums and add the parts in order, the first one turns the sums
// into gradients. One thread a Gaussian would wait for ten times as many loads: 16 us instead of 3 at N = 1000.
template <typename A, bool FIELD>
__device__ __forceinline__ void finish_gaussians(const Inputs<A>& in, int64_t first, const A* __restrict__ partial,
                                                 int parts, A* __restrict__ grad_means, A* __restrict__ grad_cholesky,
                                                 A* __restrict__ grad_weights) {
  constexpr A kScale = FIELD ? Exponent<A>::kScale : A(1);
  __shared__ A added[10][32];
  const int lane = threadIdx.x % 32;
  const int64_t n = first + lane;
  if (n < in.N) {
    for (int k = threadIdx.x / 32; k < 10; k += kThreads / 32) {
      const A* from = partial + k * in.N + n;
      A sum = 0;
#pragma unroll 16
      for (int p = 0; p < parts; ++p) sum += from[p * 10 * in.N];
      added[k][lane] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32 || n >= in.N) return;
  A sums[10];
#pragma unroll
  for (int k = 0; k < 10; ++k) sums[k] = added[k][lane];
  const Gaussian<A> g = read_gaussian(in, n, kScale);
  // v carries the scale once, u twice.
  const A factor = FIELD ? g.weight / (kScale * kScale) : A(-2);
  const A v[3] = {sums[1], sums[2], sums[3]};
  A u[3];
  whiten_back(g, v, u);
#pragma unroll
  for (int d = 0; d < 3; ++d) grad_means[3 * n + d] = factor * u[d];
  const A* s = sums + 4;
  const A columns[3][3] = {{s[0], s[1], s[3]}, {s[1], s[2], s[4]}, {s[3], s[4], s[5]}};
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    whiten_back(g, columns[j], u);
#pragma unroll
    for (int d = 0; d < 3; ++d) grad_cholesky[9 * n + 3 * d + j] = j <= d ? factor / kScale * u[d] : A(0);
  }
  if (FIELD) grad_weights[n] = sums[0];
}

// to[i] = the sum over the parts; times -grad_output[i / 3] for gradients of points.
template <typename A, bool GRAD>
__device__ __forceinline__ void finish_point(const A* __restrict__ partial, const A* __restrict__ grad_output,
                                             A* __restrict__ to, int64_t i, int64_t count, int parts) {
  if (i >= count) return;
  A sum = 0;
#pragma unroll 16
  for (int p = 0; p < parts; ++p) sum += partial[p * count + i];
  to[i] = GRAD ? sum * grad_output[i / 3] : sum;
}

// Points first, where they came in parts, then Gaussians.
template <typename A, bool GRAD, bool FIELD>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Inputs<A> in, const A* __restrict__ grad_output, const A* __restrict__ of_points,
                  int point_parts, A* __restrict__ to_points, int64_t point_count, int point_blocks,
                  const A* __restrict__ of_gaussians, int gaussian_parts, A* __restrict__ grad_means,
                  A* __restrict__ grad_cholesky, A* __restrict__ grad_weights) {
  if (blockIdx.x < point_blocks) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    finish_point<A, GRAD>(of_points, grad_output, to_points, i, point_count, point_parts);
  } else if constexpr (GRAD || !FIELD) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - point_blocks) * 32;
    finish_gaussians<A, FIELD>(in, first, of_gaussians, gaussian_parts, grad_means, grad_cholesky, grad_weights);
  }
}

}  // namespace
}  // namespace visdet::gaussian_field

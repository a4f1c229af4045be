// The second kernel of a pass over pairs: it adds the parts that blocks have written, in order, and turns the ten sums
// of a Gaussian into its gradients.
#pragma once

#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

constexpr int kFinishGaussians = 32;  // of a block

// A block owns 32 Gaussians. Each of its warps adds the parts of some of the ten sums, a lane those of one Gaussian;
// then the first warp turns the sums into gradients. A single thread for a Gaussian would wait for the loads of all ten
// sums.
template <typename A, Task TASK>
__device__ __forceinline__ void finish_gaussians(const Inputs<A>& in, int64_t first, const A* __restrict__ partial,
                                                 int parts, const Outputs<A>& out) {
  constexpr bool kIsField = TASK == Task::kFieldGradients;
  constexpr A kScale = kIsField ? Exponential<A>::kScale : A(1);
  __shared__ A added[10][kFinishGaussians];
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
  const A factor = kIsField ? g.weight / (kScale * kScale) : A(-2);
  const A v[3] = {sums[1], sums[2], sums[3]};
  A u[3];
  whiten_back(g, v, u);
#pragma unroll
  for (int d = 0; d < 3; ++d) out.grad_means[3 * n + d] = factor * u[d];
  const A* s = sums + 4;
  const A columns[3][3] = {{s[0], s[1], s[3]}, {s[1], s[2], s[4]}, {s[3], s[4], s[5]}};
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    whiten_back(g, columns[j], u);
#pragma unroll
    for (int d = 0; d < 3; ++d) out.grad_cholesky[9 * n + 3 * d + j] = j <= d ? factor / kScale * u[d] : A(0);
  }
  if (kIsField) out.grad_weights[n] = sums[0];
}

// The first `point_blocks` blocks write numbers of points, a thread one of `point_count`: the sum of its parts, which
// for gradients is multiplied by grad_output at the point. The other blocks own 32 Gaussians each.
template <typename A, Task TASK>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Inputs<A> in, const A* __restrict__ of_points, int point_parts, int64_t point_count,
                  int point_blocks, const A* __restrict__ of_gaussians, int gaussian_parts, const Outputs<A> out) {
  if (blockIdx.x < point_blocks) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= point_count) return;
    A sum = 0;
#pragma unroll 16
    for (int p = 0; p < point_parts; ++p) sum += of_points[p * point_count + i];
    out.of_points[i] = TASK == Task::kFieldGradients ? sum * out.grad_output[i / 3] : sum;
  } else if constexpr (TASK != Task::kField) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - point_blocks) * kFinishGaussians;
    finish_gaussians<A, TASK>(in, first, of_gaussians, gaussian_parts, out);
  }
}

}  // namespace
}  // namespace visdet::gaussian_field

// Boxes, by which gaussian_field leaves out pairs of points and Gaussians that are far from each other. Points and
// Gaussians come in an order that brings neighbours together. box_kernel makes the box around each Gaussian, outside of
// which its term is below the cutoff, and the boxes around groups of kThreads neighbours. A block of pair_kernel skips
// the groups that are apart from its own box. In the other groups it skips the members that are apart from it.
#pragma once

#include "common/compact.cuh"
#include "common/warp.cuh"
#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// The i-th of `count` points or Gaussians in an order. An order that is no permutation leads to no stray access.
__device__ __forceinline__ int64_t in_order(const int64_t* order, int64_t i, int64_t count) {
  return min(max(order[i], int64_t{0}), count - 1);
}

// A box that contains no point, so that enclose() leaves any other box as it is.
__device__ __forceinline__ Box empty_box() {
  return {{kInfinity, kInfinity, kInfinity}, {-kInfinity, -kInfinity, -kInfinity}};
}

__device__ __forceinline__ void enclose(Box& box, const Box& other) {
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    box.low[d] = min(box.low[d], other.low[d]), box.high[d] = max(box.high[d], other.high[d]);
  }
}

// The box from `low` to `high`; all of space if one of the numbers is NaN, so that NaN is never left out.
__device__ __forceinline__ Box box_between(const float (&low)[3], const float (&high)[3]) {
  Box box;
  bool is_nan = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) is_nan |= isnan(low[d]) || isnan(high[d]);
#pragma unroll
  for (int d = 0; d < 3; ++d) box.low[d] = is_nan ? -kInfinity : low[d], box.high[d] = is_nan ? kInfinity : high[d];
  return box;
}

__device__ __forceinline__ Box box_of_point(float x, float y, float z) { return box_between({x, y, z}, {x, y, z}); }

// The box outside of which the term of Gaussian n is below the cutoff.
__device__ __forceinline__ Box box_of_gaussian(const Inputs<float>& in, int64_t n) {
  const float *mean = in.means + 3 * n, *l = in.cholesky + 9 * n, size = abs(in.weights[n]);
  if (size <= in.cutoff) return empty_box();
  const bool is_valid = l[0] > 0 && l[4] > 0 && l[8] > 0;
  const float radius = is_valid ? sqrt(2 * log(size / in.cutoff)) : quiet_nan<float>();
  const float reach[3] = {radius * l[0], radius * sqrt(l[3] * l[3] + l[4] * l[4]),
                          radius * sqrt(l[6] * l[6] + l[7] * l[7] + l[8] * l[8])};
  return box_between({mean[0] - reach[0], mean[1] - reach[1], mean[2] - reach[2]},
                     {mean[0] + reach[0], mean[1] + reach[1], mean[2] + reach[2]});
}

__device__ __forceinline__ bool are_apart(const Box& a, const Box& b) {
  bool apart = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) apart |= a.low[d] > b.high[d] || a.high[d] < b.low[d];
  return apart;
}

// Called by all threads of a block: returns the box around those of all threads.
__device__ __forceinline__ Box box_of_block(Box box) {
  __shared__ Box boxes[kThreads / 32];
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    box.low[d] = reduce_lanes(box.low[d], [](float a, float b) { return min(a, b); });
    box.high[d] = reduce_lanes(box.high[d], [](float a, float b) { return max(a, b); });
  }
  if (threadIdx.x % 32 == 0) boxes[threadIdx.x / 32] = box;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) enclose(box, boxes[w]);
  return box;
}

// A block takes a group of kThreads neighbours. With GAUSSIANS it writes the box of each Gaussian and the box around
// them, without it the box around points.
template <bool GAUSSIANS>
__global__ void __launch_bounds__(kThreads)
    box_kernel(const Inputs<float> in, Box* __restrict__ boxes, Box* __restrict__ groups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Box box = empty_box();
  if (i < (GAUSSIANS ? in.N : in.B)) {
    if constexpr (GAUSSIANS) {
      boxes[i] = box = box_of_gaussian(in, in_order(in.gaussian_order, i, in.N));
    } else {
      const float* point = in.points + 3 * in_order(in.point_order, i, in.B);
      box = box_of_point(point[0], point[1], point[2]);
    }
  }
  box = box_of_block(box);
  if (threadIdx.x == 0) groups[blockIdx.x] = box;
}

// Called by all threads of a block: calls f(first, end) for the groups [first, end) of kThreads members of [begin, end)
// that are not apart from the block's box. begin is a multiple of kThreads.
template <typename F>
__device__ __forceinline__ void for_near_groups(int64_t begin, int64_t end, const Box& box, const Box* groups,
                                                const F& f) {
  __shared__ int32_t near[kThreads];
  const int64_t last = (end + kThreads - 1) / kThreads;
  for (int64_t g0 = begin / kThreads; g0 < last; g0 += kThreads) {
    const int64_t g = g0 + threadIdx.x;
    const int count = compact_block<kThreads>(
        1, [&](int) { return g < last && !are_apart(box, groups[g]); },
        [&](int, int position) { near[position] = threadIdx.x; });
    for (int k = 0; k < count; ++k) {
      const int64_t first = (g0 + near[k]) * kThreads;
      f(first, min(first + kThreads, end));
    }
    __syncthreads();  // the list has been read
  }
}

}  // namespace
}  // namespace visdet::gaussian_field

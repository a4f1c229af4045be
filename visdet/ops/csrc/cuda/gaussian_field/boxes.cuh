// Boxes, by which gaussian_field leaves out pairs of points and Gaussians that are far from each other.
#pragma once

#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

template <typename A>
__device__ __forceinline__ A infinity() {
  return static_cast<A>(__int_as_float(0x7f800000));
}
template <typename A>
__device__ __forceinline__ Box<A> nothing() {
  const A far = infinity<A>();
  return {{far, far, far}, {-far, -far, -far}};
}

// The box from `low` to `high`; everything, if one of them is NaN: NaN is never left out.
template <typename A>
__device__ __forceinline__ Box<A> box_between(const A (&low)[3], const A (&high)[3]) {
  Box<A> box;
  bool is_nan = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) is_nan |= isnan(low[d]) || isnan(high[d]);
#pragma unroll
  for (int d = 0; d < 3; ++d)
    box.low[d] = is_nan ? -infinity<A>() : low[d], box.high[d] = is_nan ? infinity<A>() : high[d];
  return box;
}

// Where Gaussian n has more to say than the cutoff.
template <typename A>
__device__ __forceinline__ Box<A> box_of_gaussian(const Inputs<A>& in, int64_t n) {
  const A *mean = in.means + 3 * n, *l = in.cholesky + 9 * n, size = abs(in.weights[n]);
  if (size <= in.cutoff) return nothing<A>();
  const bool is_valid = l[0] > 0 && l[4] > 0 && l[8] > 0;
  const A radius = is_valid ? sqrt(2 * log(size / in.cutoff)) : quiet_nan<A>();
  const A reach[3] = {radius * l[0], radius * sqrt(l[3] * l[3] + l[4] * l[4]),
                      radius * sqrt(l[6] * l[6] + l[7] * l[7] + l[8] * l[8])};
  return box_between<A>({mean[0] - reach[0], mean[1] - reach[1], mean[2] - reach[2]},
                        {mean[0] + reach[0], mean[1] + reach[1], mean[2] + reach[2]});
}

template <typename A>
__device__ __forceinline__ bool are_apart(const Box<A>& a, const Box<A>& b) {
  bool apart = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) apart |= a.low[d] > b.high[d] || a.high[d] < b.low[d];
  return apart;
}

// All threads of the block: the box around theirs.
template <typename A>
__device__ __forceinline__ Box<A> box_of_block(Box<A> box) {
  __shared__ Box<A> boxes[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      box.low[d] = min(box.low[d], __shfl_xor_sync(kAll, box.low[d], step));
      box.high[d] = max(box.high[d], __shfl_xor_sync(kAll, box.high[d], step));
    }
  }
  if (lane == 0) boxes[warp] = box;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) {
    for (int d = 0; d < 3; ++d) {
      box.low[d] = min(box.low[d], boxes[w].low[d]), box.high[d] = max(box.high[d], boxes[w].high[d]);
    }
  }
  return box;
}

// All threads of the block: this thread's place in the tile if it keeps its entry, in order, and the tile's length.
__device__ __forceinline__ int place_in_tile(bool keep, int& place) {
  __shared__ int32_t counts[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned ballot = __ballot_sync(kAll, keep);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  int total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) place = total + __popc(ballot & ((1u << lane) - 1));
    total += counts[w];
  }
  return total;
}

// A block takes kThreads neighbours: the boxes of Gaussians (GAUSSIANS), and the box around them, or around points.
template <typename A, bool GAUSSIANS>
__global__ void __launch_bounds__(kThreads)
    box_kernel(const Inputs<A> in, Box<A>* __restrict__ boxes, Box<A>* __restrict__ groups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Box<A> box = nothing<A>();
  if (i < (GAUSSIANS ? in.N : in.B)) {
    if constexpr (GAUSSIANS) {
      boxes[i] = box = box_of_gaussian(in, in_order(in.gaussian_order, i, in.N));
    } else {
      const A* point = in.points + 3 * in_order(in.point_order, i, in.B);
      box = box_between<A>({point[0], point[1], point[2]}, {point[0], point[1], point[2]});
    }
  }
  box = box_of_block(box);
  if (threadIdx.x == 0) groups[blockIdx.x] = box;
}

// Calls f(first, end) for the tiles of kThreads entries of [begin, end) that a block must look at; begin is a multiple
// of kThreads where groups are left out.
template <typename A, bool CULL, typename F>
__device__ __forceinline__ void for_tiles(int64_t begin, int64_t end, const Box<A>& box, const Box<A>* groups,
                                          const F& f) {
  if constexpr (!CULL) {
    for (int64_t first = begin; first < end; first += kThreads) f(first, min(first + kThreads, end));
  } else {
    __shared__ int32_t kept[kThreads];
    const int64_t last = (end + kThreads - 1) / kThreads;
    for (int64_t g0 = begin / kThreads; g0 < last; g0 += kThreads) {
      const int64_t g = g0 + threadIdx.x;
      const bool keep = g < last && !are_apart(box, groups[g]);
      int place = 0;
      const int count = place_in_tile(keep, place);
      if (keep) kept[place] = threadIdx.x;
      __syncthreads();
      for (int k = 0; k < count; ++k) {
        const int64_t first = (g0 + kept[k]) * kThreads;
        f(first, min(first + kThreads, end));
      }
      __syncthreads();  // the list has been read
    }
  }
}

}  // namespace
}  // namespace visdet::gaussian_field

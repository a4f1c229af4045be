// Sums over the threads of a block, and counts turned into places with them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace visdet {

// For all threads of a block: the sum of `value` over the threads before this one; `total` over all.
template <int THREADS>
__device__ __forceinline__ int32_t sum_before(int32_t value, int32_t& total) {
  constexpr unsigned kAll = 0xffffffffu;
  __shared__ int32_t warp_sums[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto inclusive = [&](int32_t sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum += other;
    }
    return sum;
  };
  const int32_t in_warp = inclusive(value);
  if (lane == 31) warp_sums[warp] = in_warp;
  __syncthreads();
  const int32_t mine = lane < THREADS / 32 ? warp_sums[lane] : 0, of_warps = inclusive(mine);
  total = __shfl_sync(kAll, of_warps, 31);
  const int32_t before = __shfl_sync(kAll, of_warps - mine, warp);
  __syncthreads();  // warp_sums may be written again
  return before + in_warp - value;
}

constexpr int kScanEach = 4;  // counts a thread takes at a time

// For all threads of a block: starts[i] = carry + the counts before i, from `begin` to `end`; returns carry and all of
// them. `starts` may be `counts`.
template <int THREADS>
__device__ __forceinline__ int32_t place_counts(const int32_t* counts, int32_t* starts, int64_t begin, int64_t end,
                                                int32_t carry) {
  for (int64_t from = begin; from < end; from += THREADS * kScanEach) {
    int32_t count[kScanEach], sum = 0, total;
    const int64_t first = from + threadIdx.x * kScanEach;
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) count[i] = first + i < end ? counts[first + i] : 0;
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) sum += count[i];
    int32_t start = carry + sum_before<THREADS>(sum, total);
    carry += total;
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) {
      if (first + i < end) starts[first + i] = start;
      start += count[i];
    }
  }
  return carry;
}

}  // namespace visdet

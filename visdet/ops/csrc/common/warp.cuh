// Sums and exchanges among the threads of a warp. Every function is for all lanes of a warp, or for all lanes named by
// its `mask`. A group is a run of neighbouring lanes, as many as a power of two, that begins at a multiple of its size.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace visdet {

constexpr unsigned kAllLanes = 0xffffffffu;

// Combines `value` over those lanes of a group of `end` whose numbers agree modulo `begin`; every lane returns the same
// result. combine(a, b) must be associative and commutative up to rounding. `begin` and `end` are powers of two.
template <typename A, typename Combine>
__device__ __forceinline__ A reduce_lanes(A value, const Combine& combine, int begin = 1, int end = 32,
                                          unsigned mask = kAllLanes) {
#pragma unroll
  for (int step = begin; step < end; step *= 2) value = combine(value, __shfl_xor_sync(mask, value, step));
  return value;
}

// The sum of `value` over those lanes of a group of `end` whose numbers agree modulo `begin`.
template <typename A>
__device__ __forceinline__ A sum_lanes(A value, int begin = 1, int end = 32, unsigned mask = kAllLanes) {
#pragma unroll
  for (int step = begin; step < end; step *= 2) value += __shfl_xor_sync(mask, value, step);
  return value;
}

// The same of N values, each replaced by its sum; their exchanges overlap.
template <int N, typename A>
__device__ __forceinline__ void sum_lanes(A (&values)[N], int begin = 1, int end = 32, unsigned mask = kAllLanes) {
#pragma unroll
  for (int step = begin; step < end; step *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += __shfl_xor_sync(mask, values[i], step);
  }
}

// The greatest `value` of those lanes of a group of `end` whose numbers agree modulo `begin`. A NaN of another lane is
// ignored.
template <typename A>
__device__ __forceinline__ A max_lanes(A value, int begin = 1, int end = 32, unsigned mask = kAllLanes) {
  return reduce_lanes(value, [](A mine, A other) { return other > mine ? other : mine; }, begin, end, mask);
}

// The least `value` of those lanes of a group of `end` whose numbers agree modulo `begin`. A NaN of another lane is
// ignored.
template <typename A>
__device__ __forceinline__ A min_lanes(A value, int begin = 1, int end = 32, unsigned mask = kAllLanes) {
  return reduce_lanes(value, [](A mine, A other) { return other < mine ? other : mine; }, begin, end, mask);
}

// The sum of `value` over this lane and those before it in the warp. Only the first `end` lanes get
// the right result.
template <typename A>
__device__ __forceinline__ A inclusive_sum_lanes(A value, int end = 32) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < end; step *= 2) {
    const A other = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// One step of a transposed sum: of two values that two lanes `step` apart hold, the lane with `upper` set returns the
// sum of `high`, the other one the sum of `low`.
template <typename A>
__device__ __forceinline__ A exchange(unsigned mask, bool upper, A low, A high, int step) {
  return (upper ? high : low) + __shfl_xor_sync(mask, upper ? low : high, step);
}

// The sums of N values, a power of two, over a group of `end` lanes, at least N: lane j returns the sum of value j % N.
// This takes N - 1 exchanges and log2(end / N) more instead of N * log2(end). STEP is for the recursion.
template <int STEP = 1, int N, typename A>
__device__ __forceinline__ A transposed_sum_lanes(const A (&values)[N], int end = 32) {
  if constexpr (N > 1) {
    A half[N / 2];
#pragma unroll
    for (int v = 0; v < N / 2; ++v) {
      half[v] = exchange(kAllLanes, threadIdx.x & STEP, values[2 * v], values[2 * v + 1], STEP);
    }
    return transposed_sum_lanes<2 * STEP>(half, end);
  } else {
    return sum_lanes(values[0], STEP, end);
  }
}

// How many lanes before this one have their bit set in `ballot`.
__device__ __forceinline__ int rank_in_ballot(unsigned ballot) {
  return __popc(ballot & ((1u << threadIdx.x % 32) - 1));
}

}  // namespace visdet

// The kernel of furthest_point_sample. The contract is in ../../furthest_point_sample.h.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "common/rounded.cuh"
#include "common/warp.cuh"
#include "furthest_point_sample.h"

namespace visdet::furthest_point_sample {

constexpr int kThreads = 1024;  // a warp for each lane of a warp
// Points that a thread holds in registers: a point takes four numbers, of the 64 registers that a thread has.
template <typename A>
constexpr int kHeld = 32 / static_cast<int>(sizeof(A));

template <typename A>
struct Furthest {
  A distance;
  int32_t index;

  __device__ __forceinline__ void take(A other, int32_t its_index) {
    if (other > distance || (other == distance && its_index < index)) distance = other, index = its_index;
  }
  __device__ __forceinline__ void take_lanes() {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const A other = __shfl_xor_sync(kAllLanes, distance, step);
      take(other, __shfl_xor_sync(kAllLanes, index, step));
    }
  }
};

template <typename A>
__device__ __forceinline__ A lesser_distance(A nearest, A distance) {
  return distance < nearest ? distance : nearest;  // A NaN does not count.
}

// A block owns a cloud, and a thread every kThreads-th point. The first kHeld of them, and their least distances from
// the samples, are in registers. The least distances of the others are in `nearest` [B, N], and their coordinates are
// read again for every sample. Of a table, the row of the last sample is read. One barrier a sample: the warps' results
// alternate between two arrays, so that a warp cannot overwrite what another one still reads.
template <typename A, bool IS_TABLE>
__global__ void __launch_bounds__(kThreads) sample_kernel(const FurthestArrays<A> a, A* __restrict__ nearest) {
  __shared__ Furthest<A> of_warps[2][kThreads / 32];
  const int64_t N = a.N, mine = threadIdx.x;
  const A* __restrict__ points = a.points + blockIdx.x * N * (IS_TABLE ? N : 3);
  int32_t* samples = a.samples + blockIdx.x * a.num_points;
  nearest += blockIdx.x * N;
  A held[kHeld<A>][3], held_nearest[kHeld<A>];
#pragma unroll
  for (int i = 0; i < kHeld<A>; ++i) {
    const int64_t n = mine + i * kThreads;
    held_nearest[i] = A(kGreatestDistance);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) held[i][axis] = !IS_TABLE && n < N ? points[3 * n + axis] : A(0);
  }
  for (int64_t n = mine + kHeld<A> * kThreads; n < N; n += kThreads) nearest[n] = A(kGreatestDistance);
  if (mine == 0) samples[0] = 0;
  int64_t last = 0;
  for (int64_t s = 1; s < a.num_points; ++s) {
    const A* from = points + last * (IS_TABLE ? N : 3);
    A at[3] = {};
    if constexpr (!IS_TABLE) at[0] = from[0], at[1] = from[1], at[2] = from[2];
    Furthest<A> best{-A(INFINITY), INT32_MAX};
#pragma unroll
    for (int i = 0; i < kHeld<A>; ++i) {
      const int64_t n = mine + i * kThreads;
      if (n < N) {
        held_nearest[i] = lesser_distance(held_nearest[i], IS_TABLE ? from[n] : squared_distance(held[i], at));
        best.take(held_nearest[i], static_cast<int32_t>(n));
      }
    }
    for (int64_t n = mine + kHeld<A> * kThreads; n < N; n += kThreads) {
      const A distance = IS_TABLE ? from[n] : squared_distance(points + 3 * n, at);
      const A least = lesser_distance(nearest[n], distance);
      nearest[n] = least;
      best.take(least, static_cast<int32_t>(n));
    }
    best.take_lanes();
    if (mine % 32 == 0) of_warps[s % 2][mine / 32] = best;
    __syncthreads();  // the results of all warps are there
    best = of_warps[s % 2][mine % 32];
    best.take_lanes();
    last = best.index;
    if (mine == 0) samples[s] = best.index;
  }
}

}  // namespace visdet::furthest_point_sample

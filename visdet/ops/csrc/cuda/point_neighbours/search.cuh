// The kernels of ball_query and knn. The contract is in ../../point_neighbours.h.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "common/rounded.cuh"
#include "common/warp.cuh"
#include "point_neighbours.h"

namespace visdet::point_neighbours {

constexpr int kThreads = 128;
constexpr int kTile = 256;  // points in shared memory at a time

// A warp owns a center and looks at 32 points at a time, until it has found enough. The warps of a block have
// neighbouring centers, so that they read the same points at about the same time, from the first-level cache.
template <typename A>
__global__ void __launch_bounds__(kThreads) ball_kernel(const BallArrays<A> a) {
  const int lane = threadIdx.x % 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (c >= a.B * a.M) return;
  const A* __restrict__ points = a.points + c / a.M * a.N * 3;
  const A center[3] = {a.centers[3 * c], a.centers[3 * c + 1], a.centers[3 * c + 2]};
  int32_t* index = a.index + c * a.count;
  int64_t found = 0, first = 0;
  for (int64_t start = 0; start < a.N && found < a.count; start += 32) {
    const int64_t n = start + lane;
    bool is_near = false;
    if (n < a.N) {
      const A distance = squared_distance(points + 3 * n, center);
      is_near = (distance >= a.low && distance < a.high) || (distance == 0 && !a.is_stacked);
    }
    const unsigned ballot = __ballot_sync(kAllLanes, is_near);
    if (ballot == 0) continue;
    if (found == 0) first = start + 31 - __clz(ballot & (0u - ballot));
    const int64_t rank = found + rank_in_ballot(ballot);
    if (is_near && rank < a.count) index[rank] = static_cast<int32_t>(n);
    found += __popc(ballot);
  }
  for (int64_t i = lane; i < a.count; i += 32) {
    if (i < found) continue;
    index[i] = a.is_stacked && found == 0 && i == 0 ? -1 : static_cast<int32_t>(first);
  }
}

// A thread owns a center, whose K nearest points it keeps in order. All centers of a block are of one cloud, whose
// points the block brings to shared memory tile by tile. K is at least k, and the first k points are written.
template <typename A, int K>
__global__ void __launch_bounds__(kThreads) nearest_kernel(const NearestArrays<A> a) {
  constexpr int kUnrolled = K > 16 ? 1 : K;  // A longer list is in local memory.
  __shared__ A tile[kTile * 3];
  const int64_t blocks = (a.M + kThreads - 1) / kThreads;
  const int64_t cloud = blockIdx.x / blocks, m = blockIdx.x % blocks * kThreads + threadIdx.x, c = cloud * a.M + m;
  const A* __restrict__ points = a.points + cloud * a.N * 3;
  A center[3] = {}, nearest[K];
  int32_t index[K];
  if (m < a.M) center[0] = a.centers[3 * c], center[1] = a.centers[3 * c + 1], center[2] = a.centers[3 * c + 2];
#pragma unroll kUnrolled
  for (int i = 0; i < K; ++i) nearest[i] = A(INFINITY), index[i] = 0;
  for (int64_t start = 0; start < a.N; start += kTile) {
    const int count = a.N - start < kTile ? static_cast<int>(a.N - start) : kTile;
    __syncthreads();  // nobody reads the tile before any more
    for (int i = threadIdx.x; i < 3 * count; i += kThreads) tile[i] = points[3 * start + i];
    __syncthreads();  // the tile is there
    for (int n = 0; n < count; ++n) {
      const A distance = squared_distance(tile + 3 * n, center);
      if (!(distance < nearest[K - 1])) continue;
      // Numbers behind the place of the new one move by one. The comparison with `<` keeps lower indices first.
#pragma unroll kUnrolled
      for (int i = K - 1; i >= 0; --i) {
        const bool moves = i > 0 && distance < nearest[i > 0 ? i - 1 : 0];
        if (moves) {
          nearest[i] = nearest[i - 1], index[i] = index[i - 1];
        } else if (distance < nearest[i]) {
          nearest[i] = distance, index[i] = static_cast<int32_t>(start + n);
        }
      }
    }
  }
  if (m >= a.M) return;
#pragma unroll kUnrolled
  for (int i = 0; i < K; ++i) {
    if (i < a.k) a.index[c * a.k + i] = index[i], a.distances[c * a.k + i] = nearest[i];
  }
}

}  // namespace visdet::point_neighbours

// The (point, camera) pairs of a query that lie in an image: their list, and zeros for the gradients of the others.
#pragma once

#include "common/cuda_utils.cuh"
#include "cuda/deformable_aggregation/call.cuh"

namespace visdet::deformable_aggregation {
namespace {

template <typename A>
__device__ __forceinline__ bool is_visible(const Pack<A, 2>& location) {
  const A x = location.at[0], y = location.at[1];
  return x > 0 && x < 1 && y > 0 && y < 1;
}

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 512;  // pairs that a block lists at a time

// Called by all threads of a block: writes the visible pairs among up to kTile pairs of a query to `visible`, in order,
// and returns how many there are. Pairs are listed camera by camera. So blocks that run at the same time read the maps
// of the same camera, which fit the second-level cache when those of all cameras do not. For the same reason split s of
// n takes every n-th pair.
template <typename A>
__device__ __forceinline__ int compact_visible(const Pack<A, 2>* __restrict__ locations, int tile, int per_split,
                                               int split, const Sizes& sizes, int32_t* visible) {
  constexpr int kRounds = kTile / kThreads;
  __shared__ int32_t counts[kRounds * kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned ballots[kRounds];
  int32_t pairs[kRounds];
#pragma unroll
  for (int t = 0; t < kRounds; ++t) {
    ballots[t] = 0;
    if (tile + t * kThreads >= per_split) break;
    const int i = (tile + t * kThreads + threadIdx.x) * sizes.splits + split, v = i / sizes.P;
    pairs[t] = (i - v * sizes.P) * sizes.V + v;
    ballots[t] = __ballot_sync(kAll, v < sizes.V && is_visible(locations[pairs[t]]));
    if (lane == 0) counts[t * kWarps + warp] = __popc(ballots[t]);
  }
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int t = 0; t < kRounds; ++t) {
    if (tile + t * kThreads >= per_split) break;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp && ballots[t] >> lane & 1) {
        visible[total + __popc(ballots[t] & ((1u << lane) - 1))] = pairs[t];
      }
      total += counts[t * kWarps + w];
    }
  }
  __syncthreads();
  return total;
}

// Called by all threads of a block: writes zeros to the gradients of the pairs that compact_visible() did not list.
template <typename A, typename TW>
__device__ __forceinline__ void zero_invisible(const Pack<A, 2>* __restrict__ locations, int tile, int per_split,
                                               int split, const Sizes& sizes, Pack<A, 2>* grad_locations,
                                               TW* grad_weights) {
  constexpr int kPack = least(4, 16 / sizeof(TW));
  const int numbers = sizes.L * sizes.G, each = numbers % kPack == 0 ? kPack : 1, packs = numbers / each;
  const int pairs = min(kTile, per_split - tile);
  for (int n = threadIdx.x; n < pairs * packs; n += kThreads) {
    const int of_tile = n / packs, pack = n - of_tile * packs;
    const int i = (tile + of_tile) * sizes.splits + split, v = i / sizes.P;
    const int pair = (i - v * sizes.P) * sizes.V + v;
    if (v >= sizes.V || is_visible(locations[pair])) continue;
    if (pack == 0) grad_locations[pair] = {};
    TW* to = grad_weights + static_cast<int64_t>(pair) * numbers + pack * each;
    if (each == kPack) {
      *reinterpret_cast<Pack<TW, kPack>*>(to) = {};
    } else {
      *to = TW();
    }
  }
}

}  // namespace
}  // namespace visdet::deformable_aggregation

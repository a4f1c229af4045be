// The (point, camera) pairs of a query: which of them a block works on, a list of those that lie in their camera's
// image, and zeros for the gradients of the others.
#pragma once

#include "common/compact.cuh"
#include "common/values.cuh"
#include "cuda/deformable_aggregation/call.cuh"

namespace visdet::deformable_aggregation {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 512;  // pairs that a block lists at a time
constexpr int kTileRounds = kTile / kThreads;

// Whether a (point, camera) pair at this location counts; NaN does not.
template <typename A>
__device__ __forceinline__ bool is_visible(const Pack<A, 2>& location) {
  const A x = location.at[0], y = location.at[1];
  return x > 0 && x < 1 && y > 0 && y < 1;
}

// The pairs of a query that a block works on, camera by camera: so blocks that run at the same time read the maps of
// the same camera, which fit the second-level cache when those of all cameras do not. For the same reason block `split`
// of `splits` has every splits-th pair.
template <typename A>
struct BlockPairs {
  const Pack<A, 2>* locations;  // [P, V] of the query
  int32_t P, V, splits, split;
  int32_t count;  // of the block's pairs; the last one may not exist

  __device__ __forceinline__ BlockPairs(const Pack<A, 2>* locations, const Sizes& sizes, int split)
      : locations(locations),
        P(sizes.P),
        V(sizes.V),
        splits(sizes.splits),
        split(split),
        count((sizes.P * sizes.V + sizes.splits - 1) / sizes.splits) {}

  // The number of the block's i-th pair in [P, V].
  __device__ __forceinline__ int pair(int i) const {
    const int v = camera(i);
    return (i * splits + split - v * P) * V + v;
  }
  __device__ __forceinline__ bool exists(int i) const { return camera(i) < V; }

 private:
  __device__ __forceinline__ int camera(int i) const { return (i * splits + split) / P; }
};

// Called by all threads of a block: writes the visible pairs of up to kTile pairs from `tile` on to `visible`, in
// order, and returns how many there are.
template <typename A>
__device__ __forceinline__ int list_visible(const BlockPairs<A>& pairs, int tile, int32_t* visible) {
  const int rounds = (pairs.count - tile + kThreads - 1) / kThreads;
  int32_t pair[kTileRounds];
  return compact_block<kThreads, kTileRounds>(
      rounds,
      [&](int round) {
        const int i = tile + round * kThreads + threadIdx.x;
        pair[round] = pairs.pair(i);
        return pairs.exists(i) && is_visible(pairs.locations[pair[round]]);
      },
      [&](int round, int position) { visible[position] = pair[round]; });
}

// Called by all threads of a block: writes zeros to the gradients of the pairs that list_visible() did not list.
template <typename A, typename TW>
__device__ __forceinline__ void zero_invisible(const BlockPairs<A>& pairs, int tile, const Sizes& sizes,
                                               Pack<A, 2>* grad_locations, TW* grad_weights) {
  constexpr int kPack = least(4, 16 / sizeof(TW));
  const int numbers = sizes.L * sizes.G, pack_numbers = numbers % kPack == 0 ? kPack : 1;
  const int packs = numbers / pack_numbers, count = min(kTile, pairs.count - tile) * packs;
  for (int n = threadIdx.x; n < count; n += kThreads) {
    const int i = n / packs, pack = n - i * packs;
    const int pair = pairs.pair(tile + i);
    if (!pairs.exists(tile + i) || is_visible(pairs.locations[pair])) continue;
    if (pack == 0) grad_locations[pair] = {};
    TW* to = grad_weights + static_cast<int64_t>(pair) * numbers + pack * pack_numbers;
    if (pack_numbers == kPack) {
      *reinterpret_cast<Pack<TW, kPack>*>(to) = {};
    } else {
      *to = TW();
    }
  }
}

}  // namespace
}  // namespace visdet::deformable_aggregation

// Backward, the first kernel: the gradients of weights and locations. A block owns the pairs of a query, or one of
// `splits` equal parts of them, and lists the visible ones as the forward does. Pair i of the list goes to warp i %
// kWarps, with its samples in all levels, so that one warp sums the gradient of the pair's location. The lanes of a
// warp work out 32 samples, one each, and count them in their cells, which gives each sample its rank there
// (records.cuh). Then all lanes walk the samples: a lane multiplies its channels of grad_output with those of the four
// corners, and the sums of the lanes of a group are the four dot products that both gradients are made of. Each
// gradient has one writer.
#pragma once

#include "common/bilinear.h"
#include "common/corners.cuh"
#include "common/warp.cuh"
#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/visible.cuh"

namespace visdet::deformable_aggregation {
namespace {

template <typename A>
struct alignas(16) PairSample {
  uint32_t row[4];                      // of each corner's channels in the image's features
  A fx, fy, W, H;                       // NaN if the map does not lie within S
  int32_t weight_row, inside, is_last;  // weight_row: in [P, V, L]; inside: a bit a corner; is_last: of the pair's
  int32_t pair;
};

// Works out sample l of L of a visible pair and counts it in its cell. counts: those of the image; ranks: [P, V, L] of
// the query.
template <typename A>
__device__ __forceinline__ PairSample<A> prepare_sample(const Pack<A, 2>& location, const Map& map, int pair, int l,
                                                        int L, int32_t* counts, int32_t* ranks) {
  PairSample<A> sample = {
      {}, quiet_nan<A>(), quiet_nan<A>(), quiet_nan<A>(), quiet_nan<A>(), pair * L + l, 15, l == L - 1, pair};
  if (map.H > 0) {
    const A x = pixel_of(location.at[0], map.W), y = pixel_of(location.at[1], map.H);
    Bilinear<A> where;
    locate(x, y, map.H, map.W, where);
    sample.fx = where.fx, sample.fy = where.fy, sample.W = map.W, sample.H = map.H, sample.inside = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sample.row[k] = map.start + where.index[k];
      sample.inside |= where.is_inside[k] << k;
    }
    ranks[sample.weight_row] = atomicAdd(counts + map.first_cell + cell_of(x, y, map.W), 1);
  }
  return sample;
}

// Finishes the gradients of a sample for one group of channels. All lanes of a warp call it. `dots` are a lane's parts
// of four dot products: each corner of the sample with the output's gradient, over the lane's channels of the group.
// The function sums them over the lanes, writes the gradient of the group's weight, and adds the group's share of the
// location's gradient to `grad_location`.
template <typename TW, typename A>
__device__ __forceinline__ void finish_group(const PairSample<A>& sample, A (&dots)[4], A weight, bool has_group,
                                             int lanes_log2, int g, TW* grad_weights, A (&grad_location)[2]) {
  const int lane = threadIdx.x % 32, lanes = 1 << lanes_log2, lane_in_group = lane & (lanes - 1);
  if (lanes_log2 >= 2) {
    // Lane j of a group ends with the dot product of corner j % 4.
    A dot = transposed_sum_lanes(dots, lanes);
    if (!(sample.inside >> (lane & 3) & 1)) dot = 0;
    const CornerFactors<A> factors = corner_factors(lane & 3, sample.fx, sample.fy);
    if (lane_in_group < 4) {
      grad_location[0] += weight * dot * factors.by_x * sample.W;
      grad_location[1] += weight * dot * factors.by_y * sample.H;
    }
    const A grad = sum_lanes(dot * factors.weight, 1, 4);
    if (lane_in_group == 0 && has_group) grad_weights[g] = from_accumulate<TW>(grad);
    return;
  }
  sum_lanes(dots, 1, lanes);
#pragma unroll
  for (int k = 0; k < 4; ++k) dots[k] = sample.inside >> k & 1 ? dots[k] : A(0);
  if (lane_in_group != 0 || !has_group) return;
  A grad = 0, by_x = 0, by_y = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const CornerFactors<A> factors = corner_factors(k, sample.fx, sample.fy);
    grad += dots[k] * factors.weight, by_x += dots[k] * factors.by_x, by_y += dots[k] * factors.by_y;
  }
  grad_location[0] += weight * by_x * sample.W;
  grad_location[1] += weight * by_y * sample.H;
  grad_weights[g] = from_accumulate<TW>(grad);
}

// PACKS: the lane's packs of grad_output stay in registers, each of another group. Else it reads its values of
// grad_output for every sample.
template <typename T, typename TW, typename A, bool PACKS>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 4 ? 8 : 4)
    pair_kernel(const T* __restrict__ grad_output, const T* __restrict__ features, const Maps maps,
                const Pack<A, 2>* __restrict__ locations, const TW* __restrict__ weights, int32_t* __restrict__ counts,
                int32_t* __restrict__ ranks, Pack<A, 2>* __restrict__ grad_locations, TW* __restrict__ grad_weights,
                const Sizes sizes) {
  constexpr int VEC = kPackValues<T, PACKS>, NP = PACKS ? kHeldPacks<T> : 1;
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t visible[kTile];
  __shared__ PairSample<A> samples[kThreads];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int L = sizes.L, V = sizes.V, G = sizes.G;
  load_maps(maps, V * L, table);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PairSample<A>* my_samples = samples + warp * 32;
  const int64_t query = blockIdx.x / sizes.splits;
  const int split = blockIdx.x - static_cast<int>(query) * sizes.splits;
  const int all_pairs = sizes.P * V;
  const BlockPairs<A> pairs(locations + query * all_pairs, sizes, split);
  Pack<A, 2>* my_grad_locations = grad_locations + query * all_pairs;
  const TW* my_weights = weights + query * all_pairs * L * G;
  TW* my_grad_weights = grad_weights + query * all_pairs * L * G;
  int32_t* my_ranks = ranks + query * all_pairs * L;
  const int64_t b = query / sizes.Q;
  const char* image = reinterpret_cast<const char*>(features + b * sizes.S * sizes.C);
  const char* my_output = reinterpret_cast<const char*>(grad_output + query * sizes.C);
  int32_t* my_counts = counts + b * sizes.cell_entries;
  const uint32_t texel_bytes = sizes.C * sizeof(T);

  Channels at[NP];
  A held[NP][VEC];
#pragma unroll
  for (int n = 0; n < NP; ++n) {
    at[n] = channels_of<VEC>(sizes, lane, n);
    if (PACKS) load_pack<T, VEC>(my_output + at[n].c * sizeof(T), held[n]);
  }
  for (int tile = 0; tile < pairs.count; tile += kTile) {
    const int count = list_visible(pairs, tile, visible);
    zero_invisible(pairs, tile, sizes, my_grad_locations, my_grad_weights);
    const int mine = (count - warp + kWarps - 1) / kWarps * L;
    A grad_location[2] = {};
    for (int s0 = 0; s0 < mine; s0 += 32) {
      const int s = s0 + lane;
      if (s < mine) {
        const int of_warp = s / L, l = s - of_warp * L, pair = visible[of_warp * kWarps + warp];
        const Pack<A, 2> location = pairs.locations[pair];
        my_samples[lane] = prepare_sample(location, table[pair % V * L + l], pair, l, L, my_counts, my_ranks);
      }
      __syncwarp();
      const int here = min(32, mine - s0);
#pragma unroll 1
      for (int i = 0; i < here; ++i) {
        const PairSample<A> sample = my_samples[i];
        const TW* weight_row = my_weights + static_cast<int64_t>(sample.weight_row) * G;
        TW* grad_row = my_grad_weights + static_cast<int64_t>(sample.weight_row) * G;
        const int rounds = PACKS ? NP : sizes.warp_packs / sizes.lane_packs, lane_packs = PACKS ? 1 : sizes.lane_packs;
#pragma unroll(PACKS ? NP : 1)
        for (int r = 0; r < rounds; ++r) {
          A dots[4] = {};
          const Channels of_round = PACKS ? at[r % NP] : channels_of<VEC>(sizes, lane, r * lane_packs);
          const int g = of_round.g;
          const bool has_group = of_round.has_group;
          for (int n = 0; n < lane_packs; ++n) {
            const Channels channels = PACKS ? of_round : channels_of<VEC>(sizes, lane, r * lane_packs + n);
            if (!PACKS && !channels.is_active) continue;
            A corner[4][VEC], grad[VEC];
            load_corners<T, VEC>(image + channels.c * sizeof(T), sample.row, texel_bytes, corner);
            if (!PACKS) load_pack<T, VEC>(my_output + channels.c * sizeof(T), grad);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) dots[k] += corner[k][v] * (PACKS ? held[r % NP][v] : grad[v]);
              if (PACKS && !channels.is_active) dots[k] = 0;
            }
          }
          const A weight = has_group ? to_accumulate(weight_row[g]) : A(0);
          finish_group(sample, dots, weight, has_group, sizes.lanes_log2, g, grad_row, grad_location);
        }
        if (sample.is_last) {
          sum_lanes(grad_location);
          if (lane == 0) my_grad_locations[sample.pair] = {grad_location[0], grad_location[1]};
          grad_location[0] = grad_location[1] = 0;
        }
      }
      __syncwarp();  // the samples have been read
    }
    __syncthreads();  // and the list
  }
}

// Shared memory that the kernel declares beside the table of maps.
template <typename A>
constexpr int64_t kPairShared =
    sizeof(int32_t) * kTile + kCompactShared<kThreads, kTileRounds> + sizeof(PairSample<A>) * kThreads;

// Writes the gradients of weights and locations, the numbers of samples of each cell, and their ranks there.
template <typename T, typename TW, typename A, bool PACKS>
void launch_pairs(const BackwardCall& call, const Sizes& sizes, const Tensor& counts, const Tensor& ranks) {
  const int64_t blocks = sizes.B * sizes.Q * sizes.splits;
  launch({kBackwardOp, "pair_kernel", call.scope, blocks, kThreads, call.maps.table_bytes, kPairShared<A>},
         pair_kernel<T, TW, A, PACKS>, data_of<T>(call.grad_output), data_of<T>(call.features), call.maps.maps,
         data_of<Pack<A, 2>>(call.locations), data_of<TW>(call.weights), mutable_data_of<int32_t>(counts),
         mutable_data_of<int32_t>(ranks), mutable_data_of<Pack<A, 2>>(call.grad_locations),
         mutable_data_of<TW>(call.grad_weights), sizes);
}

}  // namespace
}  // namespace visdet::deformable_aggregation

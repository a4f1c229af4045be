// Backward, the first kernel: the gradients of weights and locations.
#pragma once

#include "common/bilinear.h"
#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/visible.cuh"

namespace visdet::deformable_aggregation {
namespace {

template <typename A>
struct alignas(16) BackwardSample {
  uint32_t row[4];
  A fx, fy, W, H;
  int32_t line, inside, is_last;  // line: of weights; inside: a bit a corner; is_last: the pair's last level
  int32_t pair;
};

// HOLD: the packs of grad_output stay in registers (every lane has NP packs, each of another group).
template <typename T, typename TW, typename A, int VEC, int NP, bool HOLD>
__global__ void __launch_bounds__(kThreads, sizeof(A) == 4 ? 8 : 4)
    pair_kernel(const T* __restrict__ grad_output, const T* __restrict__ features, const Maps maps,
                const Pack<A, 2>* __restrict__ locations, const TW* __restrict__ weights, int32_t* __restrict__ counts,
                int32_t* __restrict__ ranks, Pack<A, 2>* __restrict__ grad_locations, TW* __restrict__ grad_weights,
                const Sizes sizes) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int32_t visible[kTile];
  __shared__ BackwardSample<A> samples[kThreads];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int L = sizes.L, V = sizes.V, G = sizes.G;
  load_maps(maps, V * L, table);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  BackwardSample<A>* my_samples = samples + warp * 32;
  const int64_t query = blockIdx.x / sizes.splits;
  const int split = blockIdx.x - static_cast<int>(query) * sizes.splits;
  const int all_pairs = sizes.P * V, per_split = (all_pairs + sizes.splits - 1) / sizes.splits;
  const Pack<A, 2>* my_locations = locations + query * all_pairs;
  Pack<A, 2>* my_grad_locations = grad_locations + query * all_pairs;
  const TW* my_weights = weights + query * all_pairs * L * G;
  TW* my_grad_weights = grad_weights + query * all_pairs * L * G;
  int32_t* my_ranks = ranks + query * all_pairs * L;
  const int64_t b = query / sizes.Q;
  const char* image = reinterpret_cast<const char*>(features + b * sizes.S * sizes.C);
  const char* my_output = reinterpret_cast<const char*>(grad_output + query * sizes.C);
  int32_t* my_counts = counts + b * sizes.cell_entries;
  const uint32_t texel_bytes = sizes.C * sizeof(T);
  const int lanes = 1 << sizes.lanes_log2, lane_in_group = lane & (lanes - 1);
  const bool quads = sizes.lanes_log2 >= 2;  // a lane ends with one corner's dot product, else with all four
  const int corner_of_lane = lane & 3;

  Channels at[NP];
  A held[NP][VEC];
#pragma unroll
  for (int n = 0; n < NP; ++n) {
    at[n] = channels_of<VEC>(sizes, lane, n);
    if (HOLD) load_pack<T, VEC>(my_output + at[n].c * sizeof(T), held[n]);
  }
  for (int tile = 0; tile < per_split; tile += kTile) {
    const int count = compact_visible(my_locations, tile, per_split, split, sizes, visible);
    zero_invisible(my_locations, tile, per_split, split, sizes, my_grad_locations, my_grad_weights);
    const int mine = (count - warp + kWarps - 1) / kWarps * L;
    A grad_x = 0, grad_y = 0;
    for (int s0 = 0; s0 < mine; s0 += 32) {
      const int s = s0 + lane;
      if (s < mine) {
        const int of_warp = s / L, l = s - of_warp * L, pair = visible[of_warp * kWarps + warp];
        const Pack<A, 2> location = my_locations[pair];
        const Map map = table[pair % V * L + l];
        BackwardSample<A> sample = {
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
          my_ranks[sample.line] = atomicAdd(my_counts + map.first_cell + cell_of(map, x, y), 1);
        }
        my_samples[lane] = sample;
      }
      __syncwarp();
      const int here = min(32, mine - s0);
#pragma unroll 1
      for (int i = 0; i < here; ++i) {
        const BackwardSample<A> sample = my_samples[i];
        const TW* line = my_weights + static_cast<int64_t>(sample.line) * G;
        TW* grad_line = my_grad_weights + static_cast<int64_t>(sample.line) * G;
        const A fx = sample.fx, fy = sample.fy;
        const int rounds = HOLD ? NP : sizes.warp_packs / sizes.lane_packs, turns = HOLD ? 1 : sizes.lane_packs;
#pragma unroll(HOLD ? NP : 1)
        for (int r = 0; r < rounds; ++r) {
          A dots[4] = {};
          const Channels of_round = HOLD ? at[r % NP] : channels_of<VEC>(sizes, lane, r * turns);
          const int g = of_round.g;
          const bool has_group = of_round.has_group;
          for (int t = 0; t < turns; ++t) {
            const Channels channels = HOLD ? of_round : channels_of<VEC>(sizes, lane, r * turns + t);
            if (!HOLD && !channels.is_active) continue;
            A corner[4][VEC], grad[VEC];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              load_pack<T, VEC>(image + static_cast<uint64_t>(sample.row[k]) * texel_bytes + channels.c * sizeof(T),
                                corner[k]);
            }
            if (!HOLD) load_pack<T, VEC>(my_output + channels.c * sizeof(T), grad);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) dots[k] += corner[k][v] * (HOLD ? held[r % NP][v] : grad[v]);
              if (HOLD && !channels.is_active) dots[k] = 0;
            }
          }
          const A weight = has_group ? to_accumulate(line[g]) : A(0);
          if (quads) {
            // Lane j of a group ends with the dot product of corner j % 4.
            const A even = exchange(kAll, lane & 1, dots[0], dots[1], 1);
            const A odd = exchange(kAll, lane & 1, dots[2], dots[3], 1);
            A dot = exchange(kAll, lane & 2, even, odd, 2);
            for (int step = 4; step < lanes; step *= 2) dot += __shfl_xor_sync(kAll, dot, step);
            if (!(sample.inside >> corner_of_lane & 1)) dot = 0;
            const A wx = corner_of_lane & 1 ? fx : 1 - fx, wy = corner_of_lane & 2 ? fy : 1 - fy;
            if (lane_in_group < 4) {
              grad_x += weight * dot * (corner_of_lane & 1 ? wy : -wy) * sample.W;
              grad_y += weight * dot * (corner_of_lane & 2 ? wx : -wx) * sample.H;
            }
            A grad = dot * wx * wy;
            grad += __shfl_xor_sync(kAll, grad, 1);
            grad += __shfl_xor_sync(kAll, grad, 2);
            if (lane_in_group == 0 && has_group) grad_line[g] = from_accumulate<TW>(grad);
          } else {
            for (int step = 1; step < lanes; step *= 2) {
#pragma unroll
              for (int k = 0; k < 4; ++k) dots[k] += __shfl_xor_sync(kAll, dots[k], step);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) dots[k] = sample.inside >> k & 1 ? dots[k] : A(0);
            if (lane_in_group == 0 && has_group) {
              grad_x += weight * sample.W * ((1 - fy) * (dots[1] - dots[0]) + fy * (dots[3] - dots[2]));
              grad_y += weight * sample.H * ((1 - fx) * (dots[2] - dots[0]) + fx * (dots[3] - dots[1]));
              grad_line[g] = from_accumulate<TW>((1 - fy) * ((1 - fx) * dots[0] + fx * dots[1]) +
                                                 fy * ((1 - fx) * dots[2] + fx * dots[3]));
            }
          }
        }
        if (sample.is_last) {
#pragma unroll
          for (int step = 16; step > 0; step /= 2) {
            grad_x += __shfl_xor_sync(kAll, grad_x, step);
            grad_y += __shfl_xor_sync(kAll, grad_y, step);
          }
          if (lane == 0) my_grad_locations[sample.pair] = {grad_x, grad_y};
          grad_x = grad_y = 0;
        }
      }
      __syncwarp();  // the samples have been read
    }
    __syncthreads();  // and the list
  }
}

// Shared memory that kernels declare beside the table of maps: what launch() wants to know of them.
template <typename A>
constexpr int64_t kPairShared = sizeof(int32_t) * (kTile + kTile / 32) + sizeof(BackwardSample<A>) * kThreads;

const char* packs_decline_backward(const BackwardCall& call) {
  if (const char* reason = packs_decline(call)) return reason;
  return aligned(call.grad_output, 16) ? nullptr : "grad_output does not start at a multiple of 16 bytes";
}

const char* held_packs_decline(const BackwardCall& call) {
  if (const char* reason = packs_decline_backward(call)) return reason;
  const Sizes sizes = sizes_of(call.problem, 0, pack_values(call.features));
  return sizes.lane_packs == 1 && sizes.warp_packs <= 2 ? nullptr
                                                        : "a lane would hold more than two packs of grad_output";
}

// The gradients of weights and locations; the numbers of samples of each cell, and their ranks there.
template <typename T, typename TW, typename A, int VEC, int NP, bool HOLD>
void launch_pairs(const BackwardCall& call, const Sizes& sizes, const Tensor& counts, const Tensor& ranks) {
  const int64_t blocks = sizes.B * sizes.Q * sizes.splits;
  launch({kBackwardOp, "pair_kernel", call.scope, blocks, kThreads, call.plan.table_bytes, kPairShared<A>},
         pair_kernel<T, TW, A, VEC, NP, HOLD>, static_cast<const T*>(call.grad_output.const_data_ptr()),
         static_cast<const T*>(call.features.const_data_ptr()), call.plan.maps,
         static_cast<const Pack<A, 2>*>(call.locations.const_data_ptr()),
         static_cast<const TW*>(call.weights.const_data_ptr()), static_cast<int32_t*>(counts.mutable_data_ptr()),
         static_cast<int32_t*>(ranks.mutable_data_ptr()),
         static_cast<Pack<A, 2>*>(call.grad_locations.mutable_data_ptr()),
         static_cast<TW*>(call.grad_weights.mutable_data_ptr()), sizes);
}

}  // namespace
}  // namespace visdet::deformable_aggregation

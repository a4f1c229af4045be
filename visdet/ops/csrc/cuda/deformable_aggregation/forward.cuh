// Forward. A block computes the output of a query for a slab of channels, a pack for every lane, from all (point,
// camera) pairs of the query or from one of `splits` equal parts of them.
//
// It first lists the visible pairs in order, so that an invisible pair costs the read of its location and no more: its
// weights are not read. A visible pair has a sample on each level. The samples are dealt to the warps in turn, and
// after every kWarps samples the turn begins one warp earlier: sample n goes to warp n - n / kWarps, modulo kWarps. So
// each warp meets all levels, of which the fine ones are slow.
//
// The lanes of a warp first prepare 32 samples, one each: the rows of the sample's four corners and their weights. Then
// all lanes add the samples one after another, each its own channels, by loads without branches. At the end the sums of
// the warps are added in order: there are no atomics, and every run gives the same bits. With splits, blocks write sums
// that sum_splits_kernel adds in order.
//
// All queries of an image come with their first slab, then all with their second: the channels that are read at one
// time are a part of the features, which the second-level cache holds better. Every slab works out its samples anew,
// which is hidden behind the loads of other blocks.
#pragma once

#include <type_traits>

#include "common/bilinear.h"
#include "common/corners.cuh"
#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/visible.cuh"

namespace visdet::deformable_aggregation {
namespace {

// Blocks of a multiprocessor at a time. Seven for float sums: they leave 72 registers, which two samples' corners need.
template <typename A>
constexpr int kForwardBlocks = sizeof(A) == 4 ? 7 : 4;

template <typename T, typename TW, typename A, int VEC>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<A>)
    forward_kernel(const T* __restrict__ features, const Maps maps, const Pack<A, 2>* __restrict__ locations,
                   const TW* __restrict__ weights, T* __restrict__ output, A* __restrict__ partial, const Sizes sizes) {
  __shared__ int32_t visible[kTile];
  __shared__ CornerRows<A> samples[kThreads];
  __shared__ int32_t weight_rows[kThreads];  // of each sample in [P, V, L]
  __shared__ A warp_sums[kWarps - 1][VEC][32];
  const int L = sizes.L, V = sizes.V, G = sizes.G;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  CornerRows<A>* my_samples = samples + warp * 32;
  int32_t* my_weight_rows = weight_rows + warp * 32;
  const uint32_t Q = static_cast<uint32_t>(sizes.Q), part = blockIdx.x / sizes.splits;
  const int split = blockIdx.x - part * sizes.splits;
  const uint32_t b = part / (Q * sizes.warp_packs), in_image = part - b * Q * sizes.warp_packs, slab = in_image / Q;
  const int64_t query = static_cast<int64_t>(b) * Q + (in_image - slab * Q);
  const int all_pairs = sizes.P * V;
  const BlockPairs<A> pairs(locations + query * all_pairs, sizes, split);
  const TW* my_weights = weights + query * all_pairs * L * G;
  const char* image = reinterpret_cast<const char*>(features + b * sizes.S * sizes.C);
  const uint32_t texel_bytes = sizes.C * sizeof(T);
  const Channels at = channels_of<VEC>(sizes, lane, static_cast<int>(slab));  // a lane without channels writes none
  A sum[VEC] = {};

  // Adds N neighbouring samples of the warp's, whose loads are all under way before the first is used.
  const auto add_samples = [&](auto N, int first) {
    Pack<T, VEC> corner[N][4];
    A weight[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const CornerRows<A>& sample = my_samples[first + n];
      weight[n] = to_accumulate(my_weights[static_cast<int64_t>(my_weight_rows[first + n]) * G + at.g]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const char* row = image + static_cast<uint64_t>(sample.row[k]) * texel_bytes;
        corner[n][k] = *reinterpret_cast<const Pack<T, VEC>*>(row + at.c * sizeof(T));
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const A w = my_samples[first + n].weight[k] * weight[n];
        A values[VEC];
        unpack(corner[n][k], values);
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[v] += values[v] * w;
      }
    }
  };

  for (int tile = 0; tile < pairs.count; tile += kTile) {
    const int all = list_visible(pairs, tile, visible) * L, each = all / kWarps;
    const int mine = each + ((warp + each) % kWarps < all % kWarps);  // samples of this warp
    for (int s0 = 0; s0 < mine; s0 += 32) {
      const int s = s0 + lane;
      if (s < mine) {
        const int n = s * kWarps + (warp + s) % kWarps, of_list = n / L, l = n - of_list * L, pair = visible[of_list];
        const Pack<A, 2> location = pairs.locations[pair];
        const Map map = map_of(maps, pair % V * L + l);
        CornerRows<A> sample = {{}, {quiet_nan<A>(), 0, 0, 0}};
        if (map.H > 0) {
          Bilinear<A> where;
          locate(pixel_of(location.at[0], map.W), pixel_of(location.at[1], map.H), map.H, map.W, where);
          sample = CornerRows<A>::of(where, map.start);
        }
        my_samples[lane] = sample;
        my_weight_rows[lane] = pair * L + l;
      }
      __syncwarp();
      const int here = min(32, mine - s0);
      int i = 0;
      for (; i + 2 <= here; i += 2) add_samples(std::integral_constant<int, 2>{}, i);
      if (i < here) add_samples(std::integral_constant<int, 1>{}, i);
      __syncwarp();  // the samples have been read
    }
    __syncthreads();  // and the list
  }
  if (warp > 0) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) warp_sums[warp - 1][v][lane] = sum[v];
  }
  __syncthreads();
  if (warp > 0 || !at.is_active) return;
#pragma unroll
  for (int v = 0; v < VEC; ++v) {
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) sum[v] += warp_sums[w][v][lane];
  }
  if (partial == nullptr) {
    store_pack<T, VEC>(output + query * sizes.C + at.c, sum);
  } else {
    store_pack<A, VEC>(partial + (split * sizes.B * sizes.Q + query) * sizes.C + at.c, sum);
  }
}

// A thread adds the parts of a number of the output.
constexpr int kSumThreads = 256;
template <typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    sum_splits_kernel(const A* __restrict__ partial, T* __restrict__ output, int64_t count, int splits) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    A sum = 0;
    for (int s = 0; s < splits; ++s) sum += partial[s * count + i];
    output[i] = from_accumulate<T>(sum);
  }
}

template <bool PACKS>
void launch_forward(const ForwardCall& call) {
  dispatch_types(call.features, call.weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
    constexpr int kVec = kPackValues<T, PACKS>;
    if constexpr (kHasKernels<T, PACKS>) {
      const auto& [scope, problem, maps, features, locations, weights] = static_cast<const Call&>(call);
      Sizes sizes = sizes_of(problem, maps.cell_entries, kVec);
      const int64_t blocks = problem.B * problem.Q * sizes.warp_packs, count = call.output.numel();
      sizes.splits = splits_of(problem, blocks, kForwardBlocks<A> * scope.device().multiprocessors);
      Tensor partial = call.output;
      if (sizes.splits > 1) partial = new_empty(locations, {sizes.splits, problem.B, problem.Q, problem.C});
      A* sums = sizes.splits > 1 ? mutable_data_of<A>(partial) : nullptr;
      T* output = mutable_data_of<T>(call.output);
      launch({kOp, "forward_kernel", scope, blocks * sizes.splits, kThreads}, forward_kernel<T, TW, A, kVec>,
             data_of<T>(features), maps.maps, data_of<Pack<A, 2>>(locations), data_of<TW>(weights), output, sums,
             sizes);
      if (sizes.splits == 1) return;
      launch({kOp, "sum_splits_kernel", scope, std::min<int64_t>(ceil_div(count, kSumThreads), 1 << 20), kSumThreads},
             sum_splits_kernel<T, A>, sums, output, count, sizes.splits);
    }
  });
}

inline void launch_forward_of_values(const ForwardCall& call) {
  if (!is_16_bit(call.features)) return launch_forward<false>(call);
  const Tensor features = in_float32(call.features), weights = in_float32(call.weights),
               sums = new_empty(features, call.output.sizes());
  launch_forward<false>({{call.scope, call.problem, call.maps, features, call.locations, weights}, sums});
  Tensor output = call.output;
  copy_(output, sums);
}

}  // namespace
}  // namespace visdet::deformable_aggregation

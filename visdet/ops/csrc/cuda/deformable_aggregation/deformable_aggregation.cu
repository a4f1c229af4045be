// deformable_aggregation on CUDA. The contract is in ../deformable_aggregation.h; how the work is laid out, above each
// kernel.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "common/bilinear.h"
#include "common/block_scan.cuh"
#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "common/order_records.cuh"
#include "common/paths.h"
#include "cuda/deformable_aggregation/deformable_aggregation.cuh"
#include "deformable_aggregation.h"

namespace visdet {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kMaxHostMaps = 64;  // maps whose geometry travels as a kernel argument

// One camera's map of one level. A cell is the square between four texel centres that a sample falls into, border cells
// included: (H + 1) * (W + 1) a map.
struct alignas(16) Map {
  int32_t start, H, W;  // H = 0 for a map that does not lie within S
  uint32_t first_cell;  // of its cells among those of an image, which hold one entry more a map: the end of the last
};

// Geometry by value (from the host) or by pointer (worked out by plan_kernel).
struct Maps {
  const Map* device;
  Map host[kMaxHostMaps];
};

__host__ __device__ __forceinline__ int64_t cells_of(const Map& map) {
  return map.H > 0 ? (static_cast<int64_t>(map.H) + 1) * (map.W + 1) : 0;
}

constexpr int kPlanThreads = 64;

// The maps of tables that are on the device. `slots`: cell entries that an image has room for; maps that overlap may
// want more, and those past the end count as not within S.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const int64_t* __restrict__ shapes, const int64_t* __restrict__ starts, Map* __restrict__ maps,
                int count, int64_t S, int64_t slots) {
  for (int m = threadIdx.x; m < count; m += blockDim.x) {
    const int64_t H = shapes[2 * m], W = shapes[2 * m + 1], start = starts[m];
    const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start <= S - H * W;
    maps[m] = fits ? Map{static_cast<int32_t>(start), static_cast<int32_t>(H), static_cast<int32_t>(W), 0} : Map{};
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t cell = 0;
  for (int m = 0; m < count; ++m) {
    if (cell + cells_of(maps[m]) + 1 > slots) maps[m].H = 0;
    maps[m].first_cell = static_cast<uint32_t>(cell);
    cell += maps[m].H > 0 ? cells_of(maps[m]) + 1 : 0;
  }
}

__device__ __forceinline__ Map map_of(const Maps& maps, int m) { return maps.device ? maps.device[m] : maps.host[m]; }

// All threads of the block: the maps into shared memory.
__device__ __forceinline__ void load_maps(const Maps& maps, int count, Map* table) {
  for (int m = threadIdx.x; m < count; m += blockDim.x) table[m] = map_of(maps, m);
  __syncthreads();
}

struct Sizes {
  int64_t B, S, Q, slots;  // slots: cell entries of an image
  int32_t C, G, P, V, L;
  int32_t group;       // channels of a group
  int32_t lanes_bits;  // log2 of the neighbouring lanes that share a group
  int32_t turns;       // packs of VEC channels that each of them takes of it
  int32_t packs;       // turns * the rounds in which a warp's lanes cover all groups
  int32_t splits;      // blocks that share a query's pairs
};

// A lane's n-th pack of VEC channels. The lanes of a group are a power of two, its packs any number: a lane past the
// last pack has a group, whose sums it takes part in, but no channels, and a lane past the last group has neither. Both
// numbers can be read at whatever the lane has: c is 0 without channels, g is 0 without a group.
struct Channels {
  int32_t c, g;
  bool is_active;  // has channels
  bool has_group;
};
template <int VEC>
__device__ __forceinline__ Channels channels_of(const Sizes& sizes, int lane, int n) {
  const int lanes = 1 << sizes.lanes_bits, round = n / sizes.turns, turn = n - round * sizes.turns;
  const int g = (round << (5 - sizes.lanes_bits)) + (lane >> sizes.lanes_bits);
  const int in_group = ((lane & (lanes - 1)) + turn * lanes) * VEC;
  const bool has_group = g < sizes.G, is_active = has_group && in_group < sizes.group;
  return {is_active ? g * sizes.group + in_group : 0, has_group ? g : 0, is_active, has_group};
}

template <typename A>
__device__ __forceinline__ bool is_visible(const Pack<A, 2>& location) {
  const A x = location.at[0], y = location.at[1];
  return x > 0 && x < 1 && y > 0 && y < 1;
}

// Where a location lies among `size` texels. One rounding, asked for: every kernel gets the same number.
template <typename A>
__device__ __forceinline__ A pixel_of(A location, int32_t size) {
  return fma(location, A(size), A(-0.5));
}

// The cell that a visible sample at pixel (x, y) falls into, among those of its map.
template <typename A>
__device__ __forceinline__ int64_t cell_of(const Map& map, A x, A y) {
  return (static_cast<int64_t>(floor(y)) + 1) * (map.W + 1) + static_cast<int32_t>(floor(x)) + 1;
}

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 512;  // pairs looked at between two compactions

// All threads of the block: the visible ones among up to kTile pairs of a query into `visible`, in order. Returns how
// many. Pairs are taken camera by camera, so that blocks which run together read the same camera's maps, which fit the
// second-level cache when the whole pyramid does not; split s of n takes every n-th, for the same reason.
template <typename A>
__device__ __forceinline__ int compact_visible(const Pack<A, 2>* __restrict__ locations, int tile, int per_split,
                                               int split, const Sizes& sizes, int32_t* visible) {
  constexpr int kTurns = kTile / kThreads;
  __shared__ int32_t counts[kTurns * kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned ballots[kTurns];
  int32_t pairs[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
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
  for (int t = 0; t < kTurns; ++t) {
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

// All threads of the block: zeros for the gradients of the pairs that compact_visible left out.
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

// Forward.
//
// A block owns a slab of a query's channels, a pack for every lane, or one of `splits` equal parts of its (point,
// camera) pairs. It first lists the visible pairs in order, so that an invisible one costs its location and nothing
// else: its weights are not read. The samples of the list (a pair in one level each) go to the warps in turn, and the
// turn moves on by one warp every time, so that each warp meets all levels: the fine ones are slow. A warp's lanes
// first compute the metadata of 32 samples (four clamped texel indices, four corner weights), then all lanes walk them
// with branch-free loads. The warps' sums are added in order: no atomics, and every run gives the same bits. With
// splits the blocks write float sums that sum_splits_kernel adds in order.
//
// All queries of an image take their first slab, then their second: the rows that are read at one time are a part of
// the pyramid, which the second-level cache holds better. A slab works out its samples anew; with several turns of
// blocks on the GPU that is hidden, and the last turn is short.

template <typename A>
struct alignas(16) Sample {
  uint32_t row[4];  // texel of each corner, counted from the first row of the image
  A weight[4];
};

// Blocks that a multiprocessor holds at once. Seven for float sums: 72 registers, which two samples' corners need.
template <typename A>
constexpr int kForwardBlocks = sizeof(A) == 4 ? 7 : 4;

template <typename T, typename TW, typename A, int VEC>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<A>)
    forward_kernel(const T* __restrict__ features, const Maps maps, const Pack<A, 2>* __restrict__ locations,
                   const TW* __restrict__ weights, T* __restrict__ output, A* __restrict__ partial, const Sizes sizes) {
  __shared__ int32_t visible[kTile];
  __shared__ Sample<A> samples[kThreads];
  __shared__ int32_t lines[kThreads];
  __shared__ A planes[kWarps - 1][VEC][32];
  const int L = sizes.L, V = sizes.V, G = sizes.G;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Sample<A>* my_samples = samples + warp * 32;
  int32_t* my_lines = lines + warp * 32;
  const uint32_t Q = static_cast<uint32_t>(sizes.Q), part = blockIdx.x / sizes.splits;
  const int split = blockIdx.x - part * sizes.splits;
  const uint32_t b = part / (Q * sizes.packs), in_image = part - b * Q * sizes.packs, slab = in_image / Q;
  const int64_t query = static_cast<int64_t>(b) * Q + (in_image - slab * Q);
  const int all_pairs = sizes.P * V, per_split = (all_pairs + sizes.splits - 1) / sizes.splits;
  const Pack<A, 2>* my_locations = locations + query * all_pairs;
  const TW* my_weights = weights + query * all_pairs * L * G;
  const char* image = reinterpret_cast<const char*>(features + b * sizes.S * sizes.C);
  const uint32_t texel_bytes = sizes.C * sizeof(T);
  const Channels at = channels_of<VEC>(sizes, lane, static_cast<int>(slab));  // a lane without channels writes nothing
  A sum[VEC] = {};

  // Adds N neighbouring samples of the warp's, whose loads are all under way before the first is used.
  const auto add_samples = [&](auto N, int first) {
    Pack<T, VEC> corner[N][4];
    A weight[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const Sample<A>& sample = my_samples[first + n];
      weight[n] = to_accumulate(my_weights[static_cast<int64_t>(my_lines[first + n]) * G + at.g]);
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

  for (int tile = 0; tile < per_split; tile += kTile) {
    const int all = compact_visible(my_locations, tile, per_split, split, sizes, visible) * L, turns = all / kWarps;
    const int mine = turns + ((warp + turns) % kWarps < all % kWarps);  // samples of this warp
    for (int s0 = 0; s0 < mine; s0 += 32) {
      const int s = s0 + lane;
      if (s < mine) {
        const int n = s * kWarps + (warp + s) % kWarps, of_list = n / L, l = n - of_list * L, pair = visible[of_list];
        const Pack<A, 2> location = my_locations[pair];
        const Map map = map_of(maps, pair % V * L + l);
        Sample<A> sample = {{}, {quiet_nan<A>(), 0, 0, 0}};
        if (map.H > 0) {
          Bilinear<A> where;
          locate(pixel_of(location.at[0], map.W), pixel_of(location.at[1], map.H), map.H, map.W, where);
          where.corner_weights(sample.weight);
#pragma unroll
          for (int k = 0; k < 4; ++k) sample.row[k] = map.start + where.index[k];
        }
        my_samples[lane] = sample;
        my_lines[lane] = pair * L + l;
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
    for (int v = 0; v < VEC; ++v) planes[warp - 1][v][lane] = sum[v];
  }
  __syncthreads();
  if (warp > 0 || !at.is_active) return;
#pragma unroll
  for (int v = 0; v < VEC; ++v) {
#pragma unroll
    for (int w = 0; w < kWarps - 1; ++w) sum[v] += planes[w][v][lane];
  }
  if (partial == nullptr) {
    store_pack<T, VEC>(output + query * sizes.C + at.c, sum);
  } else {
    store_pack<A, VEC>(partial + (split * sizes.B * sizes.Q + query) * sizes.C + at.c, sum);
  }
}

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

// Backward.
//
// pair_kernel walks the visible pairs as the forward does and finishes the gradients of weights and locations; on the
// way it counts the samples of each cell, which gives each its rank there. scan_kernel turns counts into places and
// record_kernel writes the samples there. In texel_kernel a warp owns a few rows of features: the samples of the four
// cells around a texel are its contributions, each a row of grad_output, which the caches hold. So grad_features is
// written once, in its own type: no floating-point atomics, no zero-fill, no float32 copy. A warp walks the records of
// all its rows as one list, whose loads do not wait for each other; a row with many records is shared by
// the warps of its block. Only the ranks differ between runs: in deterministic mode order_kernel sorts each cell, in a
// time in proportion to its samples. Scratch: 20 bytes a sample of any pair (36 with order_kernel), 4 a cell.

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query * P + point
  int32_t query;
  A fx, fy;
};

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
  int32_t* my_counts = counts + b * sizes.slots;
  const uint32_t texel_bytes = sizes.C * sizeof(T);
  const int lanes = 1 << sizes.lanes_bits, lane_in_group = lane & (lanes - 1);
  const bool quads = sizes.lanes_bits >= 2;  // a lane ends with one corner's dot product, else with all four
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
        const int rounds = HOLD ? NP : sizes.packs / sizes.turns, turns = HOLD ? 1 : sizes.turns;
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

// counts -> starts, in place: one block a (batch, map).
constexpr int kScanThreads = 1024;
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const Maps maps, int32_t* __restrict__ counts, int map_count, int64_t slots) {
  const int64_t b = blockIdx.x / map_count;
  const Map map = map_of(maps, blockIdx.x - static_cast<int>(b) * map_count);
  if (map.H == 0) return;
  const int64_t cells = cells_of(map);
  int32_t* mine = counts + b * slots + map.first_cell;
  const int32_t total = place_counts<kScanThreads>(mine, mine, 0, cells, 0);
  if (threadIdx.x == 0) mine[cells] = total;
}

// A thread takes a (query, point, camera) pair and writes its levels' records.
constexpr int kRecordThreads = 256;
template <typename A>
__global__ void __launch_bounds__(kRecordThreads)
    record_kernel(const Maps maps, const Pack<A, 2>* __restrict__ locations, const int32_t* __restrict__ starts,
                  const int32_t* __restrict__ ranks, Record<A>* __restrict__ records, const Sizes sizes) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int L = sizes.L, V = sizes.V;
  load_maps(maps, V * L, table);
  const int64_t in_image = sizes.Q * sizes.P * V, samples = sizes.Q * sizes.P;
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kRecordThreads + threadIdx.x;
  if (pair >= sizes.B * in_image) return;
  const Pack<A, 2> location = locations[pair];
  if (!is_visible(location)) return;
  const int64_t b = pair / in_image;
  const int32_t of_image = static_cast<int32_t>(pair - b * in_image), sample = of_image / V, v = of_image - sample * V;
  for (int l = 0; l < L; ++l) {
    const int m = v * L + l;
    const Map map = table[m];
    if (map.H == 0) continue;
    const A x = pixel_of(location.at[0], map.W), y = pixel_of(location.at[1], map.H);
    const int32_t place = starts[b * sizes.slots + map.first_cell + cell_of(map, x, y)] + ranks[pair * L + l];
    records[(b * V * L + m) * samples + place] = {sample, sample / sizes.P, x - floor(x), y - floor(y)};
  }
}

constexpr int kOrderThreads = 128;
template <typename A>
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const Maps maps, const int32_t* __restrict__ starts, Record<A>* __restrict__ records,
                 Record<A>* __restrict__ ordered, const Sizes sizes) {
  extern __shared__ __align__(16) char shared[];
  __shared__ OrderBitmap bitmaps[kOrderThreads / 32];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int map_count = sizes.V * sizes.L;
  load_maps(maps, map_count, table);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kOrderThreads / 32);
  int64_t cell = static_cast<int64_t>(blockIdx.x) * (kOrderThreads / 32) + threadIdx.x / 32;
  for (int64_t i = sizes.B * map_count - 1; i >= 0; --i) {  // coarse levels first: their cells hold most
    const int64_t b = i / map_count;
    const Map map = table[i - b * map_count];
    const int64_t cells = cells_of(map);
    for (; cell < cells; cell += warps) {
      const int32_t* at = starts + b * sizes.slots + map.first_cell + cell;
      const int64_t offset = i * sizes.Q * sizes.P + at[0];
      order_records(records + offset, ordered + offset, at[1] - at[0], bitmaps[threadIdx.x / 32]);
    }
    cell -= cells;
  }
}

constexpr int kTexelThreads = 256;
constexpr int kTexelWarps = kTexelThreads / 32;
constexpr int kRows = 16;       // rows of a warp
constexpr int kBatch = 4;       // records whose loads are under way at once
constexpr int kSharedRow = 64;  // records from which on the block's warps share a row
constexpr int kShare = 16;      // of which each takes so many at a time

template <typename T, typename TW, typename A, int VEC, int NP>
__global__ void __launch_bounds__(kTexelThreads, 3)
    texel_kernel(const T* __restrict__ grad_output, const TW* __restrict__ weights, const Maps maps,
                 const int32_t* __restrict__ starts, const Record<A>* __restrict__ records,
                 T* __restrict__ grad_features, const Sizes sizes) {
  extern __shared__ __align__(16) char shared[];
  __shared__ A planes[kTexelWarps][NP * VEC][32];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int L = sizes.L, V = sizes.V, G = sizes.G, C = sizes.C, map_count = V * L;
  load_maps(maps, map_count, table);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kBlockRows = kTexelWarps * kRows;
  const int64_t blocks = (sizes.S + kBlockRows - 1) / kBlockRows;
  const int64_t b = blockIdx.x / blocks, samples = sizes.Q * sizes.P;
  // Rows `blocks` apart, so that every block has its share of the coarse levels, whose rows have most records.
  const int64_t block = blockIdx.x - b * blocks;
  const auto row_of = [&](int n) { return n * blocks + block; };
  const int32_t* my_starts = starts + b * sizes.slots;
  const TW* my_weights = weights + b * samples * V * L * G;
  const char* my_output = reinterpret_cast<const char*>(grad_output + b * sizes.Q * C);
  T* my_features = grad_features + b * sizes.S * C;
  const uint32_t row_bytes = C * sizeof(T);

  // Calls f(m, y * (W + 1) + x) for the maps that hold a row: one, or none, unless maps overlap.
  const auto for_each_map = [&](int64_t row, const auto& f) {
    for (int m0 = 0; m0 < map_count; m0 += 32) {
      const Map map = m0 + lane < map_count ? table[m0 + lane] : Map{};
      const bool holds = row >= map.start && row < map.start + static_cast<int64_t>(map.H) * map.W;
      for (unsigned ballot = __ballot_sync(kAll, holds); ballot != 0; ballot &= ballot - 1) {
        const int m = m0 + __ffs(ballot) - 1;
        const uint32_t texel = static_cast<uint32_t>(row - table[m].start), W = table[m].W, y = texel / W;
        f(m, static_cast<int64_t>(y) * (W + 1) + (texel - y * W));
      }
    }
  };
  // Adds to `sum` this warp's share of the gradient of a row that the block's warps share.
  const auto add_share = [&](int64_t row, const Channels(&at)[NP], A(&sum)[NP][VEC]) {
    for_each_map(row, [&](int m, int64_t cell) {
      const Record<A>* my_records = records + (b * map_count + m) * samples;
#pragma unroll 1
      for (int below = 0; below < 2; ++below) {
        const int32_t* run = my_starts + table[m].first_cell + cell + below * (table[m].W + 1);
        const int32_t begin = run[0], middle = run[1], end = run[2];
#pragma unroll 1
        for (int32_t i0 = begin + warp * kShare; i0 < end; i0 += kTexelWarps * kShare) {
          const int32_t i = i0 + lane;
          A corner = 0;
          int32_t query = 0, line = 0;
          if (lane < kShare && i < end) {
            const Record<A> record = my_records[i];
            corner = (below ? 1 - record.fy : record.fy) * (i < middle ? record.fx : 1 - record.fx);
            query = record.query, line = record.sample * (V * L) + m;
          }
          const int here = min(kShare, end - i0);
#pragma unroll 4
          for (int j = 0; j < here; ++j) {
            const A of_corner = __shfl_sync(kAll, corner, j);
            const int32_t q = __shfl_sync(kAll, query, j), w = __shfl_sync(kAll, line, j);
#pragma unroll
            for (int n = 0; n < NP; ++n) {
              A grad[VEC];
              load_pack<T, VEC>(my_output + static_cast<uint64_t>(q) * row_bytes + at[n].c * sizeof(T), grad);
              const A weight = of_corner * to_accumulate(my_weights[static_cast<int64_t>(w) * G + at[n].g]);
#pragma unroll
              for (int v = 0; v < VEC; ++v) sum[n][v] += grad[v] * weight;
            }
          }
        }
      }
    });
  };

  // Lane r holds the runs of records of row r: of the two cells above the texel, then of the two below.
  int32_t begin[2] = {}, middle[2] = {}, above = 0, count = 0, map_of_row = -1;
  bool is_long = false;
  const int64_t row = row_of(warp * kRows + lane);
  if (lane < kRows && row < sizes.S) {
    for (int m = 0; m < map_count; ++m) {
      if (row < table[m].start || row >= table[m].start + static_cast<int64_t>(table[m].H) * table[m].W) continue;
      is_long = map_of_row >= 0;  // maps overlap
      map_of_row = m;
    }
    if (map_of_row >= 0) {
      const Map map = table[map_of_row];
      const uint32_t texel = static_cast<uint32_t>(row - map.start), y = texel / map.W;
      const int32_t* run = my_starts + map.first_cell + static_cast<int64_t>(y) * (map.W + 1) + (texel - y * map.W);
      const int32_t* below = run + map.W + 1;
      begin[0] = run[0], middle[0] = run[1], above = run[2] - run[0];
      begin[1] = below[0], middle[1] = below[1], count = above + below[2] - below[0];
      is_long = is_long || count >= kSharedRow;
    }
  }
  const unsigned long_mask = __ballot_sync(kAll, is_long);
  __shared__ unsigned long_rows[kTexelWarps];
  if (lane == 0) long_rows[warp] = long_mask;
  const bool any_long = __syncthreads_or(is_long);
  if (is_long) count = 0;
  int32_t last = count;  // of the row's records among those of the warp's rows, plus one
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) {
    const int32_t other = __shfl_up_sync(kAll, last, step);
    if (lane >= step) last += other;
  }
  const int32_t total = __shfl_sync(kAll, last, kRows - 1);
  for (int n0 = 0; n0 < sizes.packs; n0 += NP) {
    Channels at[NP];
    A sum[NP][VEC] = {};
#pragma unroll
    for (int n = 0; n < NP; ++n) {
      at[n] = channels_of<VEC>(sizes, lane, n0 + n);  // past the last pack: past the last group
    }
    const auto store = [&](int64_t to) {
#pragma unroll
      for (int n = 0; n < NP; ++n) {
        if (at[n].is_active) store_pack<T, VEC>(my_features + to * C + at[n].c, sum[n]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[n][v] = 0;
      }
    };
    int current = 0;  // the row that `sum` is of
    const auto finish_rows = [&](int until) {
      for (; current < until; ++current) {
        const int64_t to = row_of(warp * kRows + current);
        if (!(long_mask >> current & 1) && to < sizes.S) store(to);
      }
    };
    for (int32_t j0 = 0; j0 < total; j0 += 32) {
      const int32_t j = min(j0 + lane, total - 1);  // lanes beyond the list repeat its last record
      int r = 0;
#pragma unroll
      for (int k = 0; k < kRows - 1; ++k) r += j >= __shfl_sync(kAll, last, k);
      const int32_t of_row = j - (__shfl_sync(kAll, last, r) - __shfl_sync(kAll, count, r));
      const int32_t of_above = __shfl_sync(kAll, above, r), m = __shfl_sync(kAll, map_of_row, r);
      const bool is_below = of_row >= of_above;
      const int32_t begins[2] = {__shfl_sync(kAll, begin[0], r), __shfl_sync(kAll, begin[1], r)};
      const int32_t middles[2] = {__shfl_sync(kAll, middle[0], r), __shfl_sync(kAll, middle[1], r)};
      const int32_t i = is_below ? begins[1] + of_row - of_above : begins[0] + of_row;
      const Record<A> record = records[(b * map_count + m) * samples + i];
      const A corner = (is_below ? 1 - record.fy : record.fy) *
                       (i < (is_below ? middles[1] : middles[0]) ? record.fx : 1 - record.fx);
      const int32_t query = record.query, line = record.sample * (V * L) + m;
      const int here = min(32, total - j0);
      for (int i = 0; i < here; i += kBatch) {
        A grad[kBatch][NP][VEC], weight[kBatch][NP];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const A of_corner = __shfl_sync(kAll, corner, i + u);
          const int32_t q = __shfl_sync(kAll, query, i + u), w = __shfl_sync(kAll, line, i + u);
#pragma unroll
          for (int n = 0; n < NP; ++n) {
            load_pack<T, VEC>(my_output + static_cast<uint64_t>(q) * row_bytes + at[n].c * sizeof(T), grad[u][n]);
            weight[u][n] = of_corner * to_accumulate(my_weights[static_cast<int64_t>(w) * G + at[n].g]);
          }
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (i + u >= here) break;
          finish_rows(__shfl_sync(kAll, r, i + u));
#pragma unroll
          for (int n = 0; n < NP; ++n) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[n][v] += grad[u][n][v] * weight[u][n];
          }
        }
      }
    }
    finish_rows(kRows);
    if (!any_long) continue;
    for (int n = 0; n < kBlockRows; ++n) {
      const int w = n / kRows;
      if (!(long_rows[w] >> (n - w * kRows) & 1)) continue;
      const int64_t shared_row = row_of(n);
#pragma unroll
      for (int i = 0; i < NP; ++i) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[i][v] = 0;
      }
      add_share(shared_row, at, sum);
#pragma unroll
      for (int n = 0; n < NP; ++n) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) planes[warp][n * VEC + v][lane] = sum[n][v];
      }
      __syncthreads();
      if (warp == w) {
#pragma unroll
        for (int n = 0; n < NP; ++n) {
#pragma unroll
          for (int v = 0; v < VEC; ++v) {
            sum[n][v] = 0;
            for (int other = 0; other < kTexelWarps; ++other) sum[n][v] += planes[other][n * VEC + v][lane];
          }
        }
        store(shared_row);
      }
      __syncthreads();  // planes may be written again
    }
  }
}

constexpr const char* kOp = "deformable_aggregation";
constexpr const char* kBackwardOp = "deformable_aggregation_backward";

// Shared memory that kernels declare beside the table of maps: what launch() wants to know of them.
template <typename A>
constexpr int64_t kPairShared = sizeof(int32_t) * (kTile + kTile / 32) + sizeof(BackwardSample<A>) * kThreads;
constexpr int64_t kOrderShared = sizeof(OrderBitmap) * (kOrderThreads / 32);
template <typename A, int VEC, int NP>
constexpr int64_t kTexelShared = sizeof(A) * kTexelWarps * NP * VEC * 32 + sizeof(unsigned) * kTexelWarps;

void check_sizes(const DeformableAggregationProblem& problem) {
  VISDET_CHECK(kOp, problem.S < (1 << 30), "features must have fewer than 2^30 rows S on CUDA, got ", problem.S);
  VISDET_CHECK(kOp, problem.C < (1 << 28), "features must have fewer than 2^28 channels C on CUDA, got ", problem.C);
  const double samples = 1.0 * problem.Q * problem.P * problem.V * problem.L;
  VISDET_CHECK(kOp, samples < (1 << 30), "Q * P * V * L must be under 2^30 on CUDA, got ", problem.Q, " * ", problem.P,
               " * ", problem.V, " * ", problem.L);
  VISDET_CHECK(kOp, 1.0 * problem.L * problem.G < (1 << 21), "L * G must be under 2^21 on CUDA, got ", problem.L, " * ",
               problem.G);
  VISDET_CHECK(kOp, 1.0 * problem.V * problem.L <= 512, "V * L must be at most 512 on CUDA, got ", problem.V, " * ",
               problem.L);
}

// The maps as a kernel argument, and the room they may take. Tables on the device are read there: no synchronisation.
struct Plan {
  Maps maps;
  Tensor scratch;  // what maps.device points to
  int64_t slots;
  int64_t table_bytes;
};

Plan plan_of(const char* op, const DeviceScope& scope, const DeformableAggregationProblem& problem,
             const Tensor& shapes_in, const Tensor& starts_in, const Tensor& features) {
  const Tensor shapes = dense(shapes_in), starts = dense(starts_in);
  const int64_t count = problem.V * problem.L;
  Plan plan{{}, features, 0, static_cast<int64_t>(sizeof(Map)) * count};
  const auto *shape_data = shapes.const_data_ptr<int64_t>(), *start_data = starts.const_data_ptr<int64_t>();
  if (shapes.is_cpu()) {
    check_camera_levels(problem, shape_data, start_data);
    VISDET_CHECK(kOp, count <= kMaxHostMaps, "level_shapes on the CPU may name ", kMaxHostMaps,
                 " maps V * L at the most, got ", count, "; pass the tables on features' device");
    for (int64_t m = 0; m < count; ++m) {
      Map& map = plan.maps.host[m];
      map.start = static_cast<int32_t>(start_data[m]);
      map.H = static_cast<int32_t>(shape_data[2 * m]), map.W = static_cast<int32_t>(shape_data[2 * m + 1]);
      map.first_cell = static_cast<uint32_t>(plan.slots);
      plan.slots += cells_of(map) + 1;
    }
    VISDET_CHECK(kOp, plan.slots <= UINT32_MAX, "level_shapes must hold fewer than 2^32 texels on CUDA, got ",
                 plan.slots, " with their borders");
    return plan;
  }
  plan.slots = 2 * problem.S + 3 * count;  // H * W + H + W + 1 <= 2 * H * W + 2
  plan.scratch = new_empty(features, {plan.table_bytes}, ScalarType::Byte);
  auto* maps = static_cast<Map*>(plan.scratch.mutable_data_ptr());
  launch({op, "plan_kernel", scope, 1, kPlanThreads}, plan_kernel, shape_data, start_data, maps,
         static_cast<int>(count), problem.S, plan.slots);
  plan.maps.device = maps;
  return plan;
}

// Calls f(T{}, TW{}, A{}) for the types of features and weights.
template <typename F>
void dispatch_types(const Tensor& features, const Tensor& weights, const F& f) {
  const bool same = weights.scalar_type() == features.scalar_type();
  dispatch_value_type(features.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (std::is_same_v<T, A>) {
      f(T{}, A{}, A{});
    } else if (same) {
      f(T{}, T{}, A{});
    } else {
      f(T{}, A{}, A{});
    }
  });
}

Sizes sizes_of(const DeformableAggregationProblem& problem, int64_t slots, int64_t vec) {
  Sizes sizes{problem.B, problem.S, problem.Q, slots};
  sizes.C = static_cast<int32_t>(problem.C), sizes.G = static_cast<int32_t>(problem.G);
  sizes.P = static_cast<int32_t>(problem.P), sizes.V = static_cast<int32_t>(problem.V);
  sizes.L = static_cast<int32_t>(problem.L);
  sizes.group = sizes.C / sizes.G;
  const int64_t packs = sizes.group / vec;
  while (sizes.lanes_bits < 5 && (1 << sizes.lanes_bits) < packs) ++sizes.lanes_bits;
  sizes.turns = static_cast<int32_t>(ceil_div(packs, 1 << sizes.lanes_bits));
  sizes.packs = sizes.turns * static_cast<int32_t>(ceil_div(sizes.G, 32 >> sizes.lanes_bits));
  sizes.splits = 1;
  return sizes;
}

// Parts of a query's pairs, of at least 64 each, given the blocks without parts and how many the GPU holds at once: as
// many as make two full turns (one and a part would leave it idle at the end), or, where those would be few and the
// turns not full, four and more.
int32_t splits_of(const DeformableAggregationProblem& problem, int64_t blocks, int64_t at_once) {
  const int64_t most = problem.P * problem.V / 64;
  const int64_t full = 2 * at_once / blocks, splits = full >= 4 ? full : ceil_div(4 * at_once, blocks);
  return static_cast<int32_t>(std::max<int64_t>(1, std::min(most, splits)));
}

// A call whose sizes are all positive, and the tensors that both directions read.
struct Call {
  const DeviceScope& scope;
  const DeformableAggregationProblem& problem;
  const Plan& plan;
  const Tensor &features, &locations, &weights;
};
struct ForwardCall : Call {
  const Tensor& output;
};
struct BackwardCall : Call {
  const Tensor& grad_output;
  bool deterministic;
  const Tensor &grad_features, &grad_locations, &grad_weights;
};

template <typename T>
constexpr int kPackValues = 16 / sizeof(T);

int64_t pack_values(const Tensor& tensor) { return 16 / static_cast<int64_t>(tensor.element_size()); }

const char* packs_decline(const Call& call) {
  if (call.features.scalar_type() == ScalarType::Double) return "the values are float64";
  if (call.problem.C / call.problem.G % pack_values(call.features) != 0) {
    return "the channels of a group are no multiple of 16 bytes";
  }
  return aligned(call.features, 16) ? nullptr : "features do not start at a multiple of 16 bytes";
}

const char* forward_packs_decline(const ForwardCall& call) { return packs_decline(call); }

template <bool PACKS>
void forward_launch(const ForwardCall& call) {
  dispatch_types(call.features, call.weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using TW = decltype(weight_tag);
    using A = decltype(accumulate_tag);
    constexpr int kVec = PACKS ? kPackValues<T> : 1;
    if constexpr (!PACKS || sizeof(T) < 8) {  // packs of float64 are declined
      const auto& [scope, problem, plan, features, locations, weights] = static_cast<const Call&>(call);
      Sizes sizes = sizes_of(problem, plan.slots, kVec);
      const int64_t blocks = problem.B * problem.Q * sizes.packs, count = call.output.numel();
      sizes.splits = splits_of(problem, blocks, kForwardBlocks<A> * scope.device().multiprocessors);
      Tensor partial = call.output;
      if (sizes.splits > 1) partial = new_empty(locations, {sizes.splits, problem.B, problem.Q, problem.C});
      A* sums = sizes.splits > 1 ? static_cast<A*>(partial.mutable_data_ptr()) : nullptr;
      T* output = static_cast<T*>(call.output.mutable_data_ptr());
      launch({kOp, "forward_kernel", scope, blocks * sizes.splits, kThreads}, forward_kernel<T, TW, A, kVec>,
             static_cast<const T*>(features.const_data_ptr()), plan.maps,
             static_cast<const Pack<A, 2>*>(locations.const_data_ptr()),
             static_cast<const TW*>(weights.const_data_ptr()), output, sums, sizes);
      if (sizes.splits == 1) return;
      launch({kOp, "sum_splits_kernel", scope, std::min<int64_t>(ceil_div(count, kSumThreads), 1 << 20), kSumThreads},
             sum_splits_kernel<T, A>, sums, output, count, sizes.splits);
    }
  });
}

constexpr Path<ForwardCall> kForwardPaths[] = {
    {"packs", forward_packs_decline, forward_launch<true>},
    {"single_values", nullptr, forward_launch<false>},
};

const char* backward_packs_decline(const BackwardCall& call) {
  if (const char* reason = packs_decline(call)) return reason;
  return aligned(call.grad_output, 16) ? nullptr : "grad_output does not start at a multiple of 16 bytes";
}

const char* held_packs_decline(const BackwardCall& call) {
  if (const char* reason = backward_packs_decline(call)) return reason;
  const Sizes sizes = sizes_of(call.problem, 0, pack_values(call.features));
  return sizes.turns == 1 && sizes.packs <= 2 ? nullptr : "a lane would hold more than two packs of grad_output";
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

// Turns the counts of cells into starts, in place, and returns the records of all cells.
template <typename A>
Tensor place_records(const BackwardCall& call, const Sizes& sizes, const Tensor& counts, const Tensor& ranks) {
  const auto& [scope, problem, plan, features, locations, weights] = static_cast<const Call&>(call);
  const int64_t map_count = problem.V * problem.L, pairs = problem.B * problem.Q * problem.P * problem.V;
  const std::initializer_list<int64_t> bytes{pairs * problem.L * static_cast<int64_t>(sizeof(Record<A>))};
  const Tensor records = new_empty(features, bytes, ScalarType::Byte);
  auto* starts = static_cast<int32_t*>(counts.mutable_data_ptr());
  auto* unordered = static_cast<Record<A>*>(records.mutable_data_ptr());
  launch({kBackwardOp, "scan_kernel", scope, problem.B * map_count, kScanThreads}, scan_kernel, plan.maps, starts,
         static_cast<int>(map_count), plan.slots);
  launch({kBackwardOp, "record_kernel", scope, ceil_div(pairs, kRecordThreads), kRecordThreads, plan.table_bytes},
         record_kernel<A>, plan.maps, static_cast<const Pack<A, 2>*>(locations.const_data_ptr()), starts,
         static_cast<const int32_t*>(ranks.const_data_ptr()), unordered, sizes);
  if (!call.deterministic) return records;
  const Tensor ordered = new_empty(features, bytes, ScalarType::Byte);
  const int64_t blocks =
      std::min(ceil_div(problem.B * plan.slots, kOrderThreads / 32 * 4), 64 * scope.device().multiprocessors);
  launch({kBackwardOp, "order_kernel", scope, blocks, kOrderThreads, plan.table_bytes, kOrderShared}, order_kernel<A>,
         plan.maps, starts, unordered, static_cast<Record<A>*>(ordered.mutable_data_ptr()), sizes);
  return ordered;
}

// The gradient of features.
template <typename T, typename TW, typename A, int VEC, int NP>
void launch_texels(const BackwardCall& call, const Sizes& sizes, const Tensor& starts, const Tensor& records) {
  const int64_t blocks = sizes.B * ceil_div(sizes.S, kTexelWarps * kRows);
  launch(
      {kBackwardOp, "texel_kernel", call.scope, blocks, kTexelThreads, call.plan.table_bytes, kTexelShared<A, VEC, NP>},
      texel_kernel<T, TW, A, VEC, NP>, static_cast<const T*>(call.grad_output.const_data_ptr()),
      static_cast<const TW*>(call.weights.const_data_ptr()), call.plan.maps,
      static_cast<const int32_t*>(starts.const_data_ptr()), static_cast<const Record<A>*>(records.const_data_ptr()),
      static_cast<T*>(call.grad_features.mutable_data_ptr()), sizes);
}

template <bool PACKS, bool HOLD>
void backward_launch(const BackwardCall& call) {
  dispatch_types(call.features, call.weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using TW = decltype(weight_tag);
    using A = decltype(accumulate_tag);
    constexpr int kVec = PACKS ? kPackValues<T> : 1;
    if constexpr (!PACKS || sizeof(T) < 8) {  // packs of float64 are declined
      const auto& problem = call.problem;
      Sizes sizes = sizes_of(problem, call.plan.slots, kVec);
      sizes.splits = splits_of(problem, problem.B * problem.Q, 8 * call.scope.device().multiprocessors);
      const Tensor starts = new_zeros(call.features, {problem.B * sizes.slots}, ScalarType::Int);
      const Tensor ranks = new_empty(call.features, {call.locations.numel() / 2 * problem.L}, ScalarType::Int);
      if constexpr (HOLD) {
        if (sizes.packs == 1) launch_pairs<T, TW, A, kVec, 1, true>(call, sizes, starts, ranks);
        if (sizes.packs == 2) launch_pairs<T, TW, A, kVec, 2, true>(call, sizes, starts, ranks);
      } else {
        launch_pairs<T, TW, A, kVec, 1, false>(call, sizes, starts, ranks);
      }
      const Tensor records = place_records<A>(call, sizes, starts, ranks);
      if constexpr (PACKS) {
        if (sizes.packs == 1) return launch_texels<T, TW, A, kVec, 1>(call, sizes, starts, records);
      }
      launch_texels<T, TW, A, kVec, 2>(call, sizes, starts, records);
    }
  });
}

constexpr Path<BackwardCall> kBackwardPaths[] = {
    {"held_packs", held_packs_decline, backward_launch<true, true>},
    {"packs", backward_packs_decline, backward_launch<true, false>},
    {"single_values", nullptr, backward_launch<false, false>},
};

}  // namespace

Tensor deformable_aggregation_cuda(const Tensor& features_in, const Tensor& level_shapes, const Tensor& level_starts,
                                   const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_deformable_aggregation(features_in, level_shapes, level_starts, locations_in, weights_in);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor features = dense(features_in), locations = contiguous_pairs(locations_in), weights = dense(weights_in);
  const Plan plan = plan_of(kOp, scope, problem, level_shapes, level_starts, features);
  Tensor output = new_empty(features, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0 || weights.numel() == 0) return zero_(output);
  run_first(kOp, kForwardPaths, ForwardCall{{scope, problem, plan, features, locations, weights}, output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor> deformable_aggregation_backward_cuda(
    const Tensor& grad_output_in, const Tensor& features_in, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& locations_in, const Tensor& weights_in, bool deterministic) {
  const auto problem = check_deformable_aggregation(features_in, level_shapes, level_starts, locations_in, weights_in);
  check_deformable_aggregation_grad(problem, grad_output_in, features_in);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in),
               locations = contiguous_pairs(locations_in), weights = dense(weights_in);
  const Plan plan = plan_of(kBackwardOp, scope, problem, level_shapes, level_starts, features);
  Tensor grad_features = new_empty(features, features.sizes()),
         grad_locations = new_empty(locations, locations.sizes()), grad_weights = new_empty(weights, weights.sizes());
  if (problem.S == 0 || problem.C == 0 || weights.numel() == 0 || grad_output.numel() == 0) {
    zero_(grad_features), zero_(grad_locations), zero_(grad_weights);
    return {grad_features, grad_locations, grad_weights};
  }
  run_first(kBackwardOp, kBackwardPaths,
            BackwardCall{{scope, problem, plan, features, locations, weights},
                         grad_output,
                         deterministic,
                         grad_features,
                         grad_locations,
                         grad_weights});
  return {grad_features, grad_locations, grad_weights};
}

}  // namespace visdet

VISDET_CUDA_OPERATORS(m) {
  m.impl("deformable_aggregation", TORCH_BOX(&visdet::deformable_aggregation_cuda));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&visdet::deformable_aggregation_backward_cuda));
}

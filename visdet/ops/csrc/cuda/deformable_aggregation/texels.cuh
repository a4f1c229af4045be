// Backward, the last kernel: the gradient of features. The gradient of a texel is the sum over the samples in the four
// cells around it; each of them adds a row of grad_output, which the caches hold. A warp owns kRows rows of features
// and walks the records of all of them as one list, so that the loads of one row do not wait for those of the row
// before. A row with many records (a long row) is summed by all warps of its block instead. Every row of grad_features
// is thus written once, in its own type. There are no floating-point atomics, grad_features need not be zero before,
// and there is no copy of it in float32.
#pragma once

#include "common/warp.cuh"
#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/records.cuh"

namespace visdet::deformable_aggregation {
namespace {

constexpr int kTexelThreads = 256;
constexpr int kTexelWarps = kTexelThreads / 32;
constexpr int kRows = 16;                        // of a warp
constexpr int kBlockRows = kTexelWarps * kRows;  // of a block
constexpr int kBatch = 4;                        // records whose loads are under way at once
constexpr int kLongRow = 64;                     // records from which on a row is a long one
constexpr int kChunk = 16;                       // records of a long row that a warp adds at a time

// The rows of one image that a block owns: row(n) for n < kBlockRows. They are `blocks` apart, so that every block has
// some of the coarse levels, whose rows have most records.
struct BlockRows {
  int64_t b, block, blocks;
  __device__ __forceinline__ explicit BlockRows(const Sizes& sizes) {
    blocks = (sizes.S + kBlockRows - 1) / kBlockRows;
    b = blockIdx.x / blocks, block = blockIdx.x - b * blocks;
  }
  __device__ __forceinline__ int64_t row(int n) const { return n * blocks + block; }
};

// The records that read one texel, which is a row of features. They stand in two runs: one for the two cells above the
// texel, and one for the two cells below. In a run, the records [begin, middle) belong to the left one of the two
// cells, and the records from `middle` on to the right one.
struct RowRuns {
  int32_t begin[2] = {}, middle[2] = {}, above = 0, count = 0;  // above: records of the first run; count: of both
  int32_t map = -1;
  bool is_long = false;  // has many records, or lies in several maps, which overlap
};

// The first entry in the table of cells of the two cells above texel `texel` of a map; below them lie those W + 1 on.
__device__ __forceinline__ int64_t cell_above(const Map& map, uint32_t texel) {
  const uint32_t y = texel / map.W;
  return static_cast<int64_t>(y) * (map.W + 1) + (texel - y * map.W);
}

__device__ __forceinline__ RowRuns runs_of_row(int64_t row, const Map* table, int map_count, const int32_t* starts) {
  RowRuns runs;
  for (int m = 0; m < map_count; ++m) {
    if (row < table[m].start || row >= table[m].start + static_cast<int64_t>(table[m].H) * table[m].W) continue;
    runs.is_long = runs.map >= 0;
    runs.map = m;
  }
  if (runs.map < 0) return runs;
  const Map map = table[runs.map];
  const int32_t* run = starts + map.first_cell + cell_above(map, static_cast<uint32_t>(row - map.start));
  const int32_t* below = run + map.W + 1;
  runs.begin[0] = run[0], runs.middle[0] = run[1], runs.above = run[2] - run[0];
  runs.begin[1] = below[0], runs.middle[1] = below[1], runs.count = runs.above + below[2] - below[0];
  runs.is_long = runs.is_long || runs.count >= kLongRow;
  return runs;
}

// The weight of a texel in a sample. The sample's cell lies above or below the texel, and to its left or right.
template <typename A>
__device__ __forceinline__ A texel_weight(const Record<A>& record, bool is_below, bool is_left) {
  return (is_below ? 1 - record.fy : record.fy) * (is_left ? record.fx : 1 - record.fx);
}

// One image of a call, as a warp reads it.
template <typename TW, typename A>
struct TexelImage {
  const Map* table;  // [V * L]
  int32_t map_count;
  const int32_t* starts;     // of cells
  const Record<A>* records;  // [V * L, samples]
  int64_t samples;
  const TW* weights;  // [Q * P, V * L, G]
  const char* grad_output;
  uint32_t row_bytes;  // of grad_output
  int32_t G;
};

// An entry of a warp's list of records: the number of its row among the warp's, and what it adds to this row.
template <typename A>
struct ListEntry {
  int row;
  A corner;  // the weight of the texel in the sample
  int32_t query, weight_row;
};

// Called by all lanes of a warp: reads entry j of the list. runs: of the warp's row that the lane has; last: the end of
// this row's records in the list.
template <typename TW, typename A>
__device__ __forceinline__ ListEntry<A> read_entry(const TexelImage<TW, A>& image, const RowRuns& runs, int32_t last,
                                                   int32_t j) {
  int r = 0;
#pragma unroll
  for (int k = 0; k < kRows - 1; ++k) r += j >= __shfl_sync(kAllLanes, last, k);
  const int32_t of_row = j - (__shfl_sync(kAllLanes, last, r) - __shfl_sync(kAllLanes, runs.count, r));
  const int32_t of_above = __shfl_sync(kAllLanes, runs.above, r), m = __shfl_sync(kAllLanes, runs.map, r);
  const bool is_below = of_row >= of_above;
  const int32_t begins[2] = {__shfl_sync(kAllLanes, runs.begin[0], r), __shfl_sync(kAllLanes, runs.begin[1], r)};
  const int32_t middles[2] = {__shfl_sync(kAllLanes, runs.middle[0], r), __shfl_sync(kAllLanes, runs.middle[1], r)};
  const int32_t i = is_below ? begins[1] + of_row - of_above : begins[0] + of_row;
  const Record<A> record = image.records[m * image.samples + i];
  const A corner = texel_weight(record, is_below, i < (is_below ? middles[1] : middles[0]));
  return {r, corner, record.query, record.sample * image.map_count + m};
}

// Called by all lanes of a warp: calls f(m, the first of the cells above the texel) for the maps that hold a row of
// features. These are one or none, unless maps overlap.
template <typename F>
__device__ __forceinline__ void for_maps_of_row(int64_t row, const Map* table, int map_count, const F& f) {
  const int lane = threadIdx.x % 32;
  for (int m0 = 0; m0 < map_count; m0 += 32) {
    const Map map = m0 + lane < map_count ? table[m0 + lane] : Map{};
    const bool holds = row >= map.start && row < map.start + static_cast<int64_t>(map.H) * map.W;
    for (unsigned ballot = __ballot_sync(kAllLanes, holds); ballot != 0; ballot &= ballot - 1) {
      const int m = m0 + __ffs(ballot) - 1;
      f(m, cell_above(table[m], static_cast<uint32_t>(row - table[m].start)));
    }
  }
}

// Called by all lanes of a warp: adds to `sum` what this warp of the block has to add to the gradient of a long row.
template <typename T, int VEC, int NP, typename TW, typename A>
__device__ __forceinline__ void add_long_row(const TexelImage<TW, A>& image, int64_t row, const Channels (&at)[NP],
                                             A (&sum)[NP][VEC]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for_maps_of_row(row, image.table, image.map_count, [&](int m, int64_t cell) {
    const Map& map = image.table[m];
    const Record<A>* records = image.records + m * image.samples;
#pragma unroll 1
    for (int below = 0; below < 2; ++below) {
      const int32_t* run = image.starts + map.first_cell + cell + below * (map.W + 1);
      const int32_t begin = run[0], middle = run[1], end = run[2];
#pragma unroll 1
      for (int32_t i0 = begin + warp * kChunk; i0 < end; i0 += kTexelWarps * kChunk) {
        const int32_t i = i0 + lane;
        A corner = 0;
        int32_t query = 0, weight_row = 0;
        if (lane < kChunk && i < end) {
          const Record<A> record = records[i];
          corner = texel_weight(record, below, i < middle);
          query = record.query, weight_row = record.sample * image.map_count + m;
        }
        const int here = min(kChunk, end - i0);
#pragma unroll 4
        for (int j = 0; j < here; ++j) {
          const A of_corner = __shfl_sync(kAllLanes, corner, j);
          const int32_t q = __shfl_sync(kAllLanes, query, j), w = __shfl_sync(kAllLanes, weight_row, j);
#pragma unroll
          for (int n = 0; n < NP; ++n) {
            A grad[VEC];
            load_pack<T, VEC>(image.grad_output + static_cast<uint64_t>(q) * image.row_bytes + at[n].c * sizeof(T),
                              grad);
            const A weight = of_corner * to_accumulate(image.weights[static_cast<int64_t>(w) * image.G + at[n].g]);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[n][v] += grad[v] * weight;
          }
        }
      }
    }
  });
}

// Called by all threads of a block: makes `sum` of the warp that is the row's owner the gradient of a long row.
template <typename T, int VEC, int NP, typename TW, typename A>
__device__ __forceinline__ void sum_long_row(const TexelImage<TW, A>& image, int64_t row, const Channels (&at)[NP],
                                             A (&warp_sums)[kTexelWarps][NP * VEC][32], bool is_owner,
                                             A (&sum)[NP][VEC]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < NP; ++i) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[i][v] = 0;
  }
  add_long_row<T>(image, row, at, sum);
#pragma unroll
  for (int i = 0; i < NP; ++i) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) warp_sums[warp][i * VEC + v][lane] = sum[i][v];
  }
  __syncthreads();  // the sums of all warps are complete
  if (!is_owner) return;
#pragma unroll
  for (int i = 0; i < NP; ++i) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      sum[i][v] = 0;
      for (int other = 0; other < kTexelWarps; ++other) sum[i][v] += warp_sums[other][i * VEC + v][lane];
    }
  }
}

template <typename T, typename TW, typename A, bool PACKS>
__global__ void __launch_bounds__(kTexelThreads, 3)
    texel_kernel(const T* __restrict__ grad_output, const TW* __restrict__ weights, const Maps maps,
                 const int32_t* __restrict__ starts, const Record<A>* __restrict__ records,
                 T* __restrict__ grad_features, const Sizes sizes) {
  constexpr int VEC = kPackValues<T, PACKS>, NP = PACKS ? kHeldPacks<T> : 2;
  extern __shared__ __align__(16) char shared[];
  __shared__ A warp_sums[kTexelWarps][NP * VEC][32];
  __shared__ unsigned long_rows[kTexelWarps];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int C = sizes.C, map_count = sizes.V * sizes.L;
  load_maps(maps, map_count, table);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const BlockRows rows(sizes);
  const int64_t b = rows.b, samples = sizes.Q * sizes.P;
  const TexelImage<TW, A> image{table,
                                map_count,
                                starts + b * sizes.cell_entries,
                                records + b * map_count * samples,
                                samples,
                                weights + b * samples * map_count * sizes.G,
                                reinterpret_cast<const char*>(grad_output + b * sizes.Q * C),
                                static_cast<uint32_t>(C * sizeof(T)),
                                sizes.G};
  T* my_features = grad_features + b * sizes.S * C;

  // Lane r < kRows holds the runs of the warp's row r.
  RowRuns runs;
  const int64_t row = rows.row(warp * kRows + lane);
  if (lane < kRows && row < sizes.S) runs = runs_of_row(row, table, map_count, image.starts);
  const unsigned long_mask = __ballot_sync(kAllLanes, runs.is_long);
  if (lane == 0) long_rows[warp] = long_mask;
  const bool any_long = __syncthreads_or(runs.is_long);
  if (runs.is_long) runs.count = 0;
  const int32_t last = inclusive_sum_lanes(runs.count, kRows);  // end of the row's records in the warp's list
  const int32_t total = __shfl_sync(kAllLanes, last, kRows - 1);
  for (int n0 = 0; n0 < sizes.warp_packs; n0 += NP) {
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
        const int64_t to = rows.row(warp * kRows + current);
        if (!(long_mask >> current & 1) && to < sizes.S) store(to);
      }
    };
    for (int32_t j0 = 0; j0 < total; j0 += 32) {
      // Each lane reads one record of the list; lanes beyond its end repeat the last one.
      const ListEntry<A> entry = read_entry(image, runs, last, min(j0 + lane, total - 1));
      const int here = min(32, total - j0);
      for (int i = 0; i < here; i += kBatch) {
        A grad[kBatch][NP][VEC], weight[kBatch][NP];
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          const A of_corner = __shfl_sync(kAllLanes, entry.corner, i + u);
          const int32_t q = __shfl_sync(kAllLanes, entry.query, i + u);
          const int32_t w = __shfl_sync(kAllLanes, entry.weight_row, i + u);
#pragma unroll
          for (int n = 0; n < NP; ++n) {
            load_pack<T, VEC>(image.grad_output + static_cast<uint64_t>(q) * image.row_bytes + at[n].c * sizeof(T),
                              grad[u][n]);
            weight[u][n] = of_corner * to_accumulate(image.weights[static_cast<int64_t>(w) * image.G + at[n].g]);
          }
        }
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (i + u >= here) break;
          finish_rows(__shfl_sync(kAllLanes, entry.row, i + u));
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
      sum_long_row<T>(image, rows.row(n), at, warp_sums, warp == w, sum);
      if (warp == w) store(rows.row(n));
      __syncthreads();  // warp_sums may be written again
    }
  }
}

// Shared memory that the kernel declares beside the table of maps.
template <typename T, typename A, bool PACKS>
constexpr int64_t kTexelShared =
    sizeof(A) * kTexelWarps * (PACKS ? kHeldPacks<T> : 2) * kPackValues<T, PACKS> * 32 + sizeof(unsigned) * kTexelWarps;

// Writes the gradient of features.
template <typename T, typename TW, typename A, bool PACKS>
void launch_texels(const BackwardCall& call, const Sizes& sizes, const Tensor& starts, const Tensor& records) {
  const int64_t blocks = sizes.B * ceil_div(sizes.S, kBlockRows);
  launch({kBackwardOp, "texel_kernel", call.scope, blocks, kTexelThreads, call.maps.table_bytes,
          kTexelShared<T, A, PACKS>},
         texel_kernel<T, TW, A, PACKS>, data_of<T>(call.grad_output), data_of<TW>(call.weights), call.maps.maps,
         data_of<int32_t>(starts), data_of<Record<A>>(records), mutable_data_of<T>(call.grad_features), sizes);
}

}  // namespace
}  // namespace visdet::deformable_aggregation

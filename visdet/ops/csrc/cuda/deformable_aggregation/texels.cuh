// Backward, the last kernel: the gradient of features.
#pragma once

#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/records.cuh"

namespace visdet::deformable_aggregation {
namespace {

constexpr int kTexelThreads = 256;
constexpr int kTexelWarps = kTexelThreads / 32;
constexpr int kRows = 16;     // rows of a warp
constexpr int kBatch = 4;     // records whose loads are under way at once
constexpr int kLongRow = 64;  // records from which on the block's warps share a row
constexpr int kChunk = 16;    // of which each takes so many at a time

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
  const int32_t* my_starts = starts + b * sizes.cell_entries;
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
  const auto add_long_row = [&](int64_t row, const Channels(&at)[NP], A(&sum)[NP][VEC]) {
    for_each_map(row, [&](int m, int64_t cell) {
      const Record<A>* my_records = records + (b * map_count + m) * samples;
#pragma unroll 1
      for (int below = 0; below < 2; ++below) {
        const int32_t* run = my_starts + table[m].first_cell + cell + below * (table[m].W + 1);
        const int32_t begin = run[0], middle = run[1], end = run[2];
#pragma unroll 1
        for (int32_t i0 = begin + warp * kChunk; i0 < end; i0 += kTexelWarps * kChunk) {
          const int32_t i = i0 + lane;
          A corner = 0;
          int32_t query = 0, line = 0;
          if (lane < kChunk && i < end) {
            const Record<A> record = my_records[i];
            corner = (below ? 1 - record.fy : record.fy) * (i < middle ? record.fx : 1 - record.fx);
            query = record.query, line = record.sample * (V * L) + m;
          }
          const int here = min(kChunk, end - i0);
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
      is_long = is_long || count >= kLongRow;
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
      const int64_t long_row = row_of(n);
#pragma unroll
      for (int i = 0; i < NP; ++i) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[i][v] = 0;
      }
      add_long_row(long_row, at, sum);
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
        store(long_row);
      }
      __syncthreads();  // planes may be written again
    }
  }
}

template <typename A, int VEC, int NP>
constexpr int64_t kTexelShared = sizeof(A) * kTexelWarps * NP * VEC * 32 + sizeof(unsigned) * kTexelWarps;

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

}  // namespace
}  // namespace visdet::deformable_aggregation

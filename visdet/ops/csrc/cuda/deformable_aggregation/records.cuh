// Backward, the second step: the samples of an image in the order of their cells. scan_kernel turns the counts of cells
// into starts, and record_kernel writes the record of each sample behind the start of its cell, at its rank. Only the
// ranks differ from run to run: in deterministic mode order_kernel sorts the records of each cell.
//
// Scratch memory: 20 bytes a sample of any pair, visible or not (36 with order_kernel), and 4 bytes a cell.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "common/cells.cuh"
#include "common/launch.h"
#include "cuda/deformable_aggregation/call.cuh"
#include "cuda/deformable_aggregation/visible.cuh"

namespace visdet::deformable_aggregation {
namespace {

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query * P + point
  int32_t query;
  A fx, fy;
};

constexpr int kScanThreads = 1024;

// A block turns the counts of one map of one image into starts, in place, followed by their end.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const Maps maps, int32_t* __restrict__ counts, int map_count, int64_t cell_entries) {
  const int64_t b = blockIdx.x / map_count;
  const Map map = map_of(maps, blockIdx.x - static_cast<int>(b) * map_count);
  if (map.H == 0) return;
  const int64_t cells = cells_of(map);
  int32_t* map_counts = counts + b * cell_entries + map.first_cell;
  const int32_t total = scan_counts<kScanThreads>(map_counts, map_counts, 0, cells, 0);
  if (threadIdx.x == 0) map_counts[cells] = total;
}

constexpr int kRecordThreads = 256;

// A thread owns a (query, point, camera) pair and writes the records of its samples.
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
    const int32_t start = starts[b * sizes.cell_entries + map.first_cell + cell_of(x, y, map.W)];
    records[(b * V * L + m) * samples + start + ranks[pair * L + l]] = {sample, sample / sizes.P, x - floor(x),
                                                                        y - floor(y)};
  }
}

constexpr int kOrderThreads = 128;

// A warp sorts the records of 32 cells after another, in a time in proportion to their number.
template <typename A>
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const Maps maps, const int32_t* __restrict__ starts, Record<A>* __restrict__ records,
                 Record<A>* __restrict__ ordered, const Sizes sizes) {
  extern __shared__ __align__(16) char shared[];
  __shared__ OrderBitmap bitmaps[kOrderThreads / 32];
  auto* table = reinterpret_cast<Map*>(shared);  // [V * L]
  const int map_count = sizes.V * sizes.L;
  load_maps(maps, map_count, table);
  const int lane = threadIdx.x % 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kOrderThreads / 32);
  int64_t group = static_cast<int64_t>(blockIdx.x) * (kOrderThreads / 32) + threadIdx.x / 32;  // of cells
  for (int64_t i = sizes.B * map_count - 1; i >= 0; --i) {  // coarse levels first: their cells hold most
    const int64_t b = i / map_count;
    const Map map = table[i - b * map_count];
    const int64_t cells = cells_of(map), groups = (cells + 31) / 32;
    for (; group < groups; group += warps) {
      // Neighbouring cells, which may all have many records, belong to different warps.
      const int64_t cell = lane * groups + group;
      const int32_t* at = starts + b * sizes.cell_entries + map.first_cell + min(cell, cells - 1);
      const int32_t count = cell < cells ? at[1] - at[0] : 0;
      order_records_of_cells(records, ordered, i * sizes.Q * sizes.P + at[0], count, bitmaps[threadIdx.x / 32]);
    }
    group -= groups;
  }
}

// Shared memory that order_kernel declares beside the table of maps.
constexpr int64_t kOrderShared = sizeof(OrderBitmap) * (kOrderThreads / 32);

// Turns the counts of cells into starts, in place, and returns the records of all cells.
template <typename A>
Tensor write_records(const BackwardCall& call, const Sizes& sizes, const Tensor& counts, const Tensor& ranks) {
  const auto& [scope, problem, maps, features, locations, weights] = static_cast<const Call&>(call);
  const int64_t map_count = problem.V * problem.L, pairs = problem.B * problem.Q * problem.P * problem.V;
  const std::initializer_list<int64_t> bytes{pairs * problem.L * static_cast<int64_t>(sizeof(Record<A>))};
  const Tensor records = new_empty(features, bytes, ScalarType::Byte);
  auto* starts = mutable_data_of<int32_t>(counts);
  auto* unordered = mutable_data_of<Record<A>>(records);
  launch({kBackwardOp, "scan_kernel", scope, problem.B * map_count, kScanThreads}, scan_kernel, maps.maps, starts,
         static_cast<int>(map_count), maps.cell_entries);
  launch({kBackwardOp, "record_kernel", scope, ceil_div(pairs, kRecordThreads), kRecordThreads, maps.table_bytes},
         record_kernel<A>, maps.maps, data_of<Pack<A, 2>>(locations), starts, data_of<int32_t>(ranks), unordered,
         sizes);
  if (!call.deterministic) return records;
  const Tensor ordered = new_empty(features, bytes, ScalarType::Byte);
  const int64_t blocks =
      std::min(ceil_div(problem.B * maps.cell_entries, kOrderThreads), 64 * scope.device().multiprocessors);
  launch({kBackwardOp, "order_kernel", scope, blocks, kOrderThreads, maps.table_bytes, kOrderShared}, order_kernel<A>,
         maps.maps, starts, unordered, mutable_data_of<Record<A>>(ordered), sizes);
  return ordered;
}

}  // namespace
}  // namespace visdet::deformable_aggregation

// Backward, the second step: the samples in the order of their cells.
#pragma once

#include <initializer_list>

#include "common/block_scan.cuh"
#include "common/order_records.cuh"
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

// counts -> starts, in place: one block a (batch, map).
constexpr int kScanThreads = 1024;
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const Maps maps, int32_t* __restrict__ counts, int map_count, int64_t cell_entries) {
  const int64_t b = blockIdx.x / map_count;
  const Map map = map_of(maps, blockIdx.x - static_cast<int>(b) * map_count);
  if (map.H == 0) return;
  const int64_t cells = cells_of(map);
  int32_t* mine = counts + b * cell_entries + map.first_cell;
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
    const int32_t place = starts[b * sizes.cell_entries + map.first_cell + cell_of(map, x, y)] + ranks[pair * L + l];
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
      const int32_t* at = starts + b * sizes.cell_entries + map.first_cell + cell;
      const int64_t offset = i * sizes.Q * sizes.P + at[0];
      order_records(records + offset, ordered + offset, at[1] - at[0], bitmaps[threadIdx.x / 32]);
    }
    cell -= cells;
  }
}

constexpr int64_t kOrderShared = sizeof(OrderBitmap) * (kOrderThreads / 32);

// Turns the counts of cells into starts, in place, and returns the records of all cells.
template <typename A>
Tensor write_records(const BackwardCall& call, const Sizes& sizes, const Tensor& counts, const Tensor& ranks) {
  const auto& [scope, problem, plan, features, locations, weights] = static_cast<const Call&>(call);
  const int64_t map_count = problem.V * problem.L, pairs = problem.B * problem.Q * problem.P * problem.V;
  const std::initializer_list<int64_t> bytes{pairs * problem.L * static_cast<int64_t>(sizeof(Record<A>))};
  const Tensor records = new_empty(features, bytes, ScalarType::Byte);
  auto* starts = static_cast<int32_t*>(counts.mutable_data_ptr());
  auto* unordered = static_cast<Record<A>*>(records.mutable_data_ptr());
  launch({kBackwardOp, "scan_kernel", scope, problem.B * map_count, kScanThreads}, scan_kernel, plan.maps, starts,
         static_cast<int>(map_count), plan.cell_entries);
  launch({kBackwardOp, "record_kernel", scope, ceil_div(pairs, kRecordThreads), kRecordThreads, plan.table_bytes},
         record_kernel<A>, plan.maps, static_cast<const Pack<A, 2>*>(locations.const_data_ptr()), starts,
         static_cast<const int32_t*>(ranks.const_data_ptr()), unordered, sizes);
  if (!call.deterministic) return records;
  const Tensor ordered = new_empty(features, bytes, ScalarType::Byte);
  const int64_t blocks =
      std::min(ceil_div(problem.B * plan.cell_entries, kOrderThreads / 32 * 4), 64 * scope.device().multiprocessors);
  launch({kBackwardOp, "order_kernel", scope, blocks, kOrderThreads, plan.table_bytes, kOrderShared}, order_kernel<A>,
         plan.maps, starts, unordered, static_cast<Record<A>*>(ordered.mutable_data_ptr()), sizes);
  return ordered;
}

}  // namespace
}  // namespace visdet::deformable_aggregation

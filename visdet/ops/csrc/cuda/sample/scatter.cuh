// The scatter pass of sample_sum and sample_dot, written as a gather: the gradient of images.
//
// The samples are ordered by cell (common/cells.cuh): the dots pass has counted them, scan_kernel turns the counts into
// starts, and record_kernel writes a record of each sample behind the start of its cell. In tile_kernel a warp owns 32
// channels of a tile of kTileHeight x kTileWidth pixels, a lane a channel, and adds the samples of the cells in and
// around the tile to sums in shared memory, which no other lane touches. So there are no floating-point atomics and no
// zero-fill: grad_images is written once, in its own type and layout. A tile has the cells of one row and one column
// more than it has pixels. Only the ranks within a cell differ between runs: order_kernel sorts them where that is not
// wanted.
#pragma once

#include "cuda/sample/dot.cuh"

namespace visdet::sample {
namespace {

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query * D + d
  int32_t column;  // of the cell
  A fx, fy;
};

// Writes to starts, for each cell, the number of records in the earlier cells of its image. A block owns a piece of an
// image's cells. It first adds up the counts of all pieces before its own, which is little work since pieces are few.
constexpr int kScanThreads = 1024;
constexpr int kMaxPieces = 16;

__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const int32_t* __restrict__ counts, int32_t* __restrict__ starts, int64_t cells, int64_t piece) {
  counts += blockIdx.y * cells, starts += blockIdx.y * cells;
  const int64_t begin = blockIdx.x * piece, end = min(begin + piece, cells);
  int32_t before = 0, carry;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < begin; i += kScanThreads) before += counts[i];
  exclusive_sum_block<kScanThreads>(before, carry);
  scan_counts<kScanThreads>(counts, starts, begin, end, carry);
}

// A thread writes the record of a sample.
constexpr int kRecordThreads = 256;

template <typename A>
__global__ void __launch_bounds__(kRecordThreads)
    record_kernel(const Pack<A, 2>* __restrict__ samples, const int32_t* __restrict__ starts,
                  const int32_t* __restrict__ ranks, Record<A>* __restrict__ records, const Sizes sizes) {
  const int64_t in_image = sizes.Q * sizes.D, i = static_cast<int64_t>(blockIdx.x) * kRecordThreads + threadIdx.x;
  if (i >= sizes.B * in_image || ranks[i] < 0) return;
  A x, y;
  Bilinear<A> at;
  locate_sample(samples[i], sizes, x, y, at);
  const int64_t b = i / in_image;
  const int32_t position = starts[b * sizes.cells + cell_of(x, y, sizes.W)] + ranks[i];
  records[b * in_image + position] = {static_cast<int32_t>(i - b * in_image), static_cast<int32_t>(floor(x)) + 1, at.fx,
                                      at.fy};
}

// A warp orders the records of 32 cells after another.
constexpr int kOrderThreads = 128;
constexpr int kOrderWarps = kOrderThreads / 32;

template <typename A>
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const int32_t* __restrict__ starts, Record<A>* __restrict__ records,  // records: scratch afterwards
                 Record<A>* __restrict__ ordered, const Sizes sizes) {
  __shared__ OrderBitmap bitmaps[kOrderWarps];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kOrderWarps, cells = sizes.B * sizes.cells;
  const int64_t groups = (cells + 31) / 32;
  for (int64_t group = static_cast<int64_t>(blockIdx.x) * kOrderWarps + threadIdx.x / 32; group < groups;
       group += warps) {
    // Neighbouring cells, which may all have many records, belong to different warps.
    const int64_t i = (threadIdx.x % 32) * groups + group, b = i / sizes.cells;
    const bool is_cell = i < cells && i - b * sizes.cells < sizes.cells - 1;  // not the end of the last cell
    const int32_t start = is_cell ? starts[i] : 0, count = is_cell ? starts[i + 1] - start : 0;
    order_records_of_cells(records, ordered, b * sizes.Q * sizes.D + start, count, bitmaps[threadIdx.x / 32]);
  }
}

// [B, G, N] to [B, G / kGroups, N, kGroups], the last groups filled up with zeros, so that one load reads a number of
// kGroups groups. A thread writes them for one n. One launch serves two tensors: of the blocks of a plane the first
// `blocks_of_one` copy `one`, and those after them copy `other`.
template <typename A>
struct Interleaved {
  const A* from;
  Pack<A, kGroups>* to;
  int64_t N;
};

constexpr int kInterleaveThreads = 256;

template <typename A>
__global__ void __launch_bounds__(kInterleaveThreads)
    interleave_kernel(Interleaved<A> one, const Interleaved<A> other, int64_t blocks_of_one, int64_t blocks_of_both,
                      int groups) {
  const int64_t plane = blockIdx.x / blocks_of_both, parts = (groups + kGroups - 1) / kGroups, b = plane / parts;
  const int64_t g0 = (plane - b * parts) * kGroups;
  int64_t block = blockIdx.x - plane * blocks_of_both;
  if (block >= blocks_of_one) one = other, block -= blocks_of_one;
  const int64_t n = block * kInterleaveThreads + threadIdx.x;
  if (n >= one.N) return;
  Pack<A, kGroups> out;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    out.at[g] = g0 + g < groups ? one.from[(b * groups + g0 + g) * one.N + n] : A(0);
  }
  one.to[plane * one.N + n] = out;
}

constexpr int kTileHeight = 4, kTileWidth = 8, kTilePixels = kTileHeight * kTileWidth;
constexpr int kCellRows = kTileHeight + 1;
constexpr int kTileRow = 33;  // numbers of a pixel in shared memory: a column of them lies in different banks
constexpr int kTileSums = kTilePixels * kTileRow;
constexpr int kLongTile = 256;  // records from which on all warps of a block add those of a tile
template <typename A>
constexpr int kTileWarps = 16 / static_cast<int>(sizeof(A));

struct Tiles {
  int32_t across, down, chunks;  // chunks of 32 channels
  int64_t units;                 // B * down * across * chunks
};

// A chunk of a tile: what a warp owns.
struct Unit {
  int64_t b;
  int32_t x0, y0, c0;

  static __device__ __forceinline__ Unit of(int64_t unit, const Tiles& tiles) {
    const int64_t tile = unit / tiles.chunks, row = tile / tiles.across, b = row / tiles.down;
    return Unit{b, static_cast<int32_t>(tile - row * tiles.across) * kTileWidth,
                static_cast<int32_t>(row - b * tiles.down) * kTileHeight,
                static_cast<int32_t>(unit - tile * tiles.chunks) * 32};
  }
};

// The records of a unit are a run in each row of cells. Lane r holds the r-th run: its end in the list of the unit's
// records, in which the runs follow one another, and how far behind that position the records lie in memory.
struct Runs {
  int32_t shift, end;

  static __device__ __forceinline__ Runs of(const Unit& unit, const int32_t* starts, const Sizes& sizes) {
    const int lane = threadIdx.x % 32;
    int32_t begin = 0, count = 0;
    if (lane < kCellRows && unit.y0 + lane <= sizes.H) {
      const int32_t* row = starts + unit.b * sizes.cells + static_cast<int64_t>(unit.y0 + lane) * (sizes.W + 1);
      begin = row[unit.x0], count = row[min(unit.x0 + kTileWidth, sizes.W) + 1] - begin;
    }
    const int32_t end = inclusive_sum_lanes(count);
    return Runs{begin - (end - count), end};
  }
  __device__ __forceinline__ int32_t count() const { return __shfl_sync(kAllLanes, end, 31); }  // of the unit's records
  // The row of cells that the unit's i-th record lies in; moves i to where the record is.
  __device__ __forceinline__ int find(int32_t& i) const {
    int r = 0;
    int32_t behind = __shfl_sync(kAllLanes, shift, 0);
#pragma unroll
    for (int other = 1; other < kCellRows; ++other) {
      const int32_t end_before = __shfl_sync(kAllLanes, end, other - 1), next = __shfl_sync(kAllLanes, shift, other);
      if (i >= end_before) r = other, behind = next;
    }
    i += behind;
    return r;
  }
};

// A record as a lane prepares it for all lanes of its warp.
template <typename A>
struct alignas(4 * sizeof(A)) Prepared {
  A weight[4];
  uint16_t at[4];  // where the sums of the corners' pixels begin; kTileSums for pixels outside the tile
  uint32_t query;
  A depth;
  Pack<A, kGroups> coefficient;

  // r: the row of cells of the unit.
  __device__ __forceinline__ void set_corners(const Record<A>& record, const Unit& unit, int r) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int x = record.column - 1 - unit.x0 + k % 2, y = r - 1 + k / 2;
      if (x >= 0 && x < kTileWidth && y >= 0 && y < kTileHeight) at[k] = (y * kTileWidth + x) * kTileRow;
      weight[k] = corner_factors(k, record.fx, record.fy).weight;
    }
  }
};

// For all lanes of a warp: adds the batches `part`, `part + parts`, ... of 32 records of a unit to `sums`
// [kTilePixels, kTileRow], which it clears first. Each lane prepares a record of a batch in `prepared`; then all lanes
// walk them, kAtOnce at a time.
template <typename A>
__device__ __forceinline__ void add_records(const Unit& unit, const Runs& runs, int part, int parts,
                                            const Pack<A, kGroups>* __restrict__ coefficients,
                                            const Pack<A, kGroups>* __restrict__ rows, const A* __restrict__ depths,
                                            const Record<A>* __restrict__ records, Prepared<A>* prepared, A* sums,
                                            const Sizes& sizes) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % 32;
  const int64_t in_image = sizes.Q * sizes.D;
  for (int i = lane; i < kTileSums; i += 32) sums[i] = 0;
  const int32_t count = runs.count();
  const int c = unit.c0 + lane;
  const Record<A>* my_records = records + unit.b * in_image;
  const int parts_of_groups = (sizes.G + kGroups - 1) / kGroups;
  for (int g0 = 0; g0 < parts_of_groups; ++g0) {
    const int64_t first_row = (unit.b * parts_of_groups + g0) * sizes.Q;
    const auto* my_rows = rows + first_row * sizes.K + c;
    const auto* my_coefficients = coefficients + first_row * sizes.D;
    for (int32_t i0 = part * 32; i0 < count; i0 += parts * 32) {
      int32_t i = i0 + lane;
      const bool exists = i < count;
      const int r = runs.find(i);
      Prepared<A> mine = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) mine.at[k] = kTileSums;
      if (exists) {
        const Record<A> record = my_records[i];
        mine.query = record.sample / sizes.D;
        mine.set_corners(record, unit, r);
        mine.coefficient = my_coefficients[record.sample];
        if (unit.c0 + 32 > sizes.K) mine.depth = depths == nullptr ? A(0) : depths[unit.b * in_image + record.sample];
      }
      prepared[lane] = mine;
      __syncwarp();  // the batch is prepared
      const int here = min(32, count - i0);
#pragma unroll 1
      for (int j0 = 0; j0 < here; j0 += kAtOnce) {
        A h[kAtOnce] = {};  // of the lane's channel, see csrc/sample_ops.h
        if (c < sizes.K) {
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const Prepared<A>& record = prepared[j0 + j];
            const Pack<A, kGroups> row = my_rows[static_cast<uint64_t>(record.query) * static_cast<uint32_t>(sizes.K)];
            const Pack<A, kGroups> coefficient = record.coefficient;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) h[j] += coefficient.at[g] * row.at[g];
          }
        } else if (c < sizes.C) {
#pragma unroll 1
          for (int j = 0; j < kAtOnce; ++j) {
            const Prepared<A>& record = prepared[j0 + j];
            A all = 0;
#pragma unroll
            for (int g = 0; g < kGroups; ++g) all += record.coefficient.at[g];
            const A product = all * encode(record.depth, c - sizes.K);
#pragma unroll
            for (int other = 0; other < kAtOnce; ++other) h[other] = other == j ? product : h[other];
          }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const Prepared<A> record = prepared[j0 + j];
          A sum[4];  // All are read before one is written, or each read would wait for the write before it.
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (record.at[k] < kTileSums) sum[k] = sums[record.at[k] + lane];
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (record.at[k] < kTileSums) sums[record.at[k] + lane] = sum[k] + record.weight[k] * h[j];
          }
        }
      }
      __syncwarp();  // the batch has been read
    }
  }
}

// For all lanes of a warp: writes part `part` of `parts` of a unit; value(i) is the sum at index i of
// [kTilePixels, kTileRow].
template <bool CHANNELS_LAST, typename T, typename Value>
__device__ __forceinline__ void write_unit(const Unit& unit, int part, int parts, T* __restrict__ grad_images,
                                           const Sizes& sizes, const Value& value) {
  const int lane = threadIdx.x % 32, rows_here = min(kTileHeight, sizes.H - unit.y0);
  if constexpr (CHANNELS_LAST) {
    T* to = grad_images + ((unit.b * sizes.H + unit.y0) * sizes.W + unit.x0) * sizes.C + unit.c0 + lane;
    if (unit.c0 + lane >= sizes.C) return;
    for (int y = 0; y < rows_here; ++y, to += static_cast<int64_t>(sizes.W) * sizes.C) {
#pragma unroll 4
      for (int x = part; x < kTileWidth; x += parts) {
        if (unit.x0 + x < sizes.W) {
          to[x * sizes.C] = from_accumulate<T>(value((y * kTileWidth + x) * kTileRow + lane));
        }
      }
    }
  } else {
    // Lanes take the pixels of a row in some channels, as far apart as keeps them in different banks.
    constexpr int kStep = kTileWidth;
    const int x = lane % kTileWidth, channel = lane / kTileWidth * kStep;
    const int64_t plane = static_cast<int64_t>(sizes.H) * sizes.W;
    T* to = grad_images + (unit.b * sizes.C + unit.c0 + channel) * plane + static_cast<int64_t>(unit.y0) * sizes.W +
            unit.x0 + x;
    if (unit.x0 + x >= sizes.W) return;
    for (int y = 0; y < rows_here; ++y, to += sizes.W) {
#pragma unroll 4
      for (int c = part; c < kStep; c += parts) {
        if (unit.c0 + channel + c < sizes.C) {
          to[c * plane] = from_accumulate<T>(value((y * kTileWidth + x) * kTileRow + channel + c));
        }
      }
    }
  }
}

// The units of a block's warps lie far apart. The records of a unit with kLongTile of them or more are split among the
// warps of its block, each of which adds to sums of its own; these are added in order.
template <typename T, typename A, bool CHANNELS_LAST>
__global__ void __launch_bounds__(32 * kTileWarps<A>, 6)
    tile_kernel(const Pack<A, kGroups>* __restrict__ coefficients, const Pack<A, kGroups>* __restrict__ rows,
                const A* __restrict__ depths, const int32_t* __restrict__ starts, const Record<A>* __restrict__ records,
                T* __restrict__ grad_images, const Sizes sizes, const Tiles tiles) {
  constexpr int kWarps = kTileWarps<A>;
  __shared__ A sums[kWarps][kTileSums];
  __shared__ Prepared<A> prepared[kWarps][32];
  __shared__ int64_t long_units[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  A* my_sums = sums[warp];
  const auto add = [&](const Unit& unit, const Runs& runs, int part, int parts) {
    add_records(unit, runs, part, parts, coefficients, rows, depths, records, prepared[warp], my_sums, sizes);
  };
  const int64_t index = static_cast<int64_t>(warp) * gridDim.x + blockIdx.x;
  bool is_long = false;
  if (index < tiles.units) {
    const Unit unit = Unit::of(index, tiles);
    const Runs runs = Runs::of(unit, starts, sizes);
    is_long = runs.count() >= kLongTile;
    if (!is_long) {
      add(unit, runs, 0, 1);
      __syncwarp();  // the sums are complete
      write_unit<CHANNELS_LAST>(unit, 0, 1, grad_images, sizes, [&](int i) { return my_sums[i]; });
    }
  }
  if (lane == 0) long_units[warp] = is_long ? index : -1;
  if (!__syncthreads_or(is_long)) return;
  for (int w = 0; w < kWarps; ++w) {
    if (long_units[w] < 0) continue;
    const Unit unit = Unit::of(long_units[w], tiles);
    add(unit, Runs::of(unit, starts, sizes), warp, kWarps);
    __syncthreads();  // the sums of all warps are complete
    write_unit<CHANNELS_LAST>(unit, warp, kWarps, grad_images, sizes, [&](int i) {
      A sum = 0;
      for (int other = 0; other < kWarps; ++other) sum += sums[other][i];
      return sum;
    });
    __syncthreads();  // the sums have been read
  }
}

// The records of the samples that count, by cell, in the order of the samples if `deterministic`. Writes `starts`.
template <typename T, typename A>
Tensor records_by_cell(const Inputs<T, A>& in, const CellCounts& cells, int32_t* starts, bool deterministic) {
  const Sizes& sizes = in.sizes;
  const int64_t all = in.queries() * sizes.D;
  Tensor records = new_empty(in.samples, {all * static_cast<int64_t>(sizeof(Record<A>))}, ScalarType::Byte);
  Record<A>* data = data_of(records);
  const int64_t piece = std::max<int64_t>(kScanThreads * kCountsPerThread, ceil_div(sizes.cells, kMaxPieces));
  launch({in.op, "scan_kernel", in.scope, {ceil_div(sizes.cells, piece), sizes.B}, kScanThreads}, scan_kernel,
         data_of(cells.counts), starts, sizes.cells, piece);
  launch({in.op, "record_kernel", in.scope, ceil_div(all, kRecordThreads), kRecordThreads}, record_kernel<A>,
         in.sample_data(), starts, data_of(cells.ranks), data, sizes);
  if (!deterministic) return records;
  Tensor ordered = new_empty(in.samples, records.sizes(), ScalarType::Byte);
  const int64_t blocks = bounded_blocks(in.scope, sizes.B * sizes.cells, kOrderThreads, 64);
  launch({in.op, "order_kernel", in.scope, blocks, kOrderThreads}, order_kernel<A>, starts, data, data_of(ordered),
         sizes);
  return ordered;
}

// cells: of launch_dots().
template <typename T, typename A>
void launch_scatter(const Inputs<T, A>& in, const CellCounts& cells, const A* coefficients, const A* rows,
                    const A* depths, Tensor& grad_images, bool channels_last, bool deterministic) {
  const Sizes& sizes = in.sizes;
  if (grad_images.numel() == 0) return;
  const int64_t in_image = sizes.Q * sizes.D;
  if (sizes.B * in_image == 0 || sizes.G == 0) {
    zero_(grad_images);
    return;
  }
  Tensor starts = new_empty(in.samples, {sizes.B * sizes.cells}, ScalarType::Int);
  int32_t* start_data = data_of(starts);
  const Tensor records = records_by_cell(in, cells, start_data, deterministic);
  Tiles tiles{static_cast<int32_t>(ceil_div(sizes.W, kTileWidth)), static_cast<int32_t>(ceil_div(sizes.H, kTileHeight)),
              static_cast<int32_t>(ceil_div(sizes.C, 32))};
  tiles.units = sizes.B * tiles.down * tiles.across * tiles.chunks;
  using Groups = Pack<A, kGroups>;
  const int64_t planes = sizes.B * ceil_div(sizes.G, kGroups), in_rows = sizes.Q * sizes.K;
  Tensor grouped = new_empty(in.samples, {planes * (in_image + in_rows) * kGroups});
  auto *grouped_coefficients = mutable_data_of<Groups>(grouped),
       *grouped_rows = grouped_coefficients + planes * in_image;
  const int64_t of_coefficients = ceil_div(in_image, kInterleaveThreads),
                of_both = of_coefficients + ceil_div(in_rows, kInterleaveThreads);
  launch({in.op, "interleave_kernel", in.scope, planes * of_both, kInterleaveThreads}, interleave_kernel<A>,
         Interleaved<A>{coefficients, grouped_coefficients, in_image}, Interleaved<A>{rows, grouped_rows, in_rows},
         of_coefficients, of_both, sizes.G);
  const auto kernel = channels_last ? tile_kernel<T, A, true> : tile_kernel<T, A, false>;
  launch({in.op, "tile_kernel", in.scope, ceil_div(tiles.units, kTileWarps<A>), 32 * kTileWarps<A>}, kernel,
         grouped_coefficients, grouped_rows, depths, start_data, data_of(records), data_of(grad_images), sizes, tiles);
}

}  // namespace
}  // namespace visdet::sample

// Backward of ms_deform_attn on CUDA. The contract is in ../ms_deform_attn.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <tuple>

#include "common/bilinear.h"
#include "common/block_scan.cuh"
#include "common/paths.h"
#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/regions.cuh"
#include "cuda/ms_deform_attn/row_split.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr const char* kOp = "ms_deform_attn_backward";

// A cell is the square between four texel centres that a sample falls into: (H + 1) * (W + 1) of them a level, border
// cells included. The samples of each (batch, head, level) are sorted by cell, and in a cell by query and point, in two
// steps. A bin is a run of cells that holds some 1000 samples, less than a block sorts at once, if they spread evenly.
// count_kernel counts the samples of each bin, scan_kernel turns counts into places, scatter_kernel writes the samples
// there as records, 16 bytes each, a bin's in any order, and sort_kernel sorts each bin and says where its cells begin.
// In gather_kernel a block owns a tile of texels and the cells around it: a group of LANES threads takes a cell, holds
// its four texels of value and their four gradients in registers and walks the records, reading one row of grad_output
// each. So every sample costs one row instead of four of value and four atomic ones, and grad_value is written once, in
// its own type: no atomics, no zero-fill, no float32 copy. Cells on the seam of two tiles are walked by both for
// grad_value; one of them writes the samples' own gradients. No two threads write one address but the integer counters
// of bins, and what their order changes is undone by sort_kernel: the results do not differ between runs. Scratch: 32
// bytes a sample, 4 a cell. Where samples are few, direct_kernel replaces all of this, and for an encoder
// pyramid_grad_kernel, but for deterministic mode.

constexpr int kSampleThreads = 256;  // one thread a sample
constexpr int kScanThreads = 256;    // one block a (batch, head, level)
constexpr int kGatherThreads = 256;
constexpr int kSlots = 96;  // cells of a tile times the groups that share a cell: 48 KB of sums at 128 bytes a corner

// The tile of a level: its cells, and how many groups share a cell. The more records a cell holds, the smaller the
// tile.
struct Tile {
  int32_t cells_x, cells_y, part_bits;  // 2^part_bits groups share a cell
  __host__ __device__ constexpr int texels_x() const { return cells_x - 1; }
  __host__ __device__ constexpr int texels_y() const { return cells_y - 1; }
};

// samples: of the level for one (batch, head).
__host__ __device__ __forceinline__ Tile tile_of_shape(int shape) {
  return shape == 0 ? Tile{12, 8, 0} : shape == 1 ? Tile{8, 6, 1} : Tile{6, 4, 2};
}
__host__ __device__ __forceinline__ int tile_shape_of(int64_t samples, int64_t H, int64_t W) {
  const int64_t cells = (H + 1) * (W + 1);
  return samples >= 128 * cells ? 2 : samples >= 48 * cells ? 1 : 0;
}

__host__ __device__ __forceinline__ int64_t tiles_of(const Tile& tile, int64_t H, int64_t W) {
  return H > 0 ? (H + tile.texels_y() - 1) / tile.texels_y() * ((W + tile.texels_x() - 1) / tile.texels_x()) : 0;
}

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query << point_bits | point
  A fx, fy, weight;
};

__host__ __device__ __forceinline__ int64_t cells_of(int64_t H, int64_t W) { return H > 0 ? (H + 1) * (W + 1) : 0; }

// Bins: as many cells, a power of two, as hold kBinSamples if the samples of the level spread evenly.
constexpr int64_t kBinSamples = 1400;
constexpr int kMaxBinBits = 11;
__host__ __device__ __forceinline__ int bin_bits_of(int64_t samples, int64_t cells) {
  int bits = 0;
  while (bits < kMaxBinBits && samples << (bits + 1) <= cells * kBinSamples) ++bits;
  return bits;
}
__host__ __device__ __forceinline__ int64_t bins_of(int64_t cells, int bin_bits) {
  return (cells + (int64_t{1} << bin_bits) - 1) >> bin_bits;
}

// The cell of a sample that counts.
template <typename A>
__device__ __forceinline__ uint32_t cell_of(A x, A y, int32_t W) {
  const int32_t column = static_cast<int32_t>(floor(x)) + 1, row = static_cast<int32_t>(floor(y)) + 1;
  return static_cast<uint32_t>(row) * (W + 1u) + column;
}

// Where the gradients of the samples go: the plain form's tensors, or, for the fused form's last kernels, 16 bytes a
// sample with its weight. See put_once() for a third way.
template <typename A>
struct SampleGrads {
  A* locations;        // [B, Q, G, K, 2]
  A* weights;          // [B, Q, G, K]
  Pack<A, 4>* packed;  // [B, Q, G, K] (weight, gradient of weight, of x, of y), instead of both
  char* offsets;       // [B, Q, G, K, 2] of the type of the fused form's offsets, instead of locations
  int64_t offset_gap;  // elements between a query's offsets and the next one's

  // add: to what another turn of channels has left.
  __device__ __forceinline__ void put(int64_t index, A weight, A of_weight, A of_x, A of_y, bool add) const {
    if (packed != nullptr) {
      if (add) of_weight += packed[index].at[1], of_x += packed[index].at[2], of_y += packed[index].at[3];
      packed[index] = {weight, of_weight, of_x, of_y};
    } else {
      auto* location = reinterpret_cast<Pack<A, 2>*>(locations) + index;
      if (add) of_weight += weights[index], of_x += location->at[0], of_y += location->at[1];
      weights[index] = of_weight;
      *location = {of_x, of_y};
    }
  }
};

// What the kernels below need to know of a level, worked out once on the device, where level_shapes may be.
struct alignas(16) LevelPlan {
  Level level;
  int64_t first_slot;  // of its cells among those of its (batch, head); one entry more: the end of the last cell
  int32_t tiles, tile_shape;
  int32_t first_point, points;        // of a row's samples
  int32_t first_bin, bins, bin_bits;  // first_bin: as first_slot; a bin is 2^bin_bits cells
  bool disjoint, cover;               // of all levels, in the first entry: no row in two of them; every row in one
};

constexpr int kPlanThreads = 1, kZeroThreads = 256;
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const Levels levels, LevelPlan* __restrict__ plan, int L, int64_t S, int64_t Q) {
  int64_t slot = 0, rows = 0;
  int32_t first_point = 0, bin = 0;
  bool disjoint = true;
  for (int l = 0; l < L; ++l) {
    const Level level = read_level(levels, l, S);
    const int64_t area = static_cast<int64_t>(level.H) * level.W;
    for (int k = 0; k < l; ++k) {
      const Level other = plan[k].level;
      disjoint = disjoint && (level.start + area <= other.start ||
                              other.start + static_cast<int64_t>(other.H) * other.W <= level.start);
    }
    const int32_t points = level.end - first_point;
    const int shape = tile_shape_of(Q * points, level.H, level.W);
    const int64_t tiles = tiles_of(tile_of_shape(shape), level.H, level.W);
    const int64_t cells = cells_of(level.H, level.W);
    const int bin_bits = bin_bits_of(Q * points, cells);
    const int32_t bins = static_cast<int32_t>(bins_of(cells, bin_bits));
    plan[l] = {level, slot, static_cast<int32_t>(tiles), shape, first_point, points, bin, bins, bin_bits, false, false};
    slot += cells + 1, bin += bins + 1, rows += area, first_point = level.end;
  }
  if (L > 0) plan[0].disjoint = disjoint, plan[0].cover = disjoint && rows == S;
}

// Rows that belong to no level, or to several, must be zero before gather_kernel.
__global__ void __launch_bounds__(kZeroThreads)
    zero_kernel(const LevelPlan* __restrict__ plan, char* __restrict__ to, int64_t bytes) {
  if (plan[0].cover) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  for (; at + 16 <= bytes; at += stride) *reinterpret_cast<uint4*>(to + at) = uint4{};
  for (int64_t i = at; i < bytes && i < at + 16; ++i) to[i] = 0;
}

// All threads of the block: the plan into shared memory.
__device__ __forceinline__ void load_plan(const LevelPlan* plan, int L, LevelPlan* table) {
  for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = plan[l];
  __syncthreads();
}

// What a block of the sample kernels takes of a head: as many neighbouring queries, all of their samples or
// kPieceThreads of each, as give a thread kPieceEach samples. These are the same sample k of queries `step` apart.
constexpr int kPieceThreads = 512;
template <typename A>
constexpr int kPieceEach = 64 / sizeof(Record<A>);  // 32 KB of records a block
constexpr int kMostLocalBins = 8192;                // of a head: beyond, samples are counted in global memory

struct PieceWalk {
  uint32_t head, query, step, k, Q;
  int64_t index, row, query_level, index_step, row_step, query_level_step;  // of the first query; to the next
  LevelPlan at;                                                             // of the samples

  static __host__ __device__ __forceinline__ uint32_t parts(uint32_t K) {
    return (K + kPieceThreads - 1) / kPieceThreads;
  }
  // Queries of a piece.
  static __host__ __device__ __forceinline__ uint32_t queries(uint32_t K, int each) {
    return (K < kPieceThreads ? kPieceThreads / K : 1) * each;
  }
  __device__ __forceinline__ PieceWalk(const MsDeformAttnProblem& problem, const LevelPlan* table, int each) {
    const uint32_t K = problem.K, G = problem.G, L = problem.L, in_piece = queries(K, each), of_part = parts(K);
    Q = problem.Q;
    const uint32_t of_head = (Q + in_piece - 1) / in_piece * of_part;
    head = blockIdx.x / of_head;
    const uint32_t piece = blockIdx.x - head * of_head, part = piece % of_part,
                   turn = of_part == 1 ? threadIdx.x / K : 0;
    step = in_piece / each, query = piece / of_part * in_piece + turn;
    k = part * kPieceThreads + threadIdx.x - turn * K;
    if (turn >= step || k >= K) query = Q, k = 0;  // idle
    int l = 0;
    while (k >= static_cast<uint32_t>(table[l].level.end)) ++l;
    at = table[l];
    const uint32_t b = head / G;
    const int64_t first_query = static_cast<int64_t>(b) * Q + query;
    row = first_query * G + (head - b * G), index = row * K + k, query_level = first_query * L + l;
    row_step = static_cast<int64_t>(step) * G, index_step = row_step * K,
    query_level_step = static_cast<int64_t>(step) * L;
  }
  __device__ __forceinline__ bool exists(int j) const { return query + j * step < Q; }
  // Whether sample j, at this position, counts, and its bin among those of the head.
  template <typename A>
  __device__ __forceinline__ bool find_bin(int j, A x, A y, uint32_t& bin) const {
    const Level& level = at.level;
    if (!(exists(j) && level.H > 0 && x > A(-1) && y > A(-1) && x < A(level.W) && y < A(level.H))) return false;
    bin = at.first_bin + (cell_of(x, y, level.W) >> at.bin_bits);
    return true;
  }
};

// local_bins: head_bins, or 0 where they are too many for shared memory.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    count_kernel(const LevelPlan* __restrict__ plan, const Source source, int32_t* __restrict__ counts,
                 const SampleGrads<A> grads, const MsDeformAttnProblem problem, int head_bins, int local_bins) {
  constexpr int kEach = kPieceEach<A>;
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);                  // [L]
  auto* local_counts = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins]
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local_counts[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kEach);
  counts += static_cast<int64_t>(walk.head) * head_bins;
  typename Source::Raw raw[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    raw[j] = source.fetch_position(walk.index + j * walk.index_step, walk.query_level + j * walk.query_level_step);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (walk.find_bin(j, x, y, bin)) {
      local_bins > 0 ? atomicAdd(local_counts + bin, 1) : atomicAdd(counts + bin, 1);
    } else if (walk.exists(j)) {
      const int64_t index = walk.index + j * walk.index_step;
      const A nothing = walk.at.level.H > 0 ? A(0) : quiet_nan<A>();
      A weight = 0;
      if (grads.packed != nullptr) {
        source.fetch_weight(index, raw[j]);
        weight = source.weight(raw[j], source.row_at(walk.row + j * walk.row_step));
      }
      grads.put(index, weight, nothing, nothing, nothing, false);
    }
  }
  __syncthreads();  // the piece is counted
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    if (local_counts[i] > 0) atomicAdd(counts + i, local_counts[i]);
  }
}

// counts -> starts among the head's records, in place: one block a (batch, head, level).
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const LevelPlan* __restrict__ plan, int32_t* __restrict__ counts, const MsDeformAttnProblem problem,
                int head_bins) {
  const int L = static_cast<int>(problem.L), l = blockIdx.x % L;
  int32_t* mine = counts + static_cast<int64_t>(blockIdx.x / L) * head_bins + plan[l].first_bin;
  const int32_t end =
      place_counts<kScanThreads>(mine, mine, 0, plan[l].bins, plan[l].first_point * static_cast<int32_t>(problem.Q));
  if (threadIdx.x == 0) mine[plan[l].bins] = end;
}

// Sorts its piece by bin in shared memory, so that records of one bin are written side by side.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    scatter_kernel(const LevelPlan* __restrict__ plan, const Source source, const int32_t* __restrict__ bin_starts,
                   int32_t* __restrict__ filled, Record<A>* __restrict__ records, const MsDeformAttnProblem problem,
                   int head_bins, int local_bins, int point_bits) {
  constexpr int kEach = kPieceEach<A>, kPiece = kPieceThreads * kEach, kRankBits = 11;
  static_assert(kPiece <= 1 << kRankBits, "bin and rank share a number");
  extern __shared__ __align__(16) char shared[];
  auto* staged = reinterpret_cast<Record<A>*>(shared);          // [kPiece]
  auto* bin_of = reinterpret_cast<uint16_t*>(staged + kPiece);  // [kPiece]
  auto* table = reinterpret_cast<LevelPlan*>(bin_of + kPiece);  // [L]
  auto* local = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins + 1] counts, then starts
  int32_t* to_head = local + local_bins + 1;                    // [local_bins] from places in the piece
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kEach);
  bin_starts += static_cast<int64_t>(walk.head) * head_bins, filled += static_cast<int64_t>(walk.head) * head_bins;
  records += walk.head * problem.K * problem.Q;
  typename Source::Raw raw[kEach];
  typename Source::Row row[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    const int64_t index = walk.index + j * walk.index_step;
    raw[j] = source.fetch_position(index, walk.query_level + j * walk.query_level_step);
    source.fetch_weight(index, raw[j]);
    row[j] = source.row_at(walk.row + j * walk.row_step);
  }
  Record<A> record[kEach];
  int32_t place[kEach];  // bin and rank
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    place[j] = -1;
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (!walk.find_bin(j, x, y, bin)) continue;
    const uint32_t sample = (walk.query + j * walk.step) << point_bits | (walk.k - walk.at.first_point);
    record[j] = {static_cast<int32_t>(sample), x, y, source.weight(raw[j], row[j])};
    if (local_bins > 0) {
      place[j] = bin << kRankBits | atomicAdd(local + bin, 1);
    } else {
      records[bin_starts[bin] + atomicAdd(filled + bin, 1)] = record[j];
    }
  }
  if (local_bins == 0) return;
  __syncthreads();  // the piece is counted
  const int32_t total = place_counts<kPieceThreads>(local, local, 0, local_bins, 0);
  if (threadIdx.x == 0) local[local_bins] = total;
  __syncthreads();  // the bins' places are known
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    const int32_t count = local[i + 1] - local[i];
    if (count > 0) to_head[i] = bin_starts[i] + atomicAdd(filled + i, count) - local[i];
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (place[j] < 0) continue;
    const int32_t bin = place[j] >> kRankBits, at = local[bin] + (place[j] & ((1 << kRankBits) - 1));
    staged[at] = record[j], bin_of[at] = static_cast<uint16_t>(bin);
  }
  __syncthreads();  // the piece is sorted
  for (int i = threadIdx.x; i < total; i += kPieceThreads) records[to_head[bin_of[i]] + i] = staged[i];
}

// A block sorts a bin by cell and, in a cell, by a number that no two samples share. Up to kWindow records it sorts in
// shared memory: it counts them by the leading bits of this key, places them, and compares those that share these bits.
// A larger bin it sorts digit by digit in global memory. Also writes where cells begin, among the level's records.
constexpr int kSortThreads = 512;
template <typename A>
constexpr int kWindowEach = 64 / static_cast<int>(sizeof(Record<A>));  // records a thread holds: 32 KB a block
template <typename A>
constexpr int kWindow = kSortThreads * kWindowEach<A>;
constexpr int kKeyBits = 11, kKeyBuckets = 1 << kKeyBits;
static_assert(kMaxBinBits <= kKeyBits, "a cell begins with a bucket");
static_assert(kKeyBuckets == 4 * kSortThreads, "a thread has four buckets");

template <typename A>
struct alignas(16) SortScratch {
  Record<A> records[kWindow<A>];
  int32_t buckets[kKeyBuckets + 4];  // counts, then starts and the end
  uint32_t keys[kWindow<A>];
};

template <typename A>
struct BinKeys {
  uint32_t first_cell;
  int32_t W;
  int sample_bits, point_bits;
  // Of the bin.
  __device__ __forceinline__ uint32_t cell(const Record<A>& record) const {
    return cell_of(record.fx, record.fy, W) - first_cell;
  }
  // The query's bits in reverse, then the point: neighbouring queries have different leading bits.
  __device__ __forceinline__ uint32_t sample(const Record<A>& record) const {
    const uint32_t query = static_cast<uint32_t>(record.sample) >> point_bits,
                   point = record.sample & ((1u << point_bits) - 1);
    return __brev(query) >> (32 - (sample_bits - point_bits)) << point_bits | point;
  }
  __device__ __forceinline__ uint64_t operator()(const Record<A>& record) const {
    return static_cast<uint64_t>(cell(record)) << sample_bits | sample(record);
  }
};

// Where the starts of a bin's cells go.
struct CellStarts {
  int32_t* to;
  int32_t before, cells, shift;  // records of earlier bins; a cell has 2^shift buckets
  bool ends;                     // the level's last bin

  // All threads of the block.
  __device__ __forceinline__ void write(const int32_t* buckets) const {
    for (int32_t cell = threadIdx.x; cell < cells; cell += kSortThreads) to[cell] = before + buckets[cell << shift];
    if (ends && threadIdx.x == 0) to[cells] = before + buckets[kKeyBuckets];
  }
};

// All threads of the block: counts -> starts of the buckets.
template <typename A>
__device__ __forceinline__ void start_buckets(SortScratch<A>& scratch) {
  __syncthreads();  // the buckets are counted
  auto& mine = reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x];
  Pack<int32_t, 4> counts = mine, starts;
  int32_t total, start = sum_before<kSortThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], total);
#pragma unroll
  for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
  mine = starts;
  if (threadIdx.x == 0) scratch.buckets[kKeyBuckets] = total;
  __syncthreads();  // the buckets' starts are known
}
template <typename A>
__device__ __forceinline__ void zero_buckets(SortScratch<A>& scratch) {
  reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x] = {};
}

// All threads of the block: writes `count` records, of which a thread holds every kSortThreads-th, to `to` in the order
// of keys, and where cells begin, if that is asked for. split(record, key) gives the bucket and what tells the records
// of a bucket apart. The buckets are zero.
template <typename A, typename Split>
__device__ __forceinline__ void sort_window(SortScratch<A>& scratch, Record<A> (&record)[kWindowEach<A>], int count,
                                            const Split& split, Record<A>* to, const CellStarts* starts) {
  constexpr int kRankBits = 11;
  static_assert(kWindow<A> <= 1 << kRankBits, "bucket and rank share a number");
  uint32_t key[kWindowEach<A>], place[kWindowEach<A>];  // place: bucket and rank
#pragma unroll
  for (int j = 0; j < kWindowEach<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const uint32_t bucket = split(record[j], key[j]);
    record[j].fx -= floor(record[j].fx), record[j].fy -= floor(record[j].fy);
    place[j] = bucket << kRankBits | atomicAdd(scratch.buckets + bucket, 1);
  }
  start_buckets(scratch);
  if (starts != nullptr) starts->write(scratch.buckets);
#pragma unroll
  for (int j = 0; j < kWindowEach<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    scratch.keys[scratch.buckets[place[j] >> kRankBits] + (place[j] & ((1 << kRankBits) - 1))] = key[j];
  }
  __syncthreads();  // the keys are placed
#pragma unroll
  for (int j = 0; j < kWindowEach<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const int32_t* bucket = scratch.buckets + (place[j] >> kRankBits);
    const int32_t begin = bucket[0], end = bucket[1];
    int32_t at = begin;
#pragma unroll 1
    for (int32_t other = begin; other < end; ++other) at += scratch.keys[other] < key[j];
    scratch.records[at] = record[j];
  }
  __syncthreads();  // the records are sorted
#pragma unroll
  for (int j = 0; j < kWindowEach<A>; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) to[i] = scratch.records[i];
  }
}

// A bin of more than kWindow records is sorted by the digits of their keys, the lowest first, in a time in proportion
// to their number. Each warp has a counter for every digit in shared memory.
constexpr int kSortWarps = kSortThreads / 32, kDigitBits = 9;
static_assert(1 << kDigitBits == kSortThreads, "a thread starts the counters of a digit");

// All threads of the block. A warp takes its part of the records in order, so that records of one digit keep theirs:
// first it counts its digits, then it places its records behind those of lower digits and of the warps before it.
// is_last: of the positions, only the fractions are kept.
template <typename A>
__device__ __forceinline__ void sort_by_digit(const Record<A>* from, Record<A>* to, int32_t count, int low_bit,
                                              const BinKeys<A>& key_of, bool is_last, int32_t* counters) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kDigits = 1 << kDigitBits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* mine = counters + warp * kDigits;
  const int32_t part = (count + kSortThreads - 1) / kSortThreads * 32;
  const int32_t begin = min(warp * part, count), end = min(begin + part, count);
  const auto digit_of = [&](const Record<A>& record) {
    return static_cast<int>(key_of(record) >> low_bit) & (kDigits - 1);
  };
  __syncthreads();  // the records of the pass before are placed, and the counters have been read
  for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) counters[i] = 0;
  __syncthreads();  // the counters are zero
  for (int32_t i = begin + lane; i < end; i += 32) atomicAdd(mine + digit_of(from[i]), 1);
  __syncthreads();  // the digits are counted
  int32_t of_digit = 0, total;
#pragma unroll 1
  for (int w = 0; w < kSortWarps; ++w) of_digit += counters[w * kDigits + threadIdx.x];
  int32_t start = sum_before<kSortThreads>(of_digit, total);
#pragma unroll 1
  for (int w = 0; w < kSortWarps; ++w) {
    int32_t& counter = counters[w * kDigits + threadIdx.x];
    const int32_t here = counter;
    counter = start;
    start += here;
  }
  __syncthreads();  // the counters say where the records of a warp's digits start
#pragma unroll 1
  for (int32_t first = begin; first < end; first += 32) {
    const bool exists = first + lane < end;
    Record<A> record = from[min(first + lane, end - 1)];
    const int digit = exists ? digit_of(record) : kDigits;
    const unsigned same = __match_any_sync(kAll, digit);
    const int rank = __popc(same & ((1u << lane) - 1));
    const int32_t place = exists ? mine[digit] + rank : 0;
    __syncwarp();  // the counters have been read
    if (exists && rank == 0) mine[digit] += __popc(same);
    if (is_last) record.fx -= floor(record.fx), record.fy -= floor(record.fy);
    if (exists) to[place] = record;
    __syncwarp();  // and may be read again
  }
}

// All threads of the block: a bin of more than kWindow records, of which none are left in `records`. shift: 2^shift
// keys make a bucket that `starts` knows; key_bits: of a key.
template <typename A>
__device__ __noinline__ void sort_large_bin(Record<A>* records, int32_t count, int shift, int key_bits,
                                            const BinKeys<A> key_of, Record<A>* to, const CellStarts starts) {
  extern __shared__ __align__(16) char shared[];
  auto& scratch = *reinterpret_cast<SortScratch<A>*>(shared);
  static_assert(sizeof(scratch.records) >= kSortWarps * sizeof(int32_t) << kDigitBits, "the counters fit");
  zero_buckets(scratch);
  __syncthreads();  // the buckets are zero
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < count; i += kSortThreads) {
    atomicAdd(scratch.buckets + (key_of(records[i]) >> shift), 1);
  }
  start_buckets(scratch);
  starts.write(scratch.buckets);
  // An odd number of passes, so that the last one ends in `to`.
  const int passes = (key_bits + kDigitBits - 1) / kDigitBits | 1;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    sort_by_digit(pass % 2 ? to : records, pass % 2 ? records : to, count, pass * kDigitBits, key_of,
                  pass + 1 == passes, reinterpret_cast<int32_t*>(scratch.records));
  }
}

template <typename A>
__global__ void __launch_bounds__(kSortThreads, 3)
    sort_kernel(const LevelPlan* __restrict__ plan, const int32_t* __restrict__ bin_starts,
                Record<A>* __restrict__ records, Record<A>* __restrict__ sorted, int32_t* __restrict__ starts,
                const MsDeformAttnProblem problem, int64_t head_slots, int head_bins, int sample_bits, int point_bits) {
  extern __shared__ __align__(16) char shared[];
  auto& scratch = *reinterpret_cast<SortScratch<A>*>(shared);
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B * problem.G)) return;
  int32_t bin = blockIdx.x;  // of its level
  int l = 0;
  while (l < problem.L && bin >= plan[l].bins) bin -= plan[l++].bins;
  if (l == problem.L) return;
  const LevelPlan& at = plan[l];
  const int32_t* mine = bin_starts + static_cast<int64_t>(head) * head_bins + at.first_bin + bin;
  const int32_t begin = mine[0], count = mine[1] - begin, bin_bits = at.bin_bits;
  const int64_t first_cell = static_cast<int64_t>(bin) << bin_bits, head_begin = head * problem.K * problem.Q;
  records += head_begin + begin, sorted += head_begin + begin;
  const BinKeys<A> key_of{static_cast<uint32_t>(first_cell), at.level.W, sample_bits, point_bits};
  // The buckets of a cell, and the samples that share a bucket.
  const int cell_shift = min(sample_bits, kKeyBits - bin_bits), sample_shift = sample_bits - cell_shift;
  const int64_t cells = min(cells_of(at.level.H, at.level.W) - first_cell, int64_t{1} << bin_bits);
  const CellStarts cell_starts{starts + head * head_slots + at.first_slot + first_cell,
                               begin - at.first_point * static_cast<int32_t>(problem.Q), static_cast<int32_t>(cells),
                               cell_shift, bin + 1 == at.bins};
  if (count > kWindow<A>) {
    return sort_large_bin(records, count, sample_shift, sample_bits + bin_bits, key_of, sorted, cell_starts);
  }
  Record<A> record[kWindowEach<A>] = {};
#pragma unroll
  for (int j = 0; j < kWindowEach<A>; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) record[j] = records[i];
  }
  zero_buckets(scratch);
  __syncthreads();  // the buckets are zero
  const auto split = [&](const Record<A>& record, uint32_t& key) {
    key = key_of.sample(record);
    return key_of.cell(record) << cell_shift | key >> sample_shift;
  };
  sort_window(scratch, record, count, split, sorted, &cell_starts);
}

// The two gradients of a cell's samples are matrix products: with the records as rows, grad_output (records x channels)
// times the corners (channels x 4) gives the dots, and the corner weights (4 x records) times grad_output the sums. In
// bfloat16 they run on the tensor cores, a warp a cell, 16 records at a time. The products are exact and added in
// float32. A corner weight goes in as two bfloat16 numbers, its rounding and the rounding of the rest (relative error
// 2^-17), in matrix rows 8 apart, whose sums meet in one thread. float16 cannot hold every weight.
constexpr int kMmaRecords = 16;
constexpr int kMmaChannels = 32;

__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Of an 8 x 8 matrix of 16-bit numbers, thread 4 r + t holding columns 2 t and 2 t + 1 of row r: its transpose.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
#endif
  return out;
}

template <typename T, typename A, int VEC, int LANES, bool TENSOR_CORES>
__global__ void __launch_bounds__(kGatherThreads, TENSOR_CORES ? 4 : 2)  // what fits the registers without spills
    gather_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const int32_t* __restrict__ starts, const Record<A>* __restrict__ records, T* __restrict__ grad_value,
                  const SampleGrads<A> grads, const MsDeformAttnProblem problem, int64_t head_slots, int point_bits) {
  constexpr int kGroups = kGatherThreads / LANES, kChannels = LANES * VEC;
  // Records a group (with tensor cores, a warp) walks at a time.
  constexpr int kBatch = TENSOR_CORES ? kMmaRecords : LANES < 4 ? LANES : 4;
  extern __shared__ __align__(16) char shared[];
  auto* planes = reinterpret_cast<A*>(shared);                                       // [4, kSlots, kChannels]
  auto* batches = planes + static_cast<size_t>(4) * kSlots * kChannels;              // [kGroups, kBatch, 4]
  auto* batch_queries = reinterpret_cast<int32_t*>(batches + kGroups * kBatch * 4);  // [kGroups, kBatch]
  __shared__ int32_t slot_begin[kSlots], slot_end[kSlots];
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  A* my_weights = batches + group * kBatch * 4;
  int32_t* my_queries = batch_queries + group * kBatch;
  const int32_t G = static_cast<int32_t>(problem.G), C = static_cast<int32_t>(problem.C);
  const uint32_t row_bytes = static_cast<uint32_t>(G * C * sizeof(T));
  constexpr unsigned kAll = 0xffffffffu;
  // One head after another, so that its rows of grad_output stay in the second-level cache.
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B) * G) return;
  const uint32_t b = head / G, g = head - b * G;
  const int64_t image_value = (static_cast<int64_t>(b) * problem.S * G + g) * C;
  const int64_t image_output = (static_cast<int64_t>(b) * problem.Q * G + g) * C;
  // Levels that share rows are the business of one block a head, one after another: nobody has such tables.
  const bool add = !plan[0].disjoint;
  if (add && blockIdx.x > 0) return;

  for (uint32_t task = blockIdx.x;; task += add ? 1 : gridDim.x) {
    // The last level first: it is the coarsest, whose tiles take longest.
    uint32_t in_level = task;
    int l = static_cast<int>(problem.L) - 1;
    while (l >= 0 && in_level >= static_cast<uint32_t>(plan[l].tiles)) in_level -= plan[l--].tiles;
    if (l < 0) return;
    const Level level = plan[l].level;
    const Tile tile = tile_of_shape(plan[l].tile_shape);
    const int32_t texels_x = tile.texels_x(), texels_y = tile.texels_y();
    const uint32_t tiles_x = static_cast<uint32_t>(level.W + texels_x - 1) / texels_x, tile_y = in_level / tiles_x;
    const int32_t y_first = tile_y * texels_y, x_first = (in_level - tile_y * tiles_x) * texels_x;
    const int32_t* level_starts = starts + head * head_slots + plan[l].first_slot;
    const Record<A>* level_records = records + (head * problem.K + plan[l].first_point) * problem.Q;
    const uint32_t cells_x_inverse = 65536u / tile.cells_x + 1, texels_x_inverse = 65536u / texels_x + 1;
    const auto cell_at = [&](int cell, int& x, int& y) {
      y = static_cast<uint32_t>(cell) * cells_x_inverse >> 16, x = cell - y * tile.cells_x;
    };

    // Slot = cell * parts + part: a part takes every parts-th batch of the cell's records. Cell (x, y) lies between
    // texels x - 1 and x, y - 1 and y.
    for (int slot = threadIdx.x; slot < kSlots; slot += kGatherThreads) {
      int x_in_tile, y_in_tile;
      cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
      const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
      int32_t begin = 0, end = 0;
      if (x <= level.W && y <= level.H) {
        const int64_t at = static_cast<int64_t>(y) * (level.W + 1) + x;
        begin = level_starts[at] + (slot & ((1 << tile.part_bits) - 1)) * kBatch, end = level_starts[at + 1];
      }
      slot_begin[slot] = begin, slot_end[slot] = end;
    }
    __syncthreads();  // the slots' records are known
    const int32_t step = kBatch << tile.part_bits;
    const int32_t samples_per_query = static_cast<int32_t>(problem.G * problem.K);
    const int64_t first_index = (static_cast<int64_t>(b) * problem.Q * G + g) * problem.K + plan[l].first_point;
    // From the dots of a record of query q.
    const auto put_grads = [&](const SampleGrads<A>& to, const Record<A>& record, const A(&d)[4], const Level& level,
                               int32_t q, bool more) {
      const A fx = record.fx, fy = record.fy, weight = record.weight;
      const int64_t index =
          static_cast<int64_t>(q) * samples_per_query + (record.sample & ((1 << point_bits) - 1)) + first_index;
      const A top = d[0] + fx * (d[1] - d[0]), bottom = d[2] + fx * (d[3] - d[2]);
      const A left = d[2] - d[0], right = d[3] - d[1];
      to.put(index, weight, top + fy * (bottom - top), level.W * weight * ((d[1] - d[0]) + fy * (right - left)),
             level.H * weight * (left + fx * (right - left)), more);
    };
    // Loaded ahead, of this or the next slot. Past the end: a record of weight zero.
    const auto load_record = [&](int32_t i, int32_t end) { return i < end ? level_records[i] : Record<A>{}; };
    for (int32_t c0 = 0; c0 < C; c0 += kChannels) {
      const int32_t c = c0 + lane * VEC;
      const bool has_channels = c < C;
      const char* value_base = reinterpret_cast<const char*>(value + image_value + c);
      const char* g_base = reinterpret_cast<const char*>(grad_output + image_output + c);
      if constexpr (TENSOR_CORES) {
        static_assert(kChannels == kMmaChannels, "a matrix covers the channels of a turn");
        const int warp = threadIdx.x / 32, corner_row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        // [corner][t]: of records 2 t, 2 t + 1: the rounded weights, the rests; of 2 t + 8, 2 t + 9: the same.
        auto* warp_weights = reinterpret_cast<uint16_t*>(batches) + warp * 4 * 4 * 8;
        const int mine = corner_row + t % 2 * 8;  // the record that this lane loads, and finishes if t < 2
        const int slot_in_pair = corner_row / 2 * 8 + t % 2 * 4 + corner_row % 2;
        const char* lane_value = reinterpret_cast<const char*>(value + image_value + c0 + t * 8);
        const char* lane_g = reinterpret_cast<const char*>(grad_output + image_output + c0 + t * 8);
        constexpr int kWarps = kGatherThreads / 32;
        Record<A> next = load_record(slot_begin[warp] + mine, slot_end[warp]);
        for (int slot = warp; slot < kSlots; slot += kWarps) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kWarps >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kWarps];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kWarps];
          int x_in_tile, y_in_tile;
          cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
          const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
          const bool owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
          float sums[4][4] = {};
          uint4 corner = {};
          if (begin < end && owns && corner_row < 4) {
            const int32_t corner_x = x - 1 + corner_row % 2, corner_y = y - 1 + corner_row / 2;
            if (corner_x >= 0 && corner_x < level.W && corner_y >= 0 && corner_y < level.H) {
              const uint32_t texel = level.start + corner_y * level.W + corner_x;
              corner = *reinterpret_cast<const uint4*>(lane_value + static_cast<uint64_t>(texel) * row_bytes);
            }
          }
          if (begin >= end) next = load_record(next_begin + mine, next_end);
          for (int32_t i = begin; i < end; i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits, other = __shfl_xor_sync(kAll, q, 1);
            uint4 g0 = {}, g1 = {};  // of records corner_row and corner_row + 8
            const int32_t q0 = t % 2 ? other : q, q1 = t % 2 ? q : other;
            if (i + corner_row < end) {
              g0 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q0)) * row_bytes);
            }
            if (i + corner_row + 8 < end) {
              g1 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q1)) * row_bytes);
            }
            next = i + step < end ? load_record(i + step + mine, end) : load_record(next_begin + mine, next_end);
            __syncwarp();  // the previous weights have been read
            if (t < 2) {
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              const A right_top = top * record.fx, right_bottom = bottom * record.fx;
              const A corner_weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                const auto rounded = from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]));
                const auto rest =
                    from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]) - to_accumulate(rounded));
                warp_weights[k * 32 + slot_in_pair] = __bfloat16_as_ushort(rounded);
                warp_weights[k * 32 + slot_in_pair + 2] = __bfloat16_as_ushort(rest);
              }
            }
            __syncwarp();  // these weights are complete
            uint4 a = {};
            if (corner_row < 4) a = reinterpret_cast<const uint4*>(warp_weights)[corner_row * 4 + t];
            multiply_add(sums[0], a.x, a.y, a.z, a.w, transpose(g0.x), transpose(g1.x));
            multiply_add(sums[1], a.x, a.y, a.z, a.w, transpose(g0.y), transpose(g1.y));
            multiply_add(sums[2], a.x, a.y, a.z, a.w, transpose(g0.z), transpose(g1.z));
            multiply_add(sums[3], a.x, a.y, a.z, a.w, transpose(g0.w), transpose(g1.w));
            if (!owns) continue;
            float dots[4] = {};  // corners 2 t and 2 t + 1 of record corner_row, then of record corner_row + 8
            multiply_add(dots, g0.x, g1.x, g0.y, g1.y, corner.x, corner.y);
            multiply_add(dots, g0.z, g1.z, g0.w, g1.w, corner.z, corner.w);
            const float even = __shfl_xor_sync(kAll, t % 2 ? dots[0] : dots[2], 1);
            const float odd = __shfl_xor_sync(kAll, t % 2 ? dots[1] : dots[3], 1);
            if (t < 2 && i + mine < end) {
              const float d[4] = {t ? even : dots[0], t ? odd : dots[1], t ? dots[2] : even, t ? dots[3] : odd};
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
          if (corner_row < 4) {
            auto* to = planes + (corner_row * kSlots + slot) * kChannels + t * 8;
            const A low[4] = {sums[0][0] + sums[0][2], sums[0][1] + sums[0][3], sums[1][0] + sums[1][2],
                              sums[1][1] + sums[1][3]};
            const A high[4] = {sums[2][0] + sums[2][2], sums[2][1] + sums[2][3], sums[3][0] + sums[3][2],
                               sums[3][1] + sums[3][3]};
            store_pack<A, 4>(to, low);
            store_pack<A, 4>(to + 4, high);
          }
        }
      } else {
        const int mine = lane % kBatch;  // the record of a batch that this lane prepares
        Record<A> next = load_record(slot_begin[group] + mine, slot_end[group]);
        for (int slot = group; slot < kSlots; slot += kGroups) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kGroups >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kGroups];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kGroups];
          // The groups of a warp walk together, as long as the longest.
          int32_t turns = end > begin ? (end - begin + step - 1) / step : 0;
#pragma unroll
          for (int s = LANES; s < 32; s *= 2) turns = max(turns, __shfl_xor_sync(kAll, turns, s));
          A sum[4][VEC] = {};
          A corner[4][VEC] = {};
          bool owns = false;  // of two tiles that walk the cell, the one it begins in writes the samples' own gradients
          if (turns == 0) {
            next = load_record(next_begin + mine, next_end);
          } else {
            int x_in_tile, y_in_tile;
            cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
            const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
            owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
            const bool reads = begin < end && has_channels && owns;
            const bool left = x > 0 && reads, right = x < level.W && reads, top = y > 0, bottom = y < level.H;
            const bool is_inside[4] = {top && left, top && right, bottom && left, bottom && right};
            const int32_t texel = level.start + (y - 1) * level.W + x - 1;
            const int32_t texels[4] = {texel, texel + 1, texel + level.W, texel + level.W + 1};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (is_inside[k])
                load_pack<T, VEC>(value_base + static_cast<uint64_t>(static_cast<uint32_t>(texels[k])) * row_bytes,
                                  corner[k]);
            }
          }
          for (int32_t turn = 0, i = begin; turn < turns; ++turn, i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits;
            if (lane < kBatch) {
              Pack<A, 4> corner_weights;
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              corner_weights.at[1] = top * record.fx, corner_weights.at[0] = top - corner_weights.at[1];
              corner_weights.at[3] = bottom * record.fx, corner_weights.at[2] = bottom - corner_weights.at[3];
              reinterpret_cast<Pack<A, 4>*>(my_weights)[mine] = corner_weights;
              my_queries[mine] = q;
            }
            __syncwarp();  // the batch is complete
            Pack<T, VEC> g_pack[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) g_pack[u].at[v] = from_accumulate<T>(A(0));
              if (has_channels && i + u < end) {
                g_pack[u] = *reinterpret_cast<const Pack<T, VEC>*>(
                    g_base + static_cast<uint64_t>(static_cast<uint32_t>(my_queries[u])) * row_bytes);
              }
            }
            const bool exists = i + mine < end;
            if (turn + 1 < turns) {
              next = load_record(i + step + mine, end);
            } else {
              next = load_record(next_begin + mine, next_end);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
              const Pack<A, 4> corner_weights = reinterpret_cast<const Pack<A, 4>*>(my_weights)[u];
              A g_out[VEC];
              unpack(g_pack[u], g_out);
#pragma unroll
              for (int v = 0; v < VEC; ++v) {
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k][v] += corner_weights.at[k] * g_out[v];
              }
            }
            __syncwarp();  // the batch has been read
            A d[4];        // lane i: the dots of record i % kBatch
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              A dot[kBatch] = {};
#pragma unroll
              for (int u = 0; u < kBatch; ++u) {
                A g_out[VEC];
                unpack(g_pack[u], g_out);
#pragma unroll
                for (int v = 0; v < VEC; ++v) dot[u] += corner[k][v] * g_out[v];
              }
              d[k] = dot[0];
              if constexpr (kBatch == 2) d[k] = exchange(kAll, lane & 1, dot[0], dot[1], 1);
              if constexpr (kBatch == 4) {
                const A even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
                const A odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
                d[k] = exchange(kAll, lane & 2, even, odd, 2);
              }
#pragma unroll
              for (int s = kBatch; s < LANES; s *= 2) d[k] += __shfl_xor_sync(kAll, d[k], s);
            }
            if (owns && exists && lane < kBatch) {
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            store_pack<A, VEC>(planes + (k * kSlots + slot) * kChannels + lane * VEC, sum[k]);
          }
        }
      }
      __syncthreads();  // the slots' sums are complete
      for (int texel = group; texel < texels_x * texels_y; texel += kGroups) {
        const int y_in_tile = static_cast<uint32_t>(texel) * texels_x_inverse >> 16,
                  x_in_tile = texel - y_in_tile * texels_x;
        const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
        if (x >= level.W || y >= level.H || !has_channels) continue;
        A sum[VEC] = {};
        T* to = grad_value + image_value + c + (level.start + static_cast<int64_t>(y) * level.W + x) * (G * C);
        if (add) load_pack<T, VEC>(to, sum);
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // the texel is corner k of this cell
          const int cell = (y_in_tile + 1 - k / 2) * tile.cells_x + x_in_tile + 1 - k % 2;
#pragma unroll 1
          for (int part = 0; part < 1 << tile.part_bits; ++part) {
            A of_part[VEC];
            load_pack<A, VEC>(planes + (k * kSlots + (cell << tile.part_bits) + part) * kChannels + lane * VEC,
                              of_part);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += of_part[v];
          }
        }
        store_pack<T, VEC>(to, sum);
      }
      __syncthreads();  // planes and slots may be written again
    }
  }
}

// Lanes of a warp in the group of `size` threads that this thread belongs to.
template <int SIZE>
__device__ __forceinline__ unsigned group_mask() {
  if constexpr (SIZE == 32) return 0xffffffffu;
  return ((1u << (SIZE % 32)) - 1) << (threadIdx.x % 32 / SIZE * SIZE);
}

// Few samples (a decoder), where sorting over the whole pyramid does not pay: a group of LANES threads takes one
// sample, adds to the four rows of grad_sums, which was zeroed, and works out the sample's own gradients.
template <typename T, typename A, typename Source, int VEC, int LANES>
__global__ void __launch_bounds__(kSampleThreads)
    direct_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const Source source, A* __restrict__ grad_sums, const SampleGrads<A> grads,
                  const MsDeformAttnProblem problem) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, static_cast<int>(problem.L), table);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kSampleThreads + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int64_t row = index / problem.K, query = row / problem.G, b = query / problem.Q;
  if (b >= problem.B) return;
  const int g = static_cast<int>(row - query * problem.G), k = static_cast<int>(index - row * problem.K);
  int l = 0;
  while (k >= table[l].level.end) ++l;
  const Level level = table[l].level;
  typename Source::Raw raw = source.fetch_position(index, query * problem.L + l);
  source.fetch_weight(index, raw);
  const A weight = source.weight(raw, source.row_at(row));
  A x, y;
  source.position(raw, level, table[l].points, x, y);
  Bilinear<A> at;
  const bool counts = level.H > 0 && locate(x, y, level.H, level.W, at);
  A dot[4] = {}, corner_weights[4];
  if (counts) {
    at.corner_weights(corner_weights);
    const int64_t C = problem.C, image = (b * problem.S * problem.G + g) * C;
    for (int64_t c = lane * VEC; c < C; c += LANES * VEC) {
      A g_out[VEC];
      load_pack<T, VEC>(grad_output + row * C + c, g_out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!at.is_inside[i]) continue;
        const int64_t offset = image + (level.start + static_cast<int64_t>(at.index[i])) * problem.G * C + c;
        A corner[VEC], part[VEC];
        load_pack<T, VEC>(value + offset, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          dot[i] += corner[v] * g_out[v];
          part[v] = corner_weights[i] * weight * g_out[v];
        }
        add_pack<VEC>(grad_sums + offset, part);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[i] += __shfl_xor_sync(group_mask<LANES>(), dot[i], step);
    }
  }
  if (lane > 0) return;
  if (!counts) {
    const A nothing = level.H > 0 ? A(0) : quiet_nan<A>();
    return grads.put(index, weight, nothing, nothing, nothing, false);
  }
  const A top = dot[0] + at.fx * (dot[1] - dot[0]), bottom = dot[2] + at.fx * (dot[3] - dot[2]);
  const A left = dot[2] - dot[0], right = dot[3] - dot[1];
  grads.put(index, weight, top + at.fy * (bottom - top),
            level.W * weight * ((dot[1] - dot[0]) + at.fy * (right - left)),
            level.H * weight * (left + at.fx * (right - left)), false);
}

// The backward of an encoder, whose queries are the pyramid's own texels. A block owns a chunk of the queries of one
// head in the order of regions, so that its samples share most of their texels. Level after level, and kPassPoints
// samples of a query at a time, it sorts the samples by their square of texels (see first_texel()) in shared memory;
// then each group of LANES threads walks as many of them as any other, with the square's values and gradients in
// registers and the rows of grad_output in shared memory. Where the walk leaves a texel, it adds the texel's gradient
// to grad_sums by one reduction, which other blocks and groups do, too; from a square to its right neighbour only two
// texels change. The dots with the four texels, of which the sample's own gradients are made, take its place in shared
// memory.
constexpr int kChunkThreads = 512;
constexpr int kSoftmaxLanes = 4;  // that work out the fused form's softmax of a row
constexpr int kPassPoints = 4;
constexpr int kChunkEach = 3;  // samples a thread locates in a pass, at the most
constexpr int kMaxChunk = kChunkThreads * kChunkEach / kPassPoints;
constexpr int64_t kChunkShared = 80 << 10;  // of a block, two on a multiprocessor; the rest is first-level cache
constexpr int64_t kScanShared = 64;         // bytes that sum_before() declares in a block of 512 threads
// Squares that lie 64 columns or 32 rows apart share a bucket, which costs reductions only.
constexpr int kColumnBits = 6, kBuckets = 4 * kChunkThreads;

struct ChunkSizes {
  int64_t S, rows;  // rows: B * G * Q
  int32_t Q, G, C, L, K;
  uint32_t share;  // queries of a block
};

// Shared memory of a block that owns so many queries.
int64_t chunk_bytes(const MsDeformAttnProblem& problem, int64_t element, bool has_softmax, int64_t queries) {
  const int64_t of_query = kPassPoints * (sizeof(Pack<float, 4>) + sizeof(uint16_t)) + problem.C * element +
                           sizeof(uint32_t) + (has_softmax ? sizeof(SoftmaxRow<float>) : 0);
  return queries * of_query + kBuckets * sizeof(uint16_t) + problem.L * static_cast<int64_t>(sizeof(Level));
}

// order[i] = the query that is number i; from the first to the last unless the levels follow one another.
constexpr int kOrderQueryThreads = 1024, kOrderQueryBlocks = 32;
__global__ void __launch_bounds__(kOrderQueryThreads)
    order_queries_kernel(const Levels levels, const Regions known, int L, int64_t S, uint32_t* __restrict__ order) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<Level*>(shared);  // [L]
  const bool follow = load_levels(levels, L, S, table);
  const auto level_at = [&](int l) { return table[l]; };
  const Regions regions = levels.by_value() ? known : Regions::of(L, level_at);
  const uint32_t Q = static_cast<uint32_t>(S), share = (Q + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  if (first >= Q) return;
  const uint32_t count = min(share, Q - first);
  if (!follow || !regions.fit) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = first + i;
    return;
  }
  const RegionTable places(regions, L, level_at, reinterpret_cast<char*>(table + L));
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = places.query_at(first + i);
}

// One load of values, unpacked at once: bfloat16 that is unpacked where it is used takes registers in both forms (an
// encoder's backward 343 instead of 337 us, the fused form's 412 instead of 399).
template <typename T, int VEC>
__device__ __forceinline__ void load_now(const T* from, float (&to)[VEC]) {
  load_pack<T, VEC>(from, to);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) asm volatile("" : "+f"(to[v]));
  }
}

// The walk of one group over `count` samples, list[0] and on; `turns` is at least that, and the same for the whole
// block. value and sums: of the level's first texel, at the lane's channels, if it has any; rows: of its channels.
template <typename T, int LANES>
__device__ __forceinline__ void walk_samples(const uint16_t* list, int count, int turns, Pack<float, 4>* samples,
                                             const T* rows, const T* value, float* sums, const Level& level,
                                             uint32_t texel_step, int C, bool has_channels) {
  constexpr int VEC = 4;
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t right = level.W > 1 ? 1 : 0, below = level.H > 1 ? level.W : 0;
  const int lane = threadIdx.x % LANES;
  float sum[4][VEC] = {}, corner[4][VEC] = {};
  uint32_t texel = 0;  // the upper left one of the square
  const auto leave = [&](bool to_right) {
    float* upper = sums + static_cast<uint64_t>(texel) * texel_step;
    float* lower = sums + static_cast<uint64_t>(texel + below) * texel_step;
    add_pack<VEC>(upper, sum[0]);
    add_pack<VEC>(lower, sum[2]);
    if (!to_right) {
      add_pack<VEC>(upper + right * texel_step, sum[1]);
      add_pack<VEC>(lower + right * texel_step, sum[3]);
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      sum[0][v] = to_right ? sum[1][v] : 0.f, sum[2][v] = to_right ? sum[3][v] : 0.f;
      sum[1][v] = sum[3][v] = 0;
    }
  };
  const auto enter = [&](uint32_t next, bool to_right) {
    const T* upper = value + static_cast<uint64_t>(next) * texel_step;
    const T* lower = value + static_cast<uint64_t>(next + below) * texel_step;
#pragma unroll
    for (int v = 0; v < VEC; ++v) corner[0][v] = corner[1][v], corner[2][v] = corner[3][v];
    load_now<T, VEC>(upper + right * texel_step, corner[1]);
    load_now<T, VEC>(lower + right * texel_step, corner[3]);
    if (!to_right) {
      load_now<T, VEC>(upper, corner[0]);
      load_now<T, VEC>(lower, corner[2]);
    }
  };
  const bool walks = count > 0 && has_channels;
  uint32_t id = count > 0 ? *list : 0;
  if (walks) texel = __float_as_uint(samples[id].at[0]), enter(texel, false);
#pragma unroll 1
  for (int turn = turns; turn > 0; --turn, --count) {
    const bool exists = count > 0, has_next = count > 1;
    ++list;
    const uint32_t next_id = has_next ? *list : id;
    Pack<float, 4> sample = {};
    float g_out[VEC] = {};
    if (exists) sample = samples[id];
    if (exists && has_channels) load_now<T, VEC>(rows + (id / kPassPoints) * C, g_out);
    const uint32_t next = has_next ? __float_as_uint(samples[next_id].at[0]) : texel;
    const float weight = sample.at[3];
    const float bottom = sample.at[2] * weight, top = weight - bottom;
    const float right_top = top * sample.at[1], right_bottom = bottom * sample.at[1];
    const float weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
    float dot[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[k][v] += weights[k] * g_out[v], dot[k] += corner[k][v] * g_out[v];
    }
    // Before the dots are reduced, so that the loads are under way meanwhile.
    if (has_channels && next != texel) {
      const bool to_right = next - texel == right;
      enter(next, to_right);
      leave(to_right);
      texel = next;
    }
    const float even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
    const float odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
    float mine = exchange(kAll, lane & 2, even, odd, 2);  // lane i: of corner i % 4
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) mine += __shfl_xor_sync(kAll, mine, step);
    __syncwarp();  // the sample has been read
    if (exists && lane < 4) samples[id].at[lane] = mine;
    id = next_id;
  }
  if (walks) leave(false);
}

// Of a sample at x that counts, along one axis of `size` texels: from the dots with the two texels of its moved square
// to those with the two texels that it lies between, zero outside the map.
__device__ __forceinline__ Pack<float, 2> unmove(float x, int32_t size, float first, float second) {
  const float from = floor(x);
  if (from < 0) return {0.f, first};
  if (from > size - 2) return {size > 1 ? second : first, 0.f};
  return {first, second};
}

// From the dots with the texels of its moved square.
struct SampleGradient {
  float weight, x, y;
};
__device__ __forceinline__ SampleGradient sample_gradient(const Pack<float, 4>& dots, float x, float y, float weight,
                                                          const Level& level) {
  const Pack<float, 2> upper = unmove(x, level.W, dots.at[0], dots.at[1]),
                       lower = unmove(x, level.W, dots.at[2], dots.at[3]),
                       left = unmove(y, level.H, upper.at[0], lower.at[0]),
                       right = unmove(y, level.H, upper.at[1], lower.at[1]);
  const float fx = x - floor(x), fy = y - floor(y);
  const float top_x = right.at[0] - left.at[0], bottom_x = right.at[1] - left.at[1];
  const float left_y = left.at[1] - left.at[0], right_y = right.at[1] - right.at[0];
  const float top = left.at[0] + fx * top_x, bottom = left.at[1] + fx * bottom_x;
  return {top + fy * (bottom - top), level.W * weight * (top_x + fy * (bottom_x - top_x)),
          level.H * weight * (left_y + fx * (right_y - left_y))};
}

// An offset's gradient, by one store unless gaps between queries leave it unaligned.
template <typename I, typename A>
__device__ __forceinline__ void put_pair(I* to, const A (&pair)[2], int64_t gap) {
  if (gap % 2 == 0) {
    store_pack<I, 2>(to, pair);
  } else {
    to[0] = from_accumulate<I>(pair[0]), to[1] = from_accumulate<I>(pair[1]);
  }
}

// The gradients of a sample to which nothing will be added. The fused form's offset may get its own at once; then only
// the weight's waits for the row's others (softmax_grad_kernel), 4 bytes a sample instead of 16.
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index, const GivenSamples<float>&,
                                         const GivenSamples<float>::Raw&, int64_t /*query*/, const Level&,
                                         int /*points*/, float weight, const SampleGradient& grad) {
  to.put(index, weight, grad.weight, grad.x, grad.y, false);
}
template <typename T>
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index,
                                         const FusedSamples<T, float>& source,
                                         const typename FusedSamples<T, float>::Raw& raw, int64_t query,
                                         const Level& level, int points, float weight, const SampleGradient& grad) {
  if (to.offsets == nullptr) return to.put(index, weight, grad.weight, grad.x, grad.y, false);
  to.weights[index] = grad.weight;
  const Pack<float, 2> of_offset = source.grad_offset(raw, level, points, grad.x, grad.y);
  const int64_t place = 2 * index + query * to.offset_gap;
  if (source.full_precision) {
    put_pair(reinterpret_cast<float*>(to.offsets) + place, of_offset.at, to.offset_gap);
  } else {
    put_pair(reinterpret_cast<T*>(to.offsets) + place, of_offset.at, to.offset_gap);
  }
}

template <typename T, typename Source, int LANES>
__global__ void __launch_bounds__(kChunkThreads, 2)
    pyramid_grad_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const Levels levels,
                        const uint32_t* __restrict__ order, const Source source, float* __restrict__ grad_sums,
                        const SampleGrads<float> grads, const ChunkSizes sizes) {
  constexpr int VEC = 4, kGroups = kChunkThreads / LANES;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C;
  const uint32_t Q = sizes.Q, share = sizes.share;
  // By place in the chunk and point: texel of the level, fractions, weight; later the four dots.
  auto* samples = reinterpret_cast<Pack<float, 4>*>(shared);              // [share, kPassPoints]
  auto* table = reinterpret_cast<Level*>(samples + share * kPassPoints);  // [L]
  auto* buckets = reinterpret_cast<uint16_t*>(table + L);                 // [kBuckets] counts, then starts
  auto* rows = reinterpret_cast<T*>(buckets + kBuckets);                  // [share, C] of grad_output
  auto* softmax = reinterpret_cast<typename Source::Row*>(rows + static_cast<size_t>(share) * C);  // [share] or nothing
  auto* queries = reinterpret_cast<uint32_t*>(softmax + (Source::kNeedsLevel ? share : 0));        // [share]
  auto* sorted = reinterpret_cast<uint16_t*>(queries + share);  // [share * kPassPoints]
  auto* my_buckets = reinterpret_cast<Pack<uint16_t, 4>*>(buckets) + threadIdx.x;
  const int group = threadIdx.x / LANES, c = threadIdx.x % LANES * VEC;
  const bool has_channels = c < C;
  const uint32_t texel_step = G * C;

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * share;
  uint32_t head = static_cast<uint32_t>(begin / Q),
           first = static_cast<uint32_t>(begin - static_cast<int64_t>(head) * Q);
  uint32_t left = static_cast<uint32_t>(min(sizes.rows - begin, static_cast<int64_t>(share)));
  *my_buckets = {};
  load_levels(levels, L, sizes.S, table);
  const auto first_of = [&](int l) { return l > 0 ? table[l - 1].end : 0; };  // of a row's samples on the level
  while (left > 0) {  // a head after the other, or what of it is the block's
    const uint32_t count = min(left, Q - first);
    for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) queries[i] = order[first + i];
    __syncthreads();  // the list is complete
    const uint32_t b = head / G, g = head - b * G;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, image_rows * K);
    const T* image_output = grad_output + (image_rows + g) * C + c;
    for (uint32_t i = group; i < count; i += kGroups) {
      if (!has_channels) break;
      *reinterpret_cast<Pack<T, VEC>*>(rows + i * C + c) = load_once(
          reinterpret_cast<const Pack<T, VEC>*>(image_output + static_cast<int64_t>(queries[i]) * texel_step));
    }
    const int64_t image_value = (static_cast<int64_t>(b) * sizes.S * G + g) * C + c;
    if constexpr (Source::kNeedsLevel) {
      const int lane = threadIdx.x % kSoftmaxLanes;
#pragma unroll 1
      for (uint32_t i = threadIdx.x / kSoftmaxLanes; i - threadIdx.x / kSoftmaxLanes < count;
           i += kChunkThreads / kSoftmaxLanes) {
        const bool exists = i < count;
        const auto row = image.row_of_lanes(exists, exists ? (queries[i] * G + g) * K : 0, K, lane, kSoftmaxLanes);
        if (exists && lane == 0) softmax[i] = row;
      }
      __syncthreads();  // the rows' softmax is known
    }

    int pass = 0;
#pragma unroll 1
    for (int l = 0; l < L; first_of(l) + pass + kPassPoints < table[l].end ? pass += kPassPoints : (pass = 0, ++l)) {
      Level level = table[l];
      int first_point = first_of(l) + pass, points = level.end - first_of(l);
      uint32_t pass_points = min(level.end - first_point, kPassPoints);
      typename Source::Raw raw[kChunkEach];
      uint32_t place_of[kChunkEach];  // bucket and rank
      const auto id_of = [&](int j) { return threadIdx.x + j * kChunkThreads; };
      const auto exists = [&](int j) { return id_of(j) / kPassPoints < count && id_of(j) % kPassPoints < pass_points; };
      const auto row_of = [&](int j) { return queries[id_of(j) / kPassPoints] * G + g; };
      const auto weight_of = [&](int j) {
        typename Source::Row row;
        if constexpr (Source::kNeedsLevel) row = softmax[id_of(j) / kPassPoints];
        return source.weight(raw[j], row);
      };
      const auto fetch = [&] {
        uint32_t entry = b;
        // What follows from a number of unknown origin is worked out again instead of being kept during the walk.
        if constexpr (Source::kNeedsLevel && sizeof(T) == 4) asm volatile("" : "+r"(entry));
        const Source of_entry =
            source.of_image(static_cast<int64_t>(entry) * Q * L, static_cast<int64_t>(entry) * Q * G * K);
#pragma unroll
        for (int j = 0; j < kChunkEach; ++j) {
          raw[j] = {};
          if (!exists(j)) continue;
          const uint32_t at = row_of(j) * K + first_point + id_of(j) % kPassPoints;
          raw[j] = of_entry.template fetch_position<true, true>(at, queries[id_of(j) / kPassPoints] * L + l);
          of_entry.template fetch_weight<true, true>(at, raw[j]);
        }
      };
      const auto position = [&](int j, float& x, float& y) {  // whether the sample counts
        source.position(raw[j], level, points, x, y);
        return level.H > 0 && x > -1 && y > -1 && x < level.W && y < level.H;
      };
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        place_of[j] = ~0u;
        float x, y, fx, fy, part_x, part_y;
        if (!position(j, x, y) || !exists(j)) continue;
        const int32_t x0 = first_texel(x, level.W, fx, part_x), y0 = first_texel(y, level.H, fy, part_y);
        const float weight = weight_of(j);
        samples[id_of(j)] = {__int_as_float(y0 * level.W + x0), fx, fy, weight * (part_x * part_y)};
        const uint32_t bucket = (y0 << kColumnBits | (x0 & ((1 << kColumnBits) - 1))) & (kBuckets - 1);
        const uint32_t shift = bucket % 2 * 16;
        const uint32_t before = atomicAdd(reinterpret_cast<uint32_t*>(buckets) + bucket / 2, 1u << shift) >> shift;
        place_of[j] = bucket << 16 | (before & 0xffffu);
      }
      __syncthreads();  // the buckets are counted
      const Pack<uint16_t, 4> counts = *my_buckets;
      int32_t listed,
          start = sum_before<kChunkThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], listed);
      Pack<uint16_t, 4> starts;
#pragma unroll
      for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
      *my_buckets = starts;
      __syncthreads();  // the buckets' starts are known
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (place_of[j] != ~0u) sorted[buckets[place_of[j] >> 16] + (place_of[j] & 0xffffu)] = id_of(j);
      }
      __syncthreads();  // the samples are sorted
      *my_buckets = {};
      const int turns = (listed + kGroups - 1) / kGroups, from = group * turns;
      const int64_t level_value = image_value + static_cast<int64_t>(level.start) * texel_step;
      walk_samples<T, LANES>(sorted + from, min(turns, listed - from), turns, samples, rows + c, value + level_value,
                             grad_sums + level_value, level, texel_step, C, has_channels);
      __syncthreads();                      // the dots are complete
      if constexpr (Source::kNeedsLevel) {  // once more, for want of registers during the walk
        level = table[l], first_point = first_of(l) + pass, points = level.end - first_of(l);
        pass_points = min(level.end - first_point, kPassPoints);
      }
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (!exists(j)) continue;
        const int64_t row = image_rows + row_of(j);
        const float weight = weight_of(j);
        const float nothing = level.H > 0 ? 0.f : quiet_nan<float>();
        SampleGradient grad = {nothing, nothing, nothing};
        float x, y;
        if (position(j, x, y)) grad = sample_gradient(samples[id_of(j)], x, y, weight, level);
        put_once(grads, row * K + first_point + id_of(j) % kPassPoints, source, raw[j],
                 static_cast<int64_t>(b) * Q + queries[id_of(j) / kPassPoints], level, points, weight, grad);
      }
    }
    left -= count, ++head, first = 0;
    if (left > 0) __syncthreads();  // the list and the rows have been read
  }
}

// What the fused form does besides, before and after the kernels above.
constexpr int kRowThreads = 256;

// The lanes of a warp that share a row's K samples.
inline int row_lanes_of(int64_t K) {
  int lanes = 1;
  while (lanes < 32 && lanes < K) lanes *= 2;
  return lanes;
}

// kSoftmaxLanes a row: its softmax.
template <typename T, typename A>
__global__ void __launch_bounds__(kRowThreads)
    softmax_kernel(const FusedSamples<T, A> source, SoftmaxRow<A>* __restrict__ rows, int64_t count, int K) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kSoftmaxLanes;
  const int lane = threadIdx.x % kSoftmaxLanes;
  const auto of_row = source.of_image(0, row * K);
  const auto softmax = of_row.row_of_lanes(row < count, 0, K, lane, kSoftmaxLanes);
  if (row < count && lane == 0) rows[row] = softmax;
}

// The gradients of offsets and logits: of two tensors, or of one that has a query's offsets and then its logits.
template <typename I>
struct PredictionGrads {
  I *offsets, *logits;                    // [B, Q, G, K, 2] and [B, Q, G, K]
  int64_t offset_gap = 0, logit_gap = 0;  // elements between a query's and the next one's
};

// A few lanes a row: from the gradients of locations and weights to those of offsets and logits, which are of type I.
template <typename T, typename A, typename I>
__global__ void __launch_bounds__(kRowThreads)
    fused_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<T, A> source,
                      const Pack<A, 4>* __restrict__ sample_grads, const PredictionGrads<I> grads, int64_t count, int G,
                      int L, int K, int lanes) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, L, table);
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const bool exists = row < count;
  const Pack<A, 4>* of_row = sample_grads + row * K;
  const int64_t query = row / G;
  A mean = 0;  // of the weights' gradients
  for (int k = lane; exists && k < K; k += lanes) mean += of_row[k].at[0] * of_row[k].at[1];
  for (int step = 1; step < lanes; step *= 2) mean += __shfl_xor_sync(0xffffffffu, mean, step);
  int l = 0;
  for (int k = lane; exists && k < K; k += lanes) {
    while (k >= table[l].level.end) ++l;
    const Pack<A, 4> grad = of_row[k];
    typename FusedSamples<T, A>::Raw raw;
    if (source.boxes) source.fetch_reference(query * L + l, raw);
    const Pack<A, 2> of_offset = source.grad_offset(raw, table[l].level, table[l].points, grad.at[2], grad.at[3]);
    put_pair(grads.offsets + 2 * (row * K + k) + query * grads.offset_gap, of_offset.at, grads.offset_gap);
    grads.logits[row * K + k + query * grads.logit_gap] = from_accumulate<I>(grad.at[0] * (grad.at[1] - mean));
  }
}

// kSoftmaxLanes a row: from the gradients of its weights to those of its logits.
template <typename T, typename A, typename I>
__global__ void __launch_bounds__(kRowThreads)
    softmax_grad_kernel(const FusedSamples<T, A> source, const A* __restrict__ grad_weights,
                        const PredictionGrads<I> grads, int64_t count, int G, int K) {
  constexpr int kEach = 4, kTurn = kEach * kSoftmaxLanes;  // kEach: loads in flight
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kSoftmaxLanes, first = row * K;
  const int lane = threadIdx.x % kSoftmaxLanes;
  const bool exists = row < count;
  const auto of_row = source.of_image(0, first);
  typename FusedSamples<T, A>::Raw raw[kEach];
  A grad[kEach];
  const auto has = [&](int k0, int i) { return exists && k0 + i * kSoftmaxLanes + lane < K; };
  const auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = k0 + i * kSoftmaxLanes + lane;
      raw[i].weight = grad[i] = 0;
      if (has(k0, i)) of_row.fetch_weight(k, raw[i]), grad[i] = grad_weights[first + k];
    }
  };
  fetch(0);
  const SoftmaxRow<A> softmax = K <= kTurn
                                    ? of_row.template row_of_raw<kSoftmaxLanes>(raw, [&](int i) { return has(0, i); })
                                    : of_row.row_of_lanes(exists, 0, K, lane, kSoftmaxLanes);
  A mean = 0;  // of the weights' gradients
  for (int k0 = 0; k0 < K; k0 += kTurn) {
    if (k0 > 0) fetch(k0);
#pragma unroll
    for (int i = 0; i < kEach; ++i) mean += has(k0, i) ? of_row.weight(raw[i], softmax) * grad[i] : A(0);
  }
  for (int step = 1; step < kSoftmaxLanes; step *= 2) mean += __shfl_xor_sync(0xffffffffu, mean, step);
  I* const grad_logits = grads.logits + (grads.logit_gap > 0 ? row / G * grads.logit_gap : 0);
  for (int k0 = 0; k0 < K; k0 += kTurn) {
    if (K > kTurn) fetch(k0);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!has(k0, i)) continue;
      const A of_logit = of_row.weight(raw[i], softmax) * (grad[i] - mean);
      grad_logits[first + k0 + i * kSoftmaxLanes + lane] = from_accumulate<I>(of_logit);
    }
  }
}

// A thread a (b, q, level): the gradient of its reference point, summed over heads and points in their order.
template <typename T, typename A>
__global__ void __launch_bounds__(kRowThreads)
    reference_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<T, A> source,
                          const Pack<A, 4>* __restrict__ sample_grads, A* __restrict__ grad_reference, int64_t count,
                          int G, int L, int K) {
  const int64_t query_level = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (query_level >= count) return;
  const int64_t query = query_level / L;
  const int l = static_cast<int>(query_level - query * L), first = plan[l].first_point, points = plan[l].points;
  const A share = A(0.5) / points;
  A sum[4] = {};
  for (int g = 0; g < G; ++g) {
    for (int p = 0; p < points; ++p) {
      const int64_t index = (query * G + g) * K + first + p;
      const Pack<A, 4> grad = sample_grads[index];
      sum[0] += grad.at[2], sum[1] += grad.at[3];
      if (source.boxes) {
        const Pack<A, 2> offset = source.offset_of(source.fetch_position(index, query_level));
        if (grad.at[2] != 0) sum[2] += grad.at[2] * offset.at[0] * share;
        if (grad.at[3] != 0) sum[3] += grad.at[3] * offset.at[1] * share;
      }
    }
  }
  for (int i = 0; i < (source.boxes ? 4 : 2); ++i) grad_reference[query_level * (source.boxes ? 4 : 2) + i] = sum[i];
}

// The bits of numbers up to `most`.
int bit_width(int64_t most) {
  int bits = 0;
  while (most >> bits > 0) ++bits;
  return bits;
}

// A record of the backward holds its query and its point in 31 bits.
int point_bits_of(const MsDeformAttnProblem& problem) { return bit_width(problem.P - 1); }
void check_backward_sizes(const MsDeformAttnProblem& problem) {
  check_sizes(problem);
  VISDET_CHECK("ms_deform_attn_backward", problem.Q <= (int64_t{INT32_MAX} >> point_bits_of(problem)),
               "Q * P must be under 2^31 with P rounded up to a power of two, got ", problem.Q, " * ", problem.P);
}

// The plan of the levels, on the device, from the first time that it is asked for.
class Plans {
 public:
  Plans(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& value, const Levels& levels)
      : problem_(problem), scope_(scope), value_(value), levels_(levels) {}

  const LevelPlan* get() {
    if (!plan_) {
      plan_ = new_empty(value_, {static_cast<int64_t>(sizeof(LevelPlan)) * problem_.L}, ScalarType::Byte);
      launch({kOp, "plan_kernel", scope_, 1, kPlanThreads}, plan_kernel, levels_, data(), static_cast<int>(problem_.L),
             problem_.S, problem_.Q);
    }
    return data();
  }

 private:
  LevelPlan* data() { return static_cast<LevelPlan*>(plan_->mutable_data_ptr()); }

  const MsDeformAttnProblem& problem_;
  const DeviceScope& scope_;
  const Tensor& value_;
  const Levels& levels_;
  std::optional<Tensor> plan_;
};

// A call of the backward, none of whose tensors is empty. Form says where samples come from and where their gradients
// go: form.source<T, A>(encoder) and form.grads<A>(encoder), encoder being pyramid_grad_kernel, which works out a row's
// softmax by itself, and writes by put_once().
template <typename Form>
struct BackwardCall {
  const MsDeformAttnProblem& problem;
  const DeviceScope& scope;
  const Levels& levels;
  Plans& plans;
  Form& form;
  const Tensor &grad_output, &value;
  bool deterministic;
  Tensor& grad_value;

  int64_t element() const { return static_cast<int64_t>(value.element_size()); }
  bool is_double() const { return element() == 8; }
  bool is_aligned() const { return aligned(value, 16) && aligned(grad_output, 16); }
};

// The path of few samples.
template <typename Form>
const char* direct_declines(const BackwardCall<Form>& call) {
  if (call.deterministic) return "it adds in no fixed order, and the call is deterministic";
  if (call.is_double()) return "the values are float64";
  const MsDeformAttnProblem& problem = call.problem;
  return problem.Q * problem.K <= kDirectSamples * problem.S ? nullptr : "there are more than 4 samples a texel";
}

template <typename Form>
void direct_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const LevelPlan* plan = call.plans.get();
  const bool is_float = call.value.scalar_type() == ScalarType::Float;
  Tensor sums = is_float ? zero_(call.grad_value) : new_zeros(call.value, call.value.sizes(), ScalarType::Float);
  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (sizeof(A) == 4) {
      const auto source = call.form.template source<T, A>(false);
      using Source = std::decay_t<decltype(source)>;
      // VEC: 16 bytes of sums, so that the lanes' reductions lie side by side.
      dispatch_row<4, 32>(row_split(problem.C, call.is_aligned(), 4, 32), [&](auto vec, auto lanes) {
        constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
        const int64_t samples = problem.B * problem.Q * problem.G * problem.K;
        launch({kOp, "direct_kernel", call.scope, ceil_div(samples * kLanes, kSampleThreads), kSampleThreads,
                static_cast<int64_t>(sizeof(LevelPlan)) * problem.L},
               direct_kernel<T, A, Source, kVec, kLanes>, static_cast<const T*>(call.grad_output.const_data_ptr()),
               static_cast<const T*>(call.value.const_data_ptr()), plan, source,
               static_cast<A*>(sums.mutable_data_ptr()), call.form.template grads<A>(false), problem);
      });
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

// The path of encoders.
struct ChunkPlan {
  int64_t share, shared, order_shared;  // share: queries of a block; 0: not one fits
};

template <typename Form>
ChunkPlan chunk_plan(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const int L = static_cast<int>(problem.L);
  const int64_t rows = problem.B * problem.G * problem.Q, slots = 2 * call.scope.device().multiprocessors;
  const auto bytes = [&](int64_t queries) { return chunk_bytes(problem, call.element(), Form::kHasSoftmax, queries); };
  const int64_t most_bytes = std::min(kChunkShared, call.scope.device().shared_for(2) - kScanShared);
  const int64_t each = bytes(1) - bytes(0);
  const int64_t most = std::min<int64_t>(kMaxChunk, (most_bytes - bytes(0)) / each);
  ChunkPlan plan{};
  plan.order_shared =
      static_cast<int64_t>(sizeof(Level)) * L + static_cast<int64_t>(region_bytes(L, known_regions(call.levels, L)));
  if (most < 1) return plan;
  const int64_t waves = ceil_div(rows, slots * most);
  plan.share = ceil_div(rows, slots * waves), plan.shared = bytes(plan.share);
  return plan;
}

template <typename Form>
const char* encoder_declines(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (call.deterministic) return "it adds in no fixed order, and the call is deterministic";
  if (problem.Q != problem.S) return "the queries are not the texels of the pyramid (Q is not S)";
  if (call.is_double()) return "the values are float64";
  if (problem.C > 128) return "a row of value has more than 128 channels";
  if (row_split(problem.C, call.is_aligned(), 4, 32).vec != 4) return "rows cannot be read 4 channels at a time";
  // check_sizes sees to samples, texels and heads
  if (problem.Q * problem.L > INT32_MAX) return "Q * L is 2^31 or more";
  const ChunkPlan plan = chunk_plan(call);
  if (plan.share == 0 || plan.order_shared > 48 << 10) return "a block has too little shared memory";
  return nullptr;
}

template <typename Form>
void encoder_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const int L = static_cast<int>(problem.L);
  const ChunkPlan plan = chunk_plan(call);
  const int64_t rows = problem.B * problem.G * problem.Q;
  const bool is_float = call.value.scalar_type() == ScalarType::Float;
  Tensor sums = is_float ? zero_(call.grad_value) : new_zeros(call.value, call.value.sizes(), ScalarType::Float);
  Tensor order = new_empty(call.value, {problem.Q}, ScalarType::Int);
  auto* order_data = static_cast<uint32_t*>(order.mutable_data_ptr());
  launch({kOp, "order_queries_kernel", call.scope, kOrderQueryBlocks, kOrderQueryThreads, plan.order_shared},
         order_queries_kernel, call.levels, known_regions(call.levels, L), L, problem.S, order_data);
  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (sizeof(A) == 4) {
      const auto source = call.form.template source<T, A>(true);
      using Source = std::decay_t<decltype(source)>;
      dispatch_row<4, 32>(row_split(problem.C, call.is_aligned(), 4, 32), [&](auto vec, auto lanes) {
        if constexpr (decltype(vec)::value == 4) {
          launch({kOp, "pyramid_grad_kernel", call.scope, ceil_div(rows, plan.share), kChunkThreads, plan.shared,
                  kScanShared},
                 pyramid_grad_kernel<T, Source, decltype(lanes)::value>,
                 static_cast<const T*>(call.grad_output.const_data_ptr()),
                 static_cast<const T*>(call.value.const_data_ptr()), call.levels, order_data, source,
                 static_cast<float*>(sums.mutable_data_ptr()), call.form.template grads<A>(true),
                 ChunkSizes{problem.S, rows, static_cast<int32_t>(problem.Q), static_cast<int32_t>(problem.G),
                            static_cast<int32_t>(problem.C), L, static_cast<int32_t>(problem.K),
                            static_cast<uint32_t>(plan.share)});
        }
      });
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

// The path of everything else: samples sorted by cell, and gathered.
struct SortedSizes {
  int64_t head_slots, head_bins, tiles;  // of a head
};

template <typename Form>
SortedSizes sorted_sizes(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  SortedSizes sizes{};
  if (!call.levels.by_value()) {              // only the device knows: bounds, and blocks take further tiles
    const int64_t cells = 2 * problem.S + 2;  // at most: H + W <= S + 1 of any level
    sizes.head_slots = problem.L * (cells + 1);
    sizes.head_bins = 2 * problem.Q * problem.K / kBinSamples + problem.L * ((cells >> kMaxBinBits) + 2);
    sizes.tiles = ceil_div(problem.S, 64) + problem.L;
    return sizes;
  }
  for (int l = 0; l < static_cast<int>(problem.L); ++l) {
    const int64_t H = call.levels.H[l], W = call.levels.W[l], samples = problem.Q * points_on(call.levels, l),
                  cells = cells_of(H, W);
    sizes.head_slots += cells + 1;
    sizes.head_bins += bins_of(cells, bin_bits_of(samples, cells)) + 1;
    sizes.tiles += tiles_of(tile_of_shape(tile_shape_of(samples, H, W)), H, W);
  }
  return sizes;
}

template <typename T, typename A, typename Form>
void sort_samples(const BackwardCall<Form>& call, const SortedSizes& sizes, const SampleGrads<A>& grads,
                  int32_t* starts, Record<A>* records, Record<A>* sorted) {
  const MsDeformAttnProblem& problem = call.problem;
  const int64_t heads = problem.B * problem.G;
  const int point_bits = point_bits_of(problem), head_bins = static_cast<int>(sizes.head_bins);
  const LevelPlan* plan = call.plans.get();
  // Where the bins' records start, and how far they are filled.
  Tensor bins = new_zeros(call.value, {2, heads * sizes.head_bins}, ScalarType::Int);
  auto* bin_starts = static_cast<int32_t*>(bins.mutable_data_ptr());
  int32_t* filled = bin_starts + heads * sizes.head_bins;
  const auto source = call.form.template source<T, A>(false);
  using Source = std::decay_t<decltype(source)>;

  constexpr int kEach = kPieceEach<A>;
  const uint32_t K = static_cast<uint32_t>(problem.K);
  const int64_t pieces = heads * ceil_div(problem.Q, PieceWalk::queries(K, kEach)) * PieceWalk::parts(K);
  const int64_t table_bytes = static_cast<int64_t>(sizeof(LevelPlan)) * problem.L;
  const int64_t staged_bytes = kPieceThreads * kEach * static_cast<int64_t>(sizeof(Record<A>) + sizeof(uint16_t));
  // Counted in shared memory, if they fit a block of scatter_kernel, which has two numbers for each.
  const int64_t room = call.scope.device().shared_block - kScanShared - staged_bytes - table_bytes;
  const bool is_local = sizes.head_bins <= std::min<int64_t>(kMostLocalBins, room / (2 * sizeof(int32_t)) - 1);
  const int local_bins = is_local ? head_bins : 0;
  const int64_t local_bytes = sizeof(int32_t) * (int64_t{local_bins} + 1);
  launch({kOp, "count_kernel", call.scope, pieces, kPieceThreads, table_bytes + local_bytes}, count_kernel<A, Source>,
         plan, source, bin_starts, grads, problem, head_bins, local_bins);
  launch({kOp, "scan_kernel", call.scope, heads * problem.L, kScanThreads}, scan_kernel, plan, bin_starts, problem,
         head_bins);
  launch({kOp, "scatter_kernel", call.scope, pieces, kPieceThreads, staged_bytes + table_bytes + 2 * local_bytes,
          kScanShared},
         scatter_kernel<A, Source>, plan, source, bin_starts, filled, records, problem, head_bins, local_bins,
         point_bits);
  launch({kOp, "sort_kernel", call.scope, head_grid(sizes.head_bins, heads), kSortThreads, sizeof(SortScratch<A>),
          kScanShared},
         sort_kernel<A>, plan, bin_starts, records, sorted, starts, problem, sizes.head_slots, head_bins,
         point_bits + std::max(1, bit_width(problem.Q - 1)), point_bits);
}

template <typename Form>
void sorted_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const SortedSizes sizes = sorted_sizes(call);
  const int64_t heads = problem.B * problem.G, samples = heads * problem.Q * problem.K;
  VISDET_CHECK(kOp, sizes.head_bins <= INT32_MAX, "Q * L * P and S are too large: ", sizes.head_bins, " bins");
  const LevelPlan* plan = call.plans.get();
  Tensor starts = new_empty(call.value, {heads * sizes.head_slots}, ScalarType::Int);
  auto* start_data = static_cast<int32_t*>(starts.mutable_data_ptr());
  launch({kOp, "zero_kernel", call.scope, call.scope.device().multiprocessors * 2, kZeroThreads}, zero_kernel, plan,
         static_cast<char*>(call.grad_value.mutable_data_ptr()), call.grad_value.numel() * call.element());

  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const int64_t record_bytes = samples * static_cast<int64_t>(sizeof(Record<A>));
    Tensor records = new_empty(call.value, {record_bytes}, ScalarType::Byte),
           sorted = new_empty(call.value, {record_bytes}, ScalarType::Byte);
    auto* sorted_data = static_cast<Record<A>*>(sorted.mutable_data_ptr());
    const SampleGrads<A> grads = call.form.template grads<A>(false);
    sort_samples<T, A>(call, sizes, grads, start_data, static_cast<Record<A>*>(records.mutable_data_ptr()),
                       sorted_data);
    // Of a row, at most 128 bytes of sums at a time: the planes of a tile's cells must fit shared memory.
    constexpr int kVecOfRow = kRowVec<T>, kMost = 128 / kVecOfRow / sizeof(A);
    dispatch_row<kVecOfRow, kMost>(
        row_split(problem.C, call.is_aligned(), kVecOfRow, kMost), [&](auto vec, auto lanes) {
          constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
          constexpr int kBatch = least(kLanes, 4), kGroups = kGatherThreads / kLanes;  // scratch enough for either way
          constexpr bool kTensorCores = std::is_same_v<T, __nv_bfloat16> && kVec * kLanes == kMmaChannels && kVec > 1;
          // No channels may be left over in the last turn, and the tensor cores know bfloat16 from sm_80 on.
          const bool multiplies = problem.C % kMmaChannels == 0 && call.scope.device().capability >= 80;
          const auto kernel =
              multiplies ? gather_kernel<T, A, kVec, kLanes, kTensorCores> : gather_kernel<T, A, kVec, kLanes, false>;
          const int64_t shared = sizeof(A) * 4 * kSlots * kLanes * kVec + kGroups * kBatch * (4 * sizeof(A) + 4);
          launch({kOp, "gather_kernel", call.scope, head_grid(sizes.tiles, heads), kGatherThreads, shared,
                  2 * kSlots * sizeof(int32_t)},
                 kernel, static_cast<const T*>(call.grad_output.const_data_ptr()),
                 static_cast<const T*>(call.value.const_data_ptr()), plan, start_data, sorted_data,
                 static_cast<T*>(call.grad_value.mutable_data_ptr()), grads, problem, sizes.head_slots,
                 point_bits_of(problem));
        });
  });
}

template <typename Form>
constexpr Path<BackwardCall<Form>> kBackwardPaths[] = {
    {"encoder", encoder_declines<Form>, encoder_launch<Form>},
    {"direct", direct_declines<Form>, direct_launch<Form>},
    {"sorted", nullptr, sorted_launch<Form>},
};

// Fills grad_value and the samples' gradients, none of which is empty.
template <typename Form>
void backward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& grad_output,
              const Tensor& value, const Levels& levels, Plans& plans, Form& form, bool deterministic,
              Tensor& grad_value) {
  if (const int64_t channels = filled_channels(problem, value); channels > problem.C) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    Tensor wide = new_empty(value, {problem.B, problem.S, problem.G, channels});
    backward(filled, scope, fill_rows(grad_output, problem, channels), fill_rows(value, problem, channels), levels,
             plans, form, deterministic, wide);
    copy_(grad_value, narrow(wide, 3, 0, problem.C));
    return;
  }
  run_first(kOp, kBackwardPaths<Form>,
            {problem, scope, levels, plans, form, grad_output, value, deterministic, grad_value});
}

struct GivenBackward {
  static constexpr bool kHasSoftmax = false;
  const GivenForm given;
  Tensor &grad_locations, &grad_weights;

  template <typename T, typename A>
  GivenSamples<A> source(bool /*encoder*/) const {
    return given.template source<T, A>();
  }
  template <typename A>
  SampleGrads<A> grads(bool /*encoder*/) const {
    return {static_cast<A*>(grad_locations.mutable_data_ptr()), static_cast<A*>(grad_weights.mutable_data_ptr()),
            nullptr, nullptr, 0};
  }
};

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool deterministic) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor grad_output = dense(grad_output_in), value = dense(value_in), level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), locations = contiguous_pairs(locations_in),
               weights = dense(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_empty(value, value.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.C == 0 || problem.S == 0 || grad_weights.numel() == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  Plans plans(problem, scope, value, levels);
  GivenBackward form{{locations, weights}, grad_locations, grad_weights};
  backward(problem, scope, grad_output, value, levels, plans, form, deterministic, grad_value);
  return {grad_value, grad_locations, grad_weights};
}

// The fused form's samples, and the gradients of its predictions, which are written once those of its samples are
// known.
class FusedBackward {
 public:
  static constexpr bool kHasSoftmax = true;

  // joined: the gradients of offsets and logits are one tensor, [B, Q, G * K * 3], and grad_logits is empty.
  FusedBackward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const FusedForm& form,
                bool needs_reference, bool joined)
      : problem_(problem),
        scope_(scope),
        form_(form),
        rows_(problem.B * problem.Q * problem.G),
        needs_reference_(needs_reference),
        joined_(joined) {
    const int64_t samples = problem.G * problem.K;
    const Tensor &offsets = form.offsets, &logits = form.logits, &reference = form.reference;
    grad_offsets =
        joined ? new_empty(offsets, {problem.B, problem.Q, 3 * samples}) : new_empty(offsets, offsets.sizes());
    grad_logits = joined ? new_empty(logits, {0}) : new_empty(logits, logits.sizes());
    grad_reference = needs_reference ? new_empty(reference, reference.sizes()) : new_empty(reference, {0});
  }

  Tensor grad_reference, grad_offsets, grad_logits;

  template <typename T, typename A>
  FusedSamples<T, A> source(bool encoder) {
    FusedSamples<T, A> source = form_.template source<T, A>();
    if (encoder) return source;
    softmax_ = new_empty(form_.reference, {rows_, 2});
    auto* of_rows = static_cast<SoftmaxRow<A>*>(softmax_->mutable_data_ptr());
    launch({kOp, "softmax_kernel", scope_, ceil_div(rows_ * kSoftmaxLanes, kRowThreads), kRowThreads},
           softmax_kernel<T, A>, source, of_rows, rows_, static_cast<int>(problem_.K));
    source.rows = of_rows;
    return source;
  }

  template <typename A>
  SampleGrads<A> grads(bool encoder) {
    has_offsets_ = encoder && !needs_reference_;  // a reference's gradient is summed from those of places
    sample_grads_ = new_empty(form_.reference, {rows_, problem_.K, has_offsets_ ? 1 : 4});
    auto* data = sample_grads_->mutable_data_ptr();
    if (!has_offsets_) return {nullptr, nullptr, static_cast<Pack<A, 4>*>(data), nullptr, 0};
    return {nullptr, static_cast<A*>(data), nullptr, static_cast<char*>(grad_offsets.mutable_data_ptr()),
            joined_ ? problem_.G * problem_.K : 0};
  }

  // After backward().
  template <typename T, typename A>
  void finish(Plans& plans) {
    if (form_.template source<T, A>().full_precision) {
      finish_predictions<T, A, A>(plans);
    } else {
      finish_predictions<T, A, T>(plans);
    }
    if (!needs_reference_) return;
    const int64_t count = problem_.B * problem_.Q * problem_.L;
    launch({kOp, "reference_grad_kernel", scope_, ceil_div(count, kRowThreads), kRowThreads},
           reference_grad_kernel<T, A>, plans.get(), form_.template source<T, A>(),
           static_cast<const Pack<A, 4>*>(sample_grads_->const_data_ptr()),
           static_cast<A*>(grad_reference.mutable_data_ptr()), count, static_cast<int>(problem_.G),
           static_cast<int>(problem_.L), static_cast<int>(problem_.K));
  }

 private:
  // I: the type of offsets and logits.
  template <typename T, typename A, typename I>
  void finish_predictions(Plans& plans) {
    const int G = static_cast<int>(problem_.G), L = static_cast<int>(problem_.L), K = static_cast<int>(problem_.K);
    const int64_t samples = problem_.G * problem_.K;
    auto* of_offsets = static_cast<I*>(grad_offsets.mutable_data_ptr());
    const auto predictions = joined_ ? PredictionGrads<I>{of_offsets, of_offsets + 2 * samples, samples, 2 * samples}
                                     : PredictionGrads<I>{of_offsets, static_cast<I*>(grad_logits.mutable_data_ptr())};
    const auto source = form_.template source<T, A>();
    const void* grads = sample_grads_->const_data_ptr();
    if (has_offsets_) {
      launch({kOp, "softmax_grad_kernel", scope_, ceil_div(rows_ * kSoftmaxLanes, kRowThreads), kRowThreads},
             softmax_grad_kernel<T, A, I>, source, static_cast<const A*>(grads), predictions, rows_, G, K);
      return;
    }
    const int lanes = row_lanes_of(problem_.K);
    launch({kOp, "fused_grad_kernel", scope_, ceil_div(rows_ * lanes, kRowThreads), kRowThreads,
            static_cast<int64_t>(sizeof(LevelPlan)) * L},
           fused_grad_kernel<T, A, I>, plans.get(), source, static_cast<const Pack<A, 4>*>(grads), predictions, rows_,
           G, L, K, lanes);
  }

  const MsDeformAttnProblem& problem_;
  const DeviceScope& scope_;
  const FusedForm& form_;
  const int64_t rows_;
  const bool needs_reference_, joined_;
  bool has_offsets_ = false;  // grad_offsets is written by put_once(), and sample_grads_ are the weights' alone
  std::optional<Tensor> sample_grads_, softmax_;
};

// The gradients of value, reference points, offsets and logits; joined: as in FusedBackward.
std::array<Tensor, 4> fused_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                     const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                     const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in,
                                     const std::vector<int64_t>& num_points, bool needs_reference, bool deterministic,
                                     bool joined) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor grad_output = dense(grad_output_in), value = dense(value_in), level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), reference = contiguous_pairs(reference_in),
               offsets = contiguous_pairs(offsets_in), logits = dense(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  Tensor grad_value = new_empty(value, value.sizes());
  const FusedForm samples{reference, offsets, logits};
  FusedBackward form(problem, scope, samples, needs_reference, joined);
  if (problem.C == 0 || problem.S == 0 || logits.numel() == 0) {
    zero_(grad_value), zero_(form.grad_reference), zero_(form.grad_offsets), zero_(form.grad_logits);
    return {grad_value, form.grad_reference, form.grad_offsets, form.grad_logits};
  }
  Plans plans(problem, scope, value, levels);
  backward(problem, scope, grad_output, value, levels, plans, form, deterministic, grad_value);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    form.template finish<decltype(value_tag), decltype(accumulate_tag)>(plans);
  });
  return {grad_value, form.grad_reference, form.grad_offsets, form.grad_logits};
}

// fused_backward() as the operators return it.
template <bool JOINED>
auto ms_deform_attn_fused_backward(const Tensor& grad_output, const Tensor& value, const Tensor& level_shapes,
                                   const Tensor& level_starts, const Tensor& reference_points, const Tensor& offsets,
                                   const Tensor& logits, std::vector<int64_t> num_points, bool needs_reference,
                                   bool deterministic) {
  const auto [of_value, of_reference, of_offsets, of_logits] =
      fused_backward(grad_output, value, level_shapes, level_starts, reference_points, offsets, logits, num_points,
                     needs_reference, deterministic, JOINED);
  if constexpr (JOINED) {
    return std::tuple{of_value, of_reference, of_offsets};
  } else {
    return std::tuple{of_value, of_reference, of_offsets, of_logits};
  }
}

}  // namespace
}  // namespace visdet::ms_deform_attn

VISDET_CUDA_OPERATORS(m) {
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused_backward<false>));
  m.impl("ms_deform_attn_fused_backward_joined",
         TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused_backward<true>));
}

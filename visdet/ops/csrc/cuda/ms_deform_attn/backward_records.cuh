// First stage of the path "sorted": the samples that count, as records in bins. A bin is a run of cells that holds some
// 1000 samples, fewer than a block sorts at once, if the samples spread evenly.
//
// count_kernel counts the samples of each bin, scan_kernel turns the counts into the starts of the bins, and
// scatter_kernel writes each sample as a record of 16 bytes into its bin, in any order. A block of count_kernel and
// scatter_kernel owns a piece of a head's samples (see PieceWalk), a block of scan_kernel a (batch, head, level).
//
// Races: blocks add to the same counters of bins, which are integers. The order in which they add decides where in its
// bin a record stands, and backward_sort.cuh undoes that. Everything else is written by one thread: count_kernel also
// writes the gradients of samples that do not count.
#pragma once

#include "common/block_scan.cuh"
#include "cuda/ms_deform_attn/backward_call.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query << point_bits | point
  A fx, fy, weight;
};

// The cell of a sample that counts.
template <typename A>
__device__ __forceinline__ uint32_t cell_of(A x, A y, int32_t W) {
  const int32_t column = static_cast<int32_t>(floor(x)) + 1, row = static_cast<int32_t>(floor(y)) + 1;
  return static_cast<uint32_t>(row) * (W + 1u) + column;
}

constexpr int kScanThreads = 256;  // one block a (batch, head, level)

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

// What the three stages need of a head: room for the starts of its cells and of its bins, and tiles.
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

template <typename A, typename Form, typename Source>
void write_records(const BackwardCall<Form>& call, const SortedSizes& sizes, const Source& source,
                   const SampleGrads<A>& grads, int32_t* bin_starts, Record<A>* records) {
  const MsDeformAttnProblem& problem = call.problem;
  const int64_t heads = problem.B * problem.G;
  const int head_bins = static_cast<int>(sizes.head_bins);
  const LevelPlan* plan = call.plans.get();
  int32_t* filled = bin_starts + heads * sizes.head_bins;
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
         point_bits_of(problem));
}

}  // namespace
}  // namespace visdet::ms_deform_attn

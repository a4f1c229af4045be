// First stage of the path "sorted": the samples that count are written as records into bins of neighbouring cells.
//
// count_kernel counts the samples of each bin, scan_kernel turns the counts into the starts of the bins, and
// scatter_kernel writes each sample as a record into its bin, in any order. A block of count_kernel and scatter_kernel
// owns a piece of the samples of a head (see PieceWalk), a block of scan_kernel the bins of a (batch, head, level).
//
// Races: blocks add to the same counters of bins, which are integers. Which block comes first decides where in its bin
// a record stands, and sort_kernel (backward_sort.cuh) undoes that. Everything else has one writer: scatter_kernel the
// records, and count_kernel the gradients of the samples that do not count.
#pragma once

#include "cuda/ms_deform_attn/backward_call.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query << point_bits | point, the point counted within the level
  A fx, fy;        // the position in texels until the record is sorted, its fractions after that
  A weight;
};

// A record holds its query and its point in 31 bits.
int bit_width(int64_t number) {
  int bits = 0;
  while (number >> bits > 0) ++bits;
  return bits;
}
int point_bits_of(const MsDeformAttnProblem& problem) { return bit_width(problem.P - 1); }
void check_backward_sizes(const MsDeformAttnProblem& problem) {
  check_sizes(problem);
  VISDET_CHECK("ms_deform_attn_backward", problem.Q <= (int64_t{INT32_MAX} >> point_bits_of(problem)),
               "Q * P must be under 2^31 with P rounded up to a power of two, got ", problem.Q, " * ", problem.P);
}

constexpr int kPieceThreads = 512, kScanThreads = 256;
template <typename A>
constexpr int kThreadSamples = 64 / sizeof(Record<A>);  // with which the records of a piece take 32 KB
constexpr int kMaxLocalBins = 8192;                     // of a head: more are counted in global memory

// A piece is the part of a head's samples that a block owns: all samples of a few neighbouring queries, or, where a
// query has more than kPieceThreads, so many of them. A thread has sample k of `samples` queries, which are
// query_stride apart; its j-th one is sample index + j * index_stride of all, in row row + j * row_stride.
struct PieceWalk {
  uint32_t head, query, query_stride, k, Q;
  int64_t index, row, query_level, index_stride, row_stride, query_level_stride;
  LevelPlan at;  // the level of all of them

  static __host__ __device__ __forceinline__ uint32_t pieces_of_query(uint32_t K) {
    return (K + kPieceThreads - 1) / kPieceThreads;
  }
  static __host__ __device__ __forceinline__ uint32_t queries_of_piece(uint32_t K, int samples) {
    return (K < kPieceThreads ? kPieceThreads / K : 1) * samples;
  }
  __device__ __forceinline__ PieceWalk(const MsDeformAttnProblem& problem, const LevelPlan* table, int samples) {
    const uint32_t K = problem.K, G = problem.G, L = problem.L, queries = queries_of_piece(K, samples),
                   pieces = pieces_of_query(K);
    Q = problem.Q;
    const uint32_t pieces_of_head = (Q + queries - 1) / queries * pieces;
    head = blockIdx.x / pieces_of_head;
    const uint32_t piece = blockIdx.x - head * pieces_of_head, part = piece % pieces,
                   first = pieces == 1 ? threadIdx.x / K : 0;  // the thread's first query within the piece
    query_stride = queries / samples, query = piece / pieces * queries + first;
    k = part * kPieceThreads + threadIdx.x - first * K;
    if (first >= query_stride || k >= K) query = Q, k = 0;  // The thread has no samples.
    int l = 0;
    while (k >= static_cast<uint32_t>(table[l].level.end)) ++l;
    at = table[l];
    const uint32_t b = head / G;
    const int64_t first_query = static_cast<int64_t>(b) * Q + query;
    row = first_query * G + (head - b * G), index = row * K + k, query_level = first_query * L + l;
    row_stride = static_cast<int64_t>(query_stride) * G, index_stride = row_stride * K,
    query_level_stride = static_cast<int64_t>(query_stride) * L;
  }
  __device__ __forceinline__ bool exists(int j) const { return query + j * query_stride < Q; }
  // Returns whether the j-th sample counts, which lies at (x, y), and finds its bin among those of the head.
  template <typename A>
  __device__ __forceinline__ bool find_bin(int j, A x, A y, uint32_t& bin) const {
    const Level& level = at.level;
    if (!(exists(j) && level.H > 0 && x > A(-1) && y > A(-1) && x < A(level.W) && y < A(level.H))) return false;
    bin = at.first_bin + (cell_of<uint32_t>(x, y, level.W) >> at.bin_bits);
    return true;
  }
};

// local_bins: head_bins, or 0 if they are too many for shared memory.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    count_kernel(const LevelPlan* __restrict__ plan, const Source source, int32_t* __restrict__ counts,
                 const SampleGrads<A> grads, const MsDeformAttnProblem problem, int head_bins, int local_bins) {
  constexpr int kSamples = kThreadSamples<A>;
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);                  // [L]
  auto* local_counts = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins]
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local_counts[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kSamples);
  counts += static_cast<int64_t>(walk.head) * head_bins;
  typename Source::Raw raw[kSamples];
#pragma unroll
  for (int j = 0; j < kSamples; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    raw[j] = source.fetch_position(walk.index + j * walk.index_stride, walk.query_level + j * walk.query_level_stride);
  }
#pragma unroll
  for (int j = 0; j < kSamples; ++j) {
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (walk.find_bin(j, x, y, bin)) {
      local_bins > 0 ? atomicAdd(local_counts + bin, 1) : atomicAdd(counts + bin, 1);
    } else if (walk.exists(j)) {
      const int64_t index = walk.index + j * walk.index_stride;
      A weight = 0;
      if (grads.packed != nullptr) {
        source.fetch_weight(index, raw[j]);
        weight = source.weight(raw[j], source.row_at(walk.row + j * walk.row_stride));
      }
      grads.put(index, weight, gradient_of_uncounted<A>(walk.at.level));
    }
  }
  __syncthreads();  // the piece is counted
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    if (local_counts[i] > 0) atomicAdd(counts + i, local_counts[i]);
  }
}

// Turns the counts of bins into their starts among the records of the head, in place.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const LevelPlan* __restrict__ plan, int32_t* __restrict__ counts, const MsDeformAttnProblem problem,
                int head_bins) {
  const int L = static_cast<int>(problem.L), l = blockIdx.x % L;
  int32_t* bins = counts + static_cast<int64_t>(blockIdx.x / L) * head_bins + plan[l].first_bin;
  const int32_t end =
      scan_counts<kScanThreads>(bins, bins, 0, plan[l].bins, plan[l].first_point * static_cast<int32_t>(problem.Q));
  if (threadIdx.x == 0) bins[plan[l].bins] = end;
}

// Sorts its piece by bin in shared memory first, so that neighbouring threads write records of one bin. filled: how
// many records of each bin have been written, zero before.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    scatter_kernel(const LevelPlan* __restrict__ plan, const Source source, const int32_t* __restrict__ bin_starts,
                   int32_t* __restrict__ filled, Record<A>* __restrict__ records, const MsDeformAttnProblem problem,
                   int head_bins, int local_bins, int point_bits) {
  constexpr int kSamples = kThreadSamples<A>, kPiece = kPieceThreads * kSamples, kRankBits = 11;
  static_assert(kPiece <= 1 << kRankBits, "a bin and a rank fit into one number");
  extern __shared__ __align__(16) char shared[];
  auto* staged = reinterpret_cast<Record<A>*>(shared);          // [kPiece]
  auto* bin_of = reinterpret_cast<uint16_t*>(staged + kPiece);  // [kPiece]
  auto* table = reinterpret_cast<LevelPlan*>(bin_of + kPiece);  // [L]
  auto* local = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins + 1] counts, then starts in the piece
  int32_t* to_head = local + local_bins + 1;  // [local_bins] from positions in the piece to the head's
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kSamples);
  bin_starts += static_cast<int64_t>(walk.head) * head_bins, filled += static_cast<int64_t>(walk.head) * head_bins;
  records += walk.head * problem.K * problem.Q;
  typename Source::Raw raw[kSamples];
  typename Source::Row row[kSamples];
#pragma unroll
  for (int j = 0; j < kSamples; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    const int64_t index = walk.index + j * walk.index_stride;
    raw[j] = source.fetch_position(index, walk.query_level + j * walk.query_level_stride);
    source.fetch_weight(index, raw[j]);
    row[j] = source.row_at(walk.row + j * walk.row_stride);
  }
  Record<A> record[kSamples];
  int32_t bin_and_rank[kSamples];  // or -1
#pragma unroll
  for (int j = 0; j < kSamples; ++j) {
    bin_and_rank[j] = -1;
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (!walk.find_bin(j, x, y, bin)) continue;
    const uint32_t sample = (walk.query + j * walk.query_stride) << point_bits | (walk.k - walk.at.first_point);
    record[j] = {static_cast<int32_t>(sample), x, y, source.weight(raw[j], row[j])};
    if (local_bins > 0) {
      bin_and_rank[j] = bin << kRankBits | atomicAdd(local + bin, 1);
    } else {
      records[bin_starts[bin] + atomicAdd(filled + bin, 1)] = record[j];
    }
  }
  if (local_bins == 0) return;
  __syncthreads();  // the piece is counted
  const int32_t total = scan_counts<kPieceThreads>(local, local, 0, local_bins, 0);
  if (threadIdx.x == 0) local[local_bins] = total;
  __syncthreads();  // the bins' starts in the piece are known
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    const int32_t count = local[i + 1] - local[i];
    if (count > 0) to_head[i] = bin_starts[i] + atomicAdd(filled + i, count) - local[i];
  }
#pragma unroll
  for (int j = 0; j < kSamples; ++j) {
    if (bin_and_rank[j] < 0) continue;
    const int32_t bin = bin_and_rank[j] >> kRankBits, rank = bin_and_rank[j] & ((1 << kRankBits) - 1);
    const int32_t position = local[bin] + rank;
    staged[position] = record[j], bin_of[position] = static_cast<uint16_t>(bin);
  }
  __syncthreads();  // the piece is sorted
  for (int i = threadIdx.x; i < total; i += kPieceThreads) records[to_head[bin_of[i]] + i] = staged[i];
}

// What the stages of the path need of each head: how many starts of cells and of bins, and how many tiles.
struct SortedSizes {
  int64_t cell_starts, bin_starts, tiles;
};

template <typename Form>
SortedSizes sorted_sizes(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  SortedSizes sizes{};
  if (!call.levels.by_value()) {
    // Only the device knows the levels. These are bounds (H + W <= S + 1 on every level), but for the tiles: a block
    // of gather_kernel goes on to further tiles if there are more.
    const int64_t cells = 2 * problem.S + 2;
    sizes.cell_starts = problem.L * (cells + 1);
    sizes.bin_starts = 2 * problem.Q * problem.K / kBinSamples + problem.L * ((cells >> kMaxBinBits) + 2);
    sizes.tiles = ceil_div(problem.S, 64) + problem.L;
    return sizes;
  }
  for (int l = 0; l < static_cast<int>(problem.L); ++l) {
    const int64_t H = call.levels.H[l], W = call.levels.W[l], samples = problem.Q * points_on(call.levels, l),
                  cells = cell_count(H, W);
    sizes.cell_starts += cells + 1;
    sizes.bin_starts += bins_of(cells, bin_bits_of(samples, cells)) + 1;
    sizes.tiles += tiles_of(tile_of_shape(tile_shape_of(samples, H, W)), H, W);
  }
  return sizes;
}

// bin_starts: twice sizes.bin_starts for each head, zero: the starts, and how far the bins are filled.
template <typename A, typename Form, typename Source>
void write_records(const BackwardCall<Form>& call, const SortedSizes& sizes, const Source& source,
                   const SampleGrads<A>& grads, int32_t* bin_starts, Record<A>* records) {
  const MsDeformAttnProblem& problem = call.problem;
  const int64_t heads = problem.B * problem.G;
  const int head_bins = static_cast<int>(sizes.bin_starts);
  const LevelPlan* plan = call.plans.get();
  int32_t* filled = bin_starts + heads * sizes.bin_starts;

  constexpr int kSamples = kThreadSamples<A>;
  const uint32_t K = static_cast<uint32_t>(problem.K);
  const int64_t pieces =
      heads * ceil_div(problem.Q, PieceWalk::queries_of_piece(K, kSamples)) * PieceWalk::pieces_of_query(K);
  const int64_t table_bytes = static_cast<int64_t>(sizeof(LevelPlan)) * problem.L;
  const int64_t staged_bytes = kPieceThreads * kSamples * static_cast<int64_t>(sizeof(Record<A>) + sizeof(uint16_t));
  // Bins are counted in shared memory if scatter_kernel, which has two numbers for each, has enough of it.
  constexpr int64_t kScanShared = kExclusiveSumShared<kPieceThreads>;
  const int64_t room = call.scope.device().shared_block - kScanShared - staged_bytes - table_bytes;
  const bool is_local = sizes.bin_starts <= std::min<int64_t>(kMaxLocalBins, room / (2 * sizeof(int32_t)) - 1);
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

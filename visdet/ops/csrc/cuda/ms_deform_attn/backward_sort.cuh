// Second stage of the path "sorted": a block of sort_kernel owns a bin and writes its records in the order of cells
// and, in a cell, in an order of the samples that does not differ between runs. It also writes where the bin's cells
// begin. No two threads write the same address.
#pragma once

#include "cuda/ms_deform_attn/backward_records.cuh"

namespace visdet::ms_deform_attn {
namespace {

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

template <typename A, typename Form>
void sort_records(const BackwardCall<Form>& call, const SortedSizes& sizes, const int32_t* bin_starts,
                  Record<A>* records, Record<A>* sorted, int32_t* starts) {
  const MsDeformAttnProblem& problem = call.problem;
  const int point_bits = point_bits_of(problem);
  launch({kOp, "sort_kernel", call.scope, head_grid(sizes.head_bins, problem.B * problem.G), kSortThreads,
          sizeof(SortScratch<A>), kScanShared},
         sort_kernel<A>, call.plans.get(), bin_starts, records, sorted, starts, problem, sizes.head_slots,
         static_cast<int>(sizes.head_bins), point_bits + std::max(1, bit_width(problem.Q - 1)), point_bits);
}

}  // namespace
}  // namespace visdet::ms_deform_attn

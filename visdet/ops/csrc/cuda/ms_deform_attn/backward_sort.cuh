// Second stage of the path "sorted": the records of each bin are put into the order of their cells.
//
// A block of sort_kernel owns a bin. It writes the bin's records to `sorted` in the order of a key, which is their cell
// and then a number that no two samples of the bin have in common, and it writes where the bin's cells begin. So the
// order of records depends on the samples only, and does not differ between runs. No two threads write the same
// address.
//
// Up to kWindow records are sorted in shared memory: the block counts them by the leading bits of the key, writes the
// rest of each key behind those of its bucket, and compares the keys of a bucket with one another. A larger bin is
// sorted digit by digit in global memory.
#pragma once

#include "cuda/ms_deform_attn/backward_records.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kSortThreads = 512;
template <typename A>
constexpr int kThreadRecords = 64 / static_cast<int>(sizeof(Record<A>));  // with which a block has 32 KB of them
template <typename A>
constexpr int kWindow = kSortThreads * kThreadRecords<A>;
constexpr int kKeyBits = 11, kKeyBuckets = 1 << kKeyBits;
static_assert(kMaxBinBits <= kKeyBits, "a cell begins with a bucket");
static_assert(kKeyBuckets == 4 * kSortThreads, "a thread has four buckets");

template <typename A>
struct alignas(16) SortScratch {
  Record<A> records[kWindow<A>];
  int32_t buckets[kKeyBuckets + 4];  // counts, then starts and the end
  uint32_t keys[kWindow<A>];
};

// The keys of a bin's records.
template <typename A>
struct BinKeys {
  uint32_t first_cell;  // of the bin
  int32_t W;
  int sample_bits, point_bits;

  // Returns the number of a record's cell within the bin.
  __device__ __forceinline__ uint32_t cell(const Record<A>& record) const {
    return cell_of<uint32_t>(record.fx, record.fy, W) - first_cell;
  }
  // Returns the query's bits in reverse, then the point: so neighbouring queries differ in the leading bits, and fall
  // into different buckets.
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
  int32_t before, cells, shift;  // the records of earlier bins, the cells of this one; a cell has 2^shift buckets
  bool is_last;                  // whether the bin is the last one of its level

  // Writes the starts. All threads of the block call it.
  __device__ __forceinline__ void write(const int32_t* buckets) const {
    for (int32_t cell = threadIdx.x; cell < cells; cell += kSortThreads) to[cell] = before + buckets[cell << shift];
    if (is_last && threadIdx.x == 0) to[cells] = before + buckets[kKeyBuckets];
  }
};

// Turns the counts of the buckets into their starts. All threads of the block call it.
template <typename A>
__device__ __forceinline__ void start_buckets(SortScratch<A>& scratch) {
  __syncthreads();  // the buckets are counted
  auto& buckets = reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x];
  const Pack<int32_t, 4> counts = buckets;
  Pack<int32_t, 4> starts;
  int32_t total,
      start = exclusive_sum_block<kSortThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], total);
#pragma unroll
  for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
  buckets = starts;
  if (threadIdx.x == 0) scratch.buckets[kKeyBuckets] = total;
  __syncthreads();  // the buckets' starts are known
}
template <typename A>
__device__ __forceinline__ void zero_buckets(SortScratch<A>& scratch) {
  reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x] = {};
}

// Writes `count` records, of which a thread holds every kSortThreads-th, to `to` in the order of their keys, and where
// cells begin. split(record, key) returns a record's bucket and sets `key` to what tells the records of a bucket apart.
// All threads of the block call it; the buckets are zero.
template <typename A, typename Split>
__device__ __forceinline__ void sort_window(SortScratch<A>& scratch, Record<A> (&record)[kThreadRecords<A>], int count,
                                            const Split& split, Record<A>* to, const CellStarts& starts) {
  constexpr int kRankBits = 11;
  static_assert(kWindow<A> <= 1 << kRankBits, "a bucket and a rank fit into one number");
  uint32_t key[kThreadRecords<A>], bucket_and_rank[kThreadRecords<A>];
#pragma unroll
  for (int j = 0; j < kThreadRecords<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const uint32_t bucket = split(record[j], key[j]);
    record[j].fx -= floor(record[j].fx), record[j].fy -= floor(record[j].fy);
    bucket_and_rank[j] = bucket << kRankBits | atomicAdd(scratch.buckets + bucket, 1);
  }
  start_buckets(scratch);
  starts.write(scratch.buckets);
#pragma unroll
  for (int j = 0; j < kThreadRecords<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    scratch.keys[scratch.buckets[bucket_and_rank[j] >> kRankBits] + (bucket_and_rank[j] & ((1 << kRankBits) - 1))] =
        key[j];
  }
  __syncthreads();  // the keys stand in their buckets
#pragma unroll
  for (int j = 0; j < kThreadRecords<A>; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const int32_t* bucket = scratch.buckets + (bucket_and_rank[j] >> kRankBits);
    const int32_t begin = bucket[0], end = bucket[1];
    int32_t position = begin;
#pragma unroll 1
    for (int32_t other = begin; other < end; ++other) position += scratch.keys[other] < key[j];
    scratch.records[position] = record[j];
  }
  __syncthreads();  // the records are sorted
#pragma unroll
  for (int j = 0; j < kThreadRecords<A>; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) to[i] = scratch.records[i];
  }
}

// A bin of more than kWindow records is sorted by the digits of the keys, the lowest first, in a time in proportion to
// the number of records. Each warp has a counter for every digit in shared memory.
constexpr int kSortWarps = kSortThreads / 32, kDigitBits = 9;
static_assert(1 << kDigitBits == kSortThreads, "a thread starts the counters of a digit");

// Sorts the records by the digit that begins at low_bit. Records with equal digits keep their order, because a warp
// takes its part of the records in order. First, each warp counts its digits. Then it writes its records, behind all
// records with a lower digit and behind the records with this digit of the warps before it. With is_last, the digit is
// the last one, and only the fractions of the positions are kept. All threads of the block call it.
template <typename A>
__device__ __forceinline__ void sort_by_digit(const Record<A>* from, Record<A>* to, int32_t count, int low_bit,
                                              const BinKeys<A>& key_of, bool is_last, int32_t* counters) {
  constexpr int kDigits = 1 << kDigitBits;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* warp_counters = counters + warp * kDigits;
  const int32_t part = (count + kSortThreads - 1) / kSortThreads * 32;
  const int32_t begin = min(warp * part, count), end = min(begin + part, count);
  const auto digit_of = [&](const Record<A>& record) {
    return static_cast<int>(key_of(record) >> low_bit) & (kDigits - 1);
  };
  __syncthreads();  // the records of the pass before are written, and the counters have been read
  for (int i = threadIdx.x; i < kSortWarps * kDigits; i += kSortThreads) counters[i] = 0;
  __syncthreads();  // the counters are zero
  for (int32_t i = begin + lane; i < end; i += 32) atomicAdd(warp_counters + digit_of(from[i]), 1);
  __syncthreads();  // the digits are counted
  int32_t of_digit = 0, total;
#pragma unroll 1
  for (int w = 0; w < kSortWarps; ++w) of_digit += counters[w * kDigits + threadIdx.x];
  int32_t start = exclusive_sum_block<kSortThreads>(of_digit, total);
#pragma unroll 1
  for (int w = 0; w < kSortWarps; ++w) {
    int32_t& counter = counters[w * kDigits + threadIdx.x];
    const int32_t count_of_warp = counter;
    counter = start;
    start += count_of_warp;
  }
  __syncthreads();  // the counters say where the records of a warp's digits start
#pragma unroll 1
  for (int32_t first = begin; first < end; first += 32) {
    const bool exists = first + lane < end;
    Record<A> record = from[min(first + lane, end - 1)];
    const int32_t position = position_by_digit(warp_counters, digit_of(record), exists);
    if (is_last) record.fx -= floor(record.fx), record.fy -= floor(record.fy);
    if (exists) to[position] = record;
  }
}

// Sorts a bin of more than kWindow records; those in `records` are overwritten. A key has key_bits bits, and 2^shift
// keys make a bucket that `starts` knows. All threads of the block call it.
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
                const MsDeformAttnProblem problem, int64_t head_cell_starts, int head_bins, int sample_bits,
                int point_bits) {
  extern __shared__ __align__(16) char shared[];
  auto& scratch = *reinterpret_cast<SortScratch<A>*>(shared);
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B * problem.G)) return;
  int32_t bin = blockIdx.x;  // in the end, its number within its level
  int l = 0;
  while (l < problem.L && bin >= plan[l].bins) bin -= plan[l++].bins;
  if (l == problem.L) return;
  const LevelPlan& at = plan[l];
  const int32_t* bin_start = bin_starts + static_cast<int64_t>(head) * head_bins + at.first_bin + bin;
  const int32_t begin = bin_start[0], count = bin_start[1] - begin, bin_bits = at.bin_bits;
  const int64_t first_cell = static_cast<int64_t>(bin) << bin_bits, head_begin = head * problem.K * problem.Q;
  records += head_begin + begin, sorted += head_begin + begin;
  const BinKeys<A> key_of{static_cast<uint32_t>(first_cell), at.level.W, sample_bits, point_bits};
  // A cell has 2^cell_shift buckets, and 2^sample_shift keys of samples fall into one bucket.
  const int cell_shift = min(sample_bits, kKeyBits - bin_bits), sample_shift = sample_bits - cell_shift;
  const int64_t cells = min(cell_count(at.level.H, at.level.W) - first_cell, int64_t{1} << bin_bits);
  const CellStarts cell_starts{starts + head * head_cell_starts + at.first_cell_start + first_cell,
                               begin - at.first_point * static_cast<int32_t>(problem.Q), static_cast<int32_t>(cells),
                               cell_shift, bin + 1 == at.bins};
  if (count > kWindow<A>) {
    return sort_large_bin(records, count, sample_shift, sample_bits + bin_bits, key_of, sorted, cell_starts);
  }
  Record<A> record[kThreadRecords<A>] = {};
#pragma unroll
  for (int j = 0; j < kThreadRecords<A>; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) record[j] = records[i];
  }
  zero_buckets(scratch);
  __syncthreads();  // the buckets are zero
  const auto split = [&](const Record<A>& record, uint32_t& key) {
    key = key_of.sample(record);
    return key_of.cell(record) << cell_shift | key >> sample_shift;
  };
  sort_window(scratch, record, count, split, sorted, cell_starts);
}

template <typename A, typename Form>
void sort_records(const BackwardCall<Form>& call, const SortedSizes& sizes, const int32_t* bin_starts,
                  Record<A>* records, Record<A>* sorted, int32_t* starts) {
  const MsDeformAttnProblem& problem = call.problem;
  const int point_bits = point_bits_of(problem);
  launch({kOp, "sort_kernel", call.scope, head_grid(sizes.bin_starts, problem.B * problem.G), kSortThreads,
          sizeof(SortScratch<A>), kExclusiveSumShared<kSortThreads>},
         sort_kernel<A>, call.plans.get(), bin_starts, records, sorted, starts, problem, sizes.cell_starts,
         static_cast<int>(sizes.bin_starts), point_bits + std::max(1, bit_width(problem.Q - 1)), point_bits);
}

}  // namespace
}  // namespace visdet::ms_deform_attn

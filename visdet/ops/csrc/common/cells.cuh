// Samples ordered by cell. A cell is the square between four neighbouring texel centres of a map into which a sample
// falls, border cells included: (H + 1) * (W + 1) of them a map of H x W texels. Backward passes count the samples of
// each cell, turn the counts into starts (scan_counts), write each sample's record behind the start of its cell, and,
// where results must not differ from run to run, order the records of each cell (order_records).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/warp.cuh"

namespace visdet {

// How many cells a map has; none if it has no rows.
__host__ __device__ __forceinline__ int64_t cell_count(int64_t H, int64_t W) { return H > 0 ? (H + 1) * (W + 1) : 0; }

// The cell of a sample at pixel (x, y) of a map of W columns. The sample must count: -1 < x < W and -1 < y < H. Index:
// the type of the result, which must hold the number of cells.
template <typename Index = int64_t, typename A>
__device__ __forceinline__ Index cell_of(A x, A y, int32_t W) {
  const int32_t column = static_cast<int32_t>(floor(x)) + 1, row = static_cast<int32_t>(floor(y)) + 1;
  return static_cast<Index>(row) * (static_cast<Index>(W) + 1) + static_cast<Index>(column);
}

// Bytes of shared memory that exclusive_sum_block() declares, up to the next multiple of 16.
template <int THREADS>
constexpr int64_t kExclusiveSumShared = (sizeof(int32_t) * (THREADS / 32) + 15) / 16 * 16;

// For all threads of a block: the sum of `value` over the threads before this one; `total` over all.
template <int THREADS>
__device__ __forceinline__ int32_t exclusive_sum_block(int32_t value, int32_t& total) {
  __shared__ int32_t warp_sums[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t in_warp = inclusive_sum_lanes(value);
  if (lane == 31) warp_sums[warp] = in_warp;
  __syncthreads();
  const int32_t mine = lane < THREADS / 32 ? warp_sums[lane] : 0, of_warps = inclusive_sum_lanes(mine);
  total = __shfl_sync(kAllLanes, of_warps, 31);
  const int32_t before = __shfl_sync(kAllLanes, of_warps - mine, warp);
  __syncthreads();  // warp_sums may be written again
  return before + in_warp - value;
}

constexpr int kCountsPerThread = 4;  // that scan_counts() adds at a time

// For all threads of a block: starts[i] = carry + the sum of the counts before i, from `begin` to `end`; returns carry
// plus the sum of all. `starts` may be `counts`.
template <int THREADS>
__device__ __forceinline__ int32_t scan_counts(const int32_t* counts, int32_t* starts, int64_t begin, int64_t end,
                                               int32_t carry) {
  for (int64_t from = begin; from < end; from += THREADS * kCountsPerThread) {
    int32_t count[kCountsPerThread], sum = 0, total;
    const int64_t first = from + threadIdx.x * kCountsPerThread;
#pragma unroll
    for (int i = 0; i < kCountsPerThread; ++i) count[i] = first + i < end ? counts[first + i] : 0;
#pragma unroll
    for (int i = 0; i < kCountsPerThread; ++i) sum += count[i];
    int32_t start = carry + exclusive_sum_block<THREADS>(sum, total);
    carry += total;
#pragma unroll
    for (int i = 0; i < kCountsPerThread; ++i) {
      if (first + i < end) starts[first + i] = start;
      start += count[i];
    }
  }
  return carry;
}

// For all lanes of a warp, each of which has a record with this digit if `exists`: returns where the record goes. The
// records of one digit go to neighbouring positions from counters[digit] on, in the order of the lanes. counters[digit]
// is then the first position behind them. No other warp may use the counters.
__device__ __forceinline__ int32_t position_by_digit(int32_t* counters, int digit, bool exists) {
  const unsigned same = __match_any_sync(kAllLanes, exists ? digit : -1);
  const int rank = rank_in_ballot(same);
  const int32_t start = exists ? counters[digit] : 0;
  __syncwarp();  // the counters have been read
  if (exists && rank == 0) counters[digit] = start + __popc(same);
  __syncwarp();  // and may be read again
  return start + rank;
}

constexpr int kMaxOrderWindows = 4;  // windows of samples that order_records() looks at; beyond, it sorts by digits

// Scratch of a warp in shared memory: a bitmap, with one word more every 32 so that the words that a lane counts lie in
// different banks, or the counters of a digit.
union OrderBitmap {
  static constexpr int kWords = 1024;  // 32 a lane
  static constexpr int kPadded = kWords + 32;
  static constexpr int kMaxDigitBits = 11;  // three digits are more than the 31 bits of a sample
  struct {
    uint32_t bits[kPadded];
    int32_t before[kPadded];  // set bits of earlier words
  };
  int32_t counters[1 << kMaxDigitBits];
};

// For all lanes of a warp: sorts records by the numbers of their samples, in three passes of one digit each, the lowest
// digit first. The numbers lie between `lowest` and `lowest + span`. The result is in `to`; `from` is scratch.
template <typename Record>
__device__ __forceinline__ void order_by_digits(Record* from, Record* to, int32_t count, int32_t lowest, int32_t span,
                                                int32_t* counters) {
  const int lane = threadIdx.x % 32, digit_bits = max(5, (32 - __clz(span) + 2) / 3), digits = 1 << digit_bits;
  for (int pass = 0; pass < 3; ++pass) {
    const Record* source = pass == 1 ? to : from;
    Record* target = pass == 1 ? from : to;
    const auto digit_of = [&](int32_t sample) { return (sample - lowest) >> (pass * digit_bits) & (digits - 1); };
    for (int i = lane; i < digits; i += 32) counters[i] = 0;
    __syncwarp();
    for (int32_t i = lane; i < count; i += 32) atomicAdd(&counters[digit_of(source[i].sample)], 1);
    __syncwarp();
    int32_t before = 0;
    for (int i = lane; i < digits; i += 32) {
      const int32_t of_digit = counters[i], inclusive = inclusive_sum_lanes(of_digit);
      counters[i] = before + inclusive - of_digit;
      before += __shfl_sync(kAllLanes, inclusive, 31);
    }
    __syncwarp();
    for (int32_t first = 0; first < count; first += 32) {
      const bool exists = first + lane < count;
      const Record record = source[min(first + lane, count - 1)];
      const int32_t position = position_by_digit(counters, digit_of(record.sample), exists);
      if (exists) target[position] = record;
    }
    __syncwarp();  // the target is complete
  }
}

// For all lanes of a warp: writes the `count` records of `from` to `to`, in the order of their `sample`, a non-negative
// int32 that no two have in common. Up to 32 records it compares each with each. More it marks in a bitmap, a window of
// samples at a time, whose set bits it counts; or, where the samples lie in more than kMaxOrderWindows windows, it
// sorts them by digits, with `from` as scratch. So the work is in proportion to the number of records, all of them in
// one cell included.
template <typename Record>
__device__ __forceinline__ void order_records(Record* __restrict__ from, Record* __restrict__ to, int32_t count,
                                              OrderBitmap& bitmap) {
  constexpr int kWindow = OrderBitmap::kWords * 32;
  const int lane = threadIdx.x % 32;
  if (count == 0) return;
  if (count <= 32) {
    const Record record = from[min(lane, count - 1)];
    int32_t rank = 0;
    for (int n = 0; n < count; ++n) rank += __shfl_sync(kAllLanes, record.sample, n) < record.sample;
    if (lane < count) to[rank] = record;
    return;
  }
  int32_t lowest = INT32_MAX, highest = 0;
  for (int32_t i = lane; i < count; i += 32) {
    lowest = min(lowest, from[i].sample), highest = max(highest, from[i].sample);
  }
  lowest = min_lanes(lowest), highest = max_lanes(highest);
  if (highest - lowest >= kMaxOrderWindows * kWindow) {
    return order_by_digits(from, to, count, lowest, highest - lowest, bitmap.counters);
  }
  int32_t written = 0;
  for (int64_t window = lowest; window <= highest; window += kWindow) {
    for (int i = lane; i < OrderBitmap::kPadded; i += 32) bitmap.bits[i] = 0;
    __syncwarp();
    for (int32_t i = lane; i < count; i += 32) {
      const int64_t bit = from[i].sample - window;
      if (bit >= 0 && bit < kWindow) atomicOr(&bitmap.bits[bit / 32 + bit / 1024], 1u << (bit % 32));
    }
    __syncwarp();
    int32_t total = 0;
    for (int i = 0; i < 32; ++i) total += __popc(bitmap.bits[lane * 33 + i]);
    int32_t sum = written + inclusive_sum_lanes(total) - total;
    for (int i = 0; i < 32; ++i) {
      bitmap.before[lane * 33 + i] = sum;
      sum += __popc(bitmap.bits[lane * 33 + i]);
    }
    written = __shfl_sync(kAllLanes, sum, 31);
    __syncwarp();
    for (int32_t i = lane; i < count; i += 32) {
      const Record record = from[i];
      const int64_t bit = record.sample - window;
      if (bit < 0 || bit >= kWindow) continue;
      const int word = static_cast<int>(bit / 32 + bit / 1024);
      to[bitmap.before[word] + __popc(bitmap.bits[word] & ((1u << (bit % 32)) - 1))] = record;
    }
    __syncwarp();
  }
}

constexpr int kOwnRecords = 16;  // up to so many, a lane sorts by itself

// For all lanes of a warp: sorts the records of each lane's cell, `count` from `offset` on. Most cells have few or
// none, whose lanes sort them at the same time; the others are sorted by all lanes, one after another.
template <typename Record>
__device__ __forceinline__ void order_records_of_cells(Record* __restrict__ from, Record* __restrict__ to,
                                                       int64_t offset, int32_t count, OrderBitmap& bitmap) {
  const bool is_long = count > kOwnRecords;
  for (int32_t i = 0; i < count && !is_long; ++i) {
    const Record record = from[offset + i];
    int32_t rank = 0;
    for (int32_t n = 0; n < count; ++n) rank += from[offset + n].sample < record.sample;
    to[offset + rank] = record;
  }
  for (unsigned ballot = __ballot_sync(kAllLanes, is_long); ballot != 0; ballot &= ballot - 1) {
    const int owner = __ffs(ballot) - 1;
    const int64_t first = __shfl_sync(kAllLanes, offset, owner);
    order_records(from + first, to + first, __shfl_sync(kAllLanes, count, owner), bitmap);
  }
}

}  // namespace visdet

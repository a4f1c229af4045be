// Records sorted by their samples, for sums whose order must not change from run to run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace visdet {

constexpr int kMostOrderWindows = 4;  // beyond them the records are sorted digit by digit

// Scratch of a warp in shared memory: a bitmap, one word more every 32 so that the words that a lane counts lie in
// different banks, or the counters of a digit.
union OrderBitmap {
  static constexpr int kWords = 1024;  // 32 a lane
  static constexpr int kPadded = kWords + 32;
  static constexpr int kMostDigitBits = 11;  // three digits are more than the 31 bits of a sample
  struct {
    uint32_t bits[kPadded];
    int32_t before[kPadded];  // set bits of earlier words
  };
  int32_t counters[1 << kMostDigitBits];
};

// For all lanes of a warp: the sum of `value` over this lane and those before it.
__device__ __forceinline__ int32_t sum_up_to_lane(int32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// All lanes of a warp: sorts records by their samples, of which `lowest` is the least and `span` the greatest distance
// from it, by three digits, the lowest first. The result is in `to`; `from` is scratch.
template <typename Record>
__device__ __forceinline__ void order_by_digits(Record* from, Record* to, int32_t count, int32_t lowest, int32_t span,
                                                int32_t* counters) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32, digit_bits = max(5, (32 - __clz(span) + 2) / 3), digits = 1 << digit_bits;
  for (int pass = 0; pass < 3; ++pass) {
    const Record* source = pass == 1 ? to : from;
    Record* target = pass == 1 ? from : to;
    const auto digit_of = [&](int32_t sample) { return (sample - lowest) >> (pass * digit_bits) & (digits - 1); };
    for (int i = lane; i < digits; i += 32) counters[i] = 0;
    __syncwarp();
    for (int32_t i = lane; i < count; i += 32) atomicAdd(&counters[digit_of(source[i].sample)], 1);
    __syncwarp();
    int32_t placed = 0;
    for (int i = lane; i < digits; i += 32) {
      const int32_t here = counters[i], inclusive = sum_up_to_lane(here);
      counters[i] = placed + inclusive - here;
      placed += __shfl_sync(kAll, inclusive, 31);
    }
    __syncwarp();
    for (int32_t first = 0; first < count; first += 32) {
      const bool exists = first + lane < count;
      const Record record = source[min(first + lane, count - 1)];
      const int digit = exists ? digit_of(record.sample) : digits;
      const unsigned same = __match_any_sync(kAll, digit);
      const int rank = __popc(same & ((1u << lane) - 1));
      const int32_t start = exists ? counters[digit] : 0;
      __syncwarp();  // the counters have been read
      if (exists && rank == 0) counters[digit] = start + __popc(same);
      if (exists) target[start + rank] = record;
      __syncwarp();  // and may be read again
    }
  }
}

// All lanes of a warp: writes the `count` records of `from` to `to`, in the order of their `sample`, a non-negative
// int32 that no two share. Up to 32 records it compares each with each. More it marks in a bitmap, a window of samples
// at a time, whose set bits it counts; or, where the samples lie in more than kMostOrderWindows windows, it sorts them
// by digits, with `from` as scratch. So the work is in proportion to the number of records, all of them in one cell
// included.
template <typename Record>
__device__ __forceinline__ void order_records(Record* __restrict__ from, Record* __restrict__ to, int32_t count,
                                              OrderBitmap& bitmap) {
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kWindow = OrderBitmap::kWords * 32;
  const int lane = threadIdx.x % 32;
  if (count == 0) return;
  if (count <= 32) {
    const Record record = from[min(lane, count - 1)];
    int32_t rank = 0;
    for (int n = 0; n < count; ++n) rank += __shfl_sync(kAll, record.sample, n) < record.sample;
    if (lane < count) to[rank] = record;
    return;
  }
  int32_t lowest = INT32_MAX, highest = 0;
  for (int32_t i = lane; i < count; i += 32) {
    lowest = min(lowest, from[i].sample), highest = max(highest, from[i].sample);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    lowest = min(lowest, __shfl_xor_sync(kAll, lowest, step));
    highest = max(highest, __shfl_xor_sync(kAll, highest, step));
  }
  if (highest - lowest >= kMostOrderWindows * kWindow) {
    return order_by_digits(from, to, count, lowest, highest - lowest, bitmap.counters);
  }
  int32_t placed = 0;
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
    int32_t sum = placed + sum_up_to_lane(total) - total;
    for (int i = 0; i < 32; ++i) {
      bitmap.before[lane * 33 + i] = sum;
      sum += __popc(bitmap.bits[lane * 33 + i]);
    }
    placed = __shfl_sync(kAll, sum, 31);
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

}  // namespace visdet

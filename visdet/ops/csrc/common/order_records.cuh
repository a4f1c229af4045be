// Records sorted by their samples, for sums whose order must not change from run to run.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace visdet {

// Scratch of a warp in shared memory. One word more every 32: the words that a lane counts lie in different banks.
struct OrderBitmap {
  static constexpr int kWords = 1024;  // 32 a lane
  static constexpr int kPadded = kWords + 32;
  uint32_t bits[kPadded];
  int32_t before[kPadded];  // set bits of earlier words
};

// All lanes of a warp: writes the `count` records of `from` to `to`, in the order of their `sample`, a non-negative
// int32 that no two share. Up to 32 records it compares each with each; more it marks in a bitmap, a window of samples
// at a time, whose set bits it counts.
template <typename Record>
__device__ __forceinline__ void order_records(const Record* __restrict__ from, Record* __restrict__ to, int32_t count,
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
    int32_t inclusive = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    int32_t sum = placed + inclusive - total;
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

// The names of cells.cuh that operators' sources still ask for under other ones.
#pragma once

#include "common/cells.cuh"

namespace visdet {

constexpr int kScanEach = kCountsPerThread;

template <int THREADS>
__device__ __forceinline__ int32_t sum_before(int32_t value, int32_t& total) {
  return exclusive_sum_block<THREADS>(value, total);
}
template <int THREADS>
__device__ __forceinline__ int32_t place_counts(const int32_t* counts, int32_t* starts, int64_t begin, int64_t end,
                                                int32_t carry) {
  return scan_counts<THREADS>(counts, starts, begin, end, carry);
}

}  // namespace visdet

// Gradients that many threads add to: in floating point, in the order in which they come, or in whole numbers, of which
// any order gives the same sum.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "common/values.cuh"
#include "common/warp.cuh"

namespace visdet::roi_align {

template <typename A>
struct InAnyOrder {
  A* sums;

  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void add(int64_t at, A value) const { atomicAdd(sums + at, value); }
};

// Sums of multiples of 2^-shift. `shift` is the greatest one with which no sum can overflow, given that the terms of a
// sum are at most `peak` each and fewer than 2^count_bits, so that float32 terms lose nothing that a float32 sum would
// keep beside the largest of them. NaN and infinity are added up apart, where any order gives the same result, too.
template <typename A>
struct AsWholeNumbers {
  unsigned long long* sums;
  A* not_finite;
  const unsigned long long* peak;  // the bits of a double
  int count_bits;
  int shift = 0;

  __device__ __forceinline__ void begin() {
    const double most = __longlong_as_double(static_cast<long long>(*peak));
    shift = most > 0 ? 60 - count_bits - ilogb(most) : 0;
  }
  __device__ __forceinline__ void add(int64_t at, A value) const {
    if (isfinite(value)) {
      atomicAdd(sums + at, static_cast<unsigned long long>(llrint(ldexp(static_cast<double>(value), shift))));
    } else {
      atomicAdd(not_finite + at, value);
    }
  }
};

constexpr int kSumThreads = 256;

// The greatest finite absolute value, as the bits of a double, whose order is that of the numbers.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    peak_kernel(const T* __restrict__ values, int64_t count, unsigned long long* __restrict__ peak) {
  double greatest = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
    const double value = fabs(static_cast<double>(to_accumulate(values[i])));
    if (isfinite(value) && value > greatest) greatest = value;
  }
  greatest = max_lanes(greatest);
  if (threadIdx.x % 32 == 0) atomicMax(peak, static_cast<unsigned long long>(__double_as_longlong(greatest)));
}

// The sums as values.
template <typename T, typename A>
__global__ void __launch_bounds__(kSumThreads)
    finish_kernel(AsWholeNumbers<A> sums, int64_t count, T* __restrict__ values) {
  sums.begin();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kSumThreads) {
    const double whole = static_cast<double>(static_cast<long long>(sums.sums[i]));
    values[i] = from_accumulate<T>(static_cast<A>(ldexp(whole, -sums.shift)) + sums.not_finite[i]);
  }
}

// Writes the sums that add(AsWholeNumbers<A>) adds up to `result`, of terms that are at most the largest of `values`,
// up to `most` of them for each.
template <typename T, typename A, typename Add>
void add_whole_numbers(const char* op, const DeviceScope& scope, const Tensor& values, int64_t most, Tensor& result,
                       const Add& add) {
  const int64_t count = result.numel();
  const Tensor whole = new_empty(result, {count + 1}, ScalarType::Long);
  const Tensor not_finite = new_empty(result, {count}, accumulate_dtype(result.scalar_type()));
  unsigned long long* words = data_of(whole);
  fill_bytes(op, scope, words, 0, (count + 1) * 8);
  fill_bytes(op, scope, data_of(not_finite), 0, count * static_cast<int64_t>(sizeof(A)));
  int bits = 1;
  while (bits < 50 && (int64_t{1} << bits) <= most) ++bits;
  const AsWholeNumbers<A> sums{words, data_of(not_finite), words + count, bits};
  const auto blocks = [&](int64_t numbers) { return bounded_blocks(scope, numbers, kSumThreads, 8); };
  launch({op, "peak_kernel", scope, blocks(values.numel()), kSumThreads}, peak_kernel<T>, data_of(values),
         values.numel(), words + count);
  add(sums);
  launch({op, "finish_kernel", scope, blocks(count), kSumThreads}, finish_kernel<T, A>, sums, count, data_of(result));
}

}  // namespace visdet::roi_align

// Dropout without a mask in memory: whether a value is kept follows from a seed and from its place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace visdet {

// Philox 4x32-10 of Salmon et al., SC 2011: four random words for a key and a counter.
__device__ __forceinline__ uint4 philox(uint64_t key, uint64_t counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint4 x{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
    x = {high1 ^ x.y ^ k0, low1, high0 ^ x.w ^ k1, low0};
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return x;
}

struct Dropout {
  const int64_t* seed;  // nullptr: everything is kept
  uint64_t threshold;   // a value is dropped if its random word is below
  float scale;          // of kept values

  static Dropout of(const int64_t* seed, double p) {
    return {seed, static_cast<uint64_t>(p * 4294967296.0), static_cast<float>(1 / (1 - p))};
  }

  // The factors of the values at places first, first + 1, ...; `first` is a multiple of four.
  template <int N>
  __device__ __forceinline__ void factors(int64_t first, float (&to)[N]) const {
    static_assert(N % 4 == 0);
    if (seed == nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = 1;
      return;
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 random = philox(static_cast<uint64_t>(*seed), static_cast<uint64_t>(first + i) / 4);
      const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + j] = words[j] < threshold ? 0.f : scale;
    }
  }
};

}  // namespace visdet

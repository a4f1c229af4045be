// One vector register of the instruction set that a kernel file is compiled for, and conversions of 16-bit values. See
// kernels.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace visdet {
namespace VISDET_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#define VISDET_INLINE static inline __attribute__((always_inline))

// The type sums are taken in.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};

template <typename A>
struct VecOf;
template <>
struct VecOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t integers __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t integers __attribute__((vector_size(kVectorBytes)));
};
template <typename A>
using Vec = typename VecOf<A>::type;
template <typename A>
using IntVec = typename VecOf<A>::integers;  // of as many integers, each as wide
template <typename A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

VISDET_INLINE float to_accumulate(float v) { return v; }
VISDET_INLINE double to_accumulate(double v) { return v; }
VISDET_INLINE float to_accumulate(BFloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}
VISDET_INLINE float to_accumulate(Float16 v) {
  // Shifting the exponent field into float32's place leaves it short by 127 - 15; multiplying by 2^112 mends normal and
  // subnormal numbers alike. Inf and NaN keep an all-ones exponent.
  const uint32_t magnitude = static_cast<uint32_t>(v.bits & 0x7fff) << 13;
  float out;
  std::memcpy(&out, &magnitude, sizeof(out));
  out *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &out, sizeof(bits));
  if ((v.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= static_cast<uint32_t>(v.bits & 0x8000) << 16;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

// Conversions back round to nearest even.
VISDET_INLINE void from_accumulate(float v, float& out) { out = v; }
VISDET_INLINE void from_accumulate(double v, double& out) { out = v; }
VISDET_INLINE void from_accumulate(float v, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
VISDET_INLINE void from_accumulate(float v, Float16& out) {
#if defined(__F16C__)
  out.bits = static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT), 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    out.bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, rounded by the addition of 0.5
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof(shifted));
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, sizeof(rounded));
    out.bits = static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  } else {
    out.bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
#endif
}

VISDET_INLINE Vec<float> load(const float* from) {
  Vec<float> out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
VISDET_INLINE Vec<double> load(const double* from) {
  Vec<double> out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
VISDET_INLINE Vec<float> load(const BFloat16* from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vec<float>>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vec<float>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
  Vec<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = to_accumulate(from[i]);
  return out;
#endif
}
VISDET_INLINE Vec<float> load(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec<float>>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Vec<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = to_accumulate(from[i]);
  return out;
#endif
}

// from[index[i]] for each lane.
VISDET_INLINE Vec<float> gather(const float* from, const int32_t* index) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec<float>>(_mm512_i32gather_ps(_mm512_loadu_si512(index), from, sizeof(float)));
#else
  Vec<float> out;
  for (int i = 0; i < kLanes<float>; ++i) out[i] = from[index[i]];
  return out;
#endif
}
VISDET_INLINE Vec<double> gather(const double* from, const int32_t* index) {
  Vec<double> out;
  for (int i = 0; i < kLanes<double>; ++i) out[i] = from[index[i]];
  return out;
}

template <typename A>
VISDET_INLINE void store(A* to, Vec<A> v) {
  std::memcpy(to, &v, sizeof(v));
}

// sums[k] = the sum over the lanes of v[k]. The order of additions is fixed for each instruction set.
VISDET_INLINE void horizontal_sums(const Vec<float> (&v)[4], float (&sums)[4]) {
#if defined(__AVX2__)
  __m256 half[4];
  for (int k = 0; k < 4; ++k) {
#if defined(__AVX512F__)
    half[k] = _mm256_add_ps(_mm512_castps512_ps256(v[k]), _mm512_extractf32x8_ps(v[k], 1));
#else
    half[k] = v[k];
#endif
  }
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int k = 0; k < 4; ++k) {
    sums[k] = 0;
    for (int i = 0; i < kLanes<float>; ++i) sums[k] += v[k][i];
  }
#endif
}
VISDET_INLINE void horizontal_sums(const Vec<double> (&v)[4], double (&sums)[4]) {
  for (int k = 0; k < 4; ++k) {
    sums[k] = 0;
    for (int i = 0; i < kLanes<double>; ++i) sums[k] += v[k][i];
  }
}

template <typename A>
VISDET_INLINE IntVec<A> lane_numbers() {
  IntVec<A> numbers = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) numbers[i] = i;
  return numbers;
}

// All lanes of v in one number, by f, a function of two vectors.
template <typename A, typename F>
VISDET_INLINE A across_lanes(Vec<A> v, const F& f) {
#pragma GCC unroll 4
  for (int n = kLanes<A> / 2; n > 0; n /= 2) v = f(v, __builtin_shuffle(v, lane_numbers<A>() ^ n));
  return v[0];
}

template <typename A>
VISDET_INLINE A sum_of_lanes(Vec<A> v) {
  return across_lanes<A>(v, [](Vec<A> one, Vec<A> other) { return one + other; });
}

// v in the first `count` lanes, `rest` in the others.
template <typename A>
VISDET_INLINE Vec<A> first_lanes(Vec<A> v, int64_t count, A rest) {
  const IntVec<A> end = IntVec<A>{} + (count < kLanes<A> ? static_cast<int>(count) : kLanes<A>);
  return lane_numbers<A>() < end ? v : Vec<A>{} + rest;
}

}  // namespace VISDET_ISA
}  // namespace visdet

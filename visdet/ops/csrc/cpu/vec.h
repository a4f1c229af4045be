// One vector register of the instruction set that a kernel file is compiled for, and what is done with it. See
// kernels.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

// From here on in a file, a multiplication and an addition are not fused, because they would be rounded once.
#if defined(__clang__)
#define VISDET_NO_CONTRACTION _Pragma("clang fp contract(off)")
#else
#define VISDET_NO_CONTRACTION _Pragma("GCC optimize(\"fp-contract=off\")")
#endif

namespace visdet::VISDET_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

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
using IntVec = typename VecOf<A>::integers;  // of as many integers of the same size
template <typename A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

template <typename A>
VISDET_INLINE Vec<A> load(const A* from) {
  Vec<A> out;
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

// Returns from[index[i]] in lane i.
template <typename A>
VISDET_INLINE Vec<A> gather(const A* from, const int32_t* index) {
  Vec<A> out;
  for (int i = 0; i < kLanes<A>; ++i) out[i] = from[index[i]];
  return out;
}
#if defined(__AVX512F__)
VISDET_INLINE Vec<float> gather(const float* from, const int32_t* index) {
  return reinterpret_cast<Vec<float>>(_mm512_i32gather_ps(_mm512_loadu_si512(index), from, sizeof(float)));
}
#endif

template <typename A>
VISDET_INLINE void store(A* to, Vec<A> v) {
  std::memcpy(to, &v, sizeof(v));
}

// Copies from[0..count) to to[0..count), by whole registers as long as `from` can be read, which has `readable`
// numbers. Reading a whole register is slow where its numbers were just written one by one.
template <typename T, typename A>
VISDET_INLINE void copy_numbers(const T* from, int64_t readable, int64_t count, A* to) {
  int64_t i = 0;
  for (; i < count && i + kLanes<A> <= readable; i += kLanes<A>) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_accumulate(from[i]);
}

// Writes sums in the type of values: to[i] = from[i].
template <typename T, typename A>
VISDET_INLINE void round_numbers(const A* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from_accumulate(from[i], to[i]);
}

// Writes to sums[k] the sum over the lanes of v[k]. The order of additions is fixed for each instruction set.
template <typename A>
VISDET_INLINE void horizontal_sums(const Vec<A> (&v)[4], A (&sums)[4]) {
  for (int k = 0; k < 4; ++k) {
    sums[k] = 0;
    for (int i = 0; i < kLanes<A>; ++i) sums[k] += v[k][i];
  }
}
#if defined(__AVX2__)
VISDET_INLINE void horizontal_sums(const Vec<float> (&v)[4], float (&sums)[4]) {
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
}
#endif

template <typename A>
VISDET_INLINE IntVec<A> lane_numbers() {
  IntVec<A> numbers = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) numbers[i] = i;
  return numbers;
}

// Combines all lanes of v into one number by f, a function of two vectors.
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

// Returns whether a comparison holds in any lane.
template <typename A>
VISDET_INLINE bool any_lane(IntVec<A> holds) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(holds), reinterpret_cast<__m512i>(holds)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(holds)) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes<A>; ++i) any |= holds[i] != 0;
  return any;
#endif
}

// Returns v in the first `count` lanes, `rest` in the others.
template <typename A>
VISDET_INLINE Vec<A> first_lanes(Vec<A> v, int64_t count, A rest) {
  const IntVec<A> end = IntVec<A>{} + (count < kLanes<A> ? static_cast<int>(count) : kLanes<A>);
  return lane_numbers<A>() < end ? v : Vec<A>{} + rest;
}

}  // namespace visdet::VISDET_ISA

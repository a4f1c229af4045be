// The types of values, and conversions of one value to the type that sums are taken in, and back.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define VISDET_INLINE static inline __attribute__((always_inline))

namespace visdet {

// Raw 16-bit floating-point values, as torch stores them.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type sums are taken in.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};

// Returns the bits of a number, or of a vector of numbers, as those of another type of the same size.
template <typename To, typename From>
VISDET_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

VISDET_INLINE float to_accumulate(float v) { return v; }
VISDET_INLINE double to_accumulate(double v) { return v; }
VISDET_INLINE float to_accumulate(BFloat16 v) { return bits_as<float>(static_cast<uint32_t>(v.bits) << 16); }
VISDET_INLINE float to_accumulate(Float16 v) {
  // Shifting the exponent field into float32's place leaves it short by 127 - 15; multiplying by 2^112 mends normal and
  // subnormal numbers alike. Inf and NaN keep an all-ones exponent.
  const uint32_t magnitude = static_cast<uint32_t>(v.bits & 0x7fff) << 13;
  uint32_t bits = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  if ((v.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  return bits_as<float>(bits | static_cast<uint32_t>(v.bits & 0x8000) << 16);
}

// Conversions back round to nearest even.
VISDET_INLINE void from_accumulate(float v, float& out) { out = v; }
VISDET_INLINE void from_accumulate(double v, double& out) { out = v; }
VISDET_INLINE void from_accumulate(float v, BFloat16& out) {
  const uint32_t bits = bits_as<uint32_t>(v);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
VISDET_INLINE void from_accumulate(float v, Float16& out) {
#if defined(__F16C__)
  out.bits = static_cast<uint16_t>(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT), 0));
#else
  const uint32_t bits = bits_as<uint32_t>(v);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    out.bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, rounded by the addition of 0.5
    out.bits = static_cast<uint16_t>(sign | (bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u));
  } else {
    out.bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
#endif
}

}  // namespace visdet

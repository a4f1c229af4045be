// The exponential function of a vector of numbers that are not positive.
#pragma once

#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

template <typename A>
struct ExpOf;
template <>
struct ExpOf<float> {
  static constexpr float kLeast = -87.0f, kMagic = 12582912.0f;  // 1.5 * 2^23
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr int kTerms = 7, kMantissa = 23;
  static constexpr int32_t kOne = 0x3f800000;
};
template <>
struct ExpOf<double> {
  static constexpr double kLeast = -708.0, kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0x1.62e42fefa38p-1, kLn2Low = 0x1.ef35793c7673p-45;
  static constexpr int kTerms = 13, kMantissa = 52;
  static constexpr int64_t kOne = 0x3ff0000000000000;
};

// Returns exp(x) of x <= 0, to about an ulp, or 0 where that is below the smallest normal number.
template <typename A>
VISDET_INLINE Vec<A> exp_nonpositive(Vec<A> x) {
  using E = ExpOf<A>;
  constexpr A kInverse[] = {1,
                            1,
                            A(1) / 2,
                            A(1) / 6,
                            A(1) / 24,
                            A(1) / 120,
                            A(1) / 720,
                            A(1) / 5040,
                            A(1) / 40320,
                            A(1) / 362880,
                            A(1) / 3628800,
                            A(1) / 39916800,
                            A(1) / 479001600,
                            A(1) / 6227020800.0};
  const Vec<A> shifted = x * A(1.4426950408889634) + E::kMagic;  // its low bits are the exponent
  const Vec<A> n = shifted - E::kMagic;
  const Vec<A> r = (x - n * E::kLn2High) - n * E::kLn2Low;
  Vec<A> sum = r * kInverse[E::kTerms] + kInverse[E::kTerms - 1];
#pragma GCC unroll 16
  for (int i = E::kTerms - 2; i >= 0; --i) sum = sum * r + kInverse[i];
  const Vec<A> scale = bits_as<Vec<A>>((bits_as<IntVec<A>>(shifted) << E::kMantissa) + E::kOne);
  const Vec<A> zero = {};
  return x < E::kLeast ? zero : sum * scale;
}

}  // namespace visdet::VISDET_ISA

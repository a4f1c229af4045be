// sigmoid_focal_loss on the CPU. The contract is in csrc/sigmoid_focal_loss.h.
//
// Most elements are not the target of their row. So the kernels first compute a whole row as background, in vectors,
// and then compute the few targets once more. They are parallel over rows.
#include "sigmoid_focal_loss.h"

#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Returns log(1 + e) of 0 <= e <= 1, which is 2 artanh(z) with z = e / (2 + e), by its series.
template <typename A>
VISDET_INLINE Vec<A> log1p_of_unit(Vec<A> e) {
  constexpr int kTerms = sizeof(A) == 4 ? 8 : 18;  // 9^-kTerms / (2 kTerms + 1) is below half an ulp
  const Vec<A> z = e / (e + 2), square = z * z, zero = {};
  Vec<A> sum = zero + A(1) / (2 * kTerms + 1);
#pragma GCC unroll 20
  for (int k = kTerms - 1; k >= 0; --k) sum = sum * square + A(1) / (2 * k + 1);
  return 2 * z * sum;
}

VISDET_INLINE float power(float base, float exponent) { return __builtin_powf(base, exponent); }
VISDET_INLINE double power(double base, double exponent) { return __builtin_pow(base, exponent); }

// Returns the loss of a, or its derivative, without balance and weight.
template <typename A, bool GRAD>
VISDET_INLINE Vec<A> focal(Vec<A> a, A gamma) {
  const Vec<A> zero = {};
  const auto is_positive = a > zero;
  const Vec<A> e = exp_nonpositive<A>(is_positive ? -a : a), near = 1 / (1 + e), far = e * near;
  const Vec<A> p = is_positive ? near : far, q = is_positive ? far : near;
  const Vec<A> s = (is_positive ? a : zero) + log1p_of_unit<A>(e);
  Vec<A> factor;
  if (gamma == A(2)) {
    factor = p * p;
  } else {
    for (int lane = 0; lane < kLanes<A>; ++lane) factor[lane] = power(A(p[lane]), gamma);
  }
  const Vec<A> value = GRAD ? factor * (gamma * q * s + p) : factor * s;
  return a == a ? value : a;
}

VISDET_INLINE void store_as(float* to, Vec<float> v) { store(to, v); }
VISDET_INLINE void store_as(double* to, Vec<double> v) { store(to, v); }
template <typename T>
VISDET_INLINE void store_as(T* to, Vec<float> v) {
  for (int lane = 0; lane < kLanes<float>; ++lane) from_accumulate(float(v[lane]), to[lane]);
}

// Writes elements [begin, end) as background, times factor.
template <typename T, typename A, bool GRAD>
void background(const FocalArrays<T, A>& a, int64_t begin, int64_t end, A factor) {
  constexpr int W = kLanes<A>;
  const Vec<A> zero = {};
  T from[W], to[W], with[W];
  for (int64_t i = begin; i < end; i += W) {
    const int64_t count = end - i < W ? end - i : W;
    const bool is_whole = count == W;
    const T *x = a.input + i, *g = GRAD && a.grad_step ? a.grad_output + i : nullptr;
    if (!is_whole) {
      std::memset(from, 0, sizeof(from)), std::memset(with, 0, sizeof(with));
      std::memcpy(from, x, count * sizeof(T));
      if (g) std::memcpy(with, g, count * sizeof(T));
      x = from, g = g ? with : nullptr;
    }
    Vec<A> value = factor * focal<A, GRAD>(load(x), a.gamma);
    if constexpr (GRAD) value *= g ? load(g) : zero + to_accumulate(*a.grad_output);
    if (is_whole) {
      store_as(a.output + i, value);
    } else {
      store_as(to, value);
      std::memcpy(a.output + i, to, count * sizeof(T));
    }
  }
}

template <typename T, typename A, bool GRAD>
void focal_rows(const FocalArrays<T, A>& a, int64_t begin, int64_t end) {
  const Vec<A> zero = {};
  if (!a.weight) background<T, A, GRAD>(a, begin * a.C, end * a.C, 1 - a.alpha);
  for (int64_t n = begin; n < end; ++n) {
    const int64_t c = a.target[n];
    const bool is_class = c >= 0 && c < a.C;
    const A weight = a.weight && is_class ? a.weight[c] : A(1);
    if (a.weight) background<T, A, GRAD>(a, n * a.C, (n + 1) * a.C, weight * (1 - a.alpha));
    if (!is_class) continue;
    const int64_t i = n * a.C + c;
    A value = weight * a.alpha * focal<A, GRAD>(zero - to_accumulate(a.input[i]), a.gamma)[0];
    if constexpr (GRAD) value *= -to_accumulate(a.grad_output[i * a.grad_step]);
    from_accumulate(value, a.output[i]);
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(FocalKernels, focal_rows<T, A, false>, focal_rows<T, A, true>)

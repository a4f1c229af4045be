// sigmoid_focal_loss on the CPU. The contract is in ../sigmoid_focal_loss.h; how this file is compiled, in vec.h.
//
// Most elements are no target: rows are run through as background, in vectors, and the few targets are then computed
// once more. Parallel over rows.
#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet {

template <typename T, typename A>
struct FocalArrays {
  int64_t N, C;
  const T* input;         // [N, C]
  const int64_t* target;  // [N]
  const A* weight;        // [C], or null
  A gamma, alpha;
  const T* grad_output;  // [N, C], or null: forward
  int64_t grad_step;     // 1, or 0: one number for all
  T* output;             // [N, C]: losses, or their gradients
};

namespace VISDET_ISA {

// log(1 + e) of 0 <= e <= 1: 2 artanh(z) with z = e / (2 + e), by its series.
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

// The loss of a, or its derivative, without balance and weight.
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

// Elements [begin, end) as background, times factor.
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

// Rows [begin, end).
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

#define VISDET_INSTANTIATE(T, A)                                                       \
  template void focal_rows<T, A, false>(const FocalArrays<T, A>& a, int64_t, int64_t); \
  template void focal_rows<T, A, true>(const FocalArrays<T, A>& a, int64_t, int64_t);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cpu/dispatch.h"
#include "sigmoid_focal_loss.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                    \
  namespace isa {                                              \
  template <typename T, typename A, bool GRAD>                 \
  void focal_rows(const FocalArrays<T, A>&, int64_t, int64_t); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

constexpr int64_t kGrain = 1 << 13;  // elements of one piece of work

template <bool GRAD>
Tensor run_focal(const FocalProblem& problem, const Tensor* grad_output_in, const Tensor& input_in,
                 const Tensor& target_in, const Tensor& weight_in, double gamma, double alpha) {
  const Tensor input = dense(input_in), target = dense(target_in), weight = dense(weight_in);
  Tensor output = new_empty(input, {problem.N, problem.C});
  if (output.numel() == 0) return output;
  const bool one_number = GRAD && is_one_number(*grad_output_in);
  const Tensor grad_output = GRAD && !one_number ? dense(*grad_output_in) : GRAD ? *grad_output_in : input;
  dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    FocalArrays<T, A> a{};
    a.N = problem.N, a.C = problem.C;
    a.input = static_cast<const T*>(input.const_data_ptr());
    a.target = target.const_data_ptr<int64_t>();
    a.weight = weight.numel() ? weight.const_data_ptr<A>() : nullptr;
    a.gamma = static_cast<A>(gamma), a.alpha = static_cast<A>(alpha);
    if (GRAD) a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_step = one_number ? 0 : 1;
    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(focal_rows, T, A, GRAD);
    const int64_t grain = std::max<int64_t>(1, kGrain / a.C);
    torch::stable::parallel_for(0, a.N, grain, [&](int64_t begin, int64_t end) { run(a, begin, end); });
  });
  return output;
}

Tensor sigmoid_focal_loss(const Tensor& input, const Tensor& target, const Tensor& weight, double gamma, double alpha) {
  const auto problem = check_sigmoid_focal_loss("sigmoid_focal_loss", input, target, weight);
  return run_focal<false>(problem, nullptr, input, target, weight, gamma, alpha);
}

Tensor sigmoid_focal_loss_backward(const Tensor& grad_output, const Tensor& input, const Tensor& target,
                                   const Tensor& weight, double gamma, double alpha) {
  constexpr const char* op = "sigmoid_focal_loss_backward";
  const auto problem = check_sigmoid_focal_loss(op, input, target, weight);
  check_focal_gradient(op, grad_output, input);
  return run_focal<true>(problem, &grad_output, input, target, weight, gamma, alpha);
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("sigmoid_focal_loss", TORCH_BOX(&visdet::sigmoid_focal_loss));
  m.impl("sigmoid_focal_loss_backward", TORCH_BOX(&visdet::sigmoid_focal_loss_backward));
}

#endif  // VISDET_ISA_BASELINE

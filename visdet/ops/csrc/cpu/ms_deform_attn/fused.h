// The fused form of ms_deform_attn. begin_row() turns a row's offsets and logits into locations and weights, in a
// thread's scratch, and end_row() turns the gradients of these into those of offsets and logits. For the plain form
// both functions do nothing.
#pragma once

#include <type_traits>

#include "cpu/exp.h"
#include "cpu/ms_deform_attn/walk.h"

namespace visdet::VISDET_ISA {

// Reads one row of a tensor [rows, count], whose type is A if `in_sum_type` and else T. It may write up to a register
// beyond the row's numbers in `to`.
template <typename T, typename A>
VISDET_INLINE void read_numbers(const void* from, bool in_sum_type, int64_t rows, int64_t row, int64_t count, A* to) {
  const int64_t first = row * count, readable = rows * count - first;
  if (in_sum_type) {
    copy_numbers(static_cast<const A*>(from) + first, readable, count, to);
  } else {
    copy_numbers(static_cast<const T*>(from) + first, readable, count, to);
  }
}
template <typename T, typename A>
VISDET_INLINE void write_numbers(const A* from, bool in_sum_type, int64_t row, int64_t count, void* to) {
  if (in_sum_type) {
    copy_numbers(from, count, count, static_cast<A*>(to) + row * count);
  } else {
    T* numbers = static_cast<T*>(to) + row * count;
    for (int64_t i = 0; i < count; ++i) from_accumulate(from[i], numbers[i]);
  }
}

// Turns the logits in `weights` into their softmax, with zeros after the last up to a whole register. `largest` is a
// finite number, so that -inf has weight zero; a row of -inf alone is NaN, as in torch, and so is one with a NaN.
template <typename A>
VISDET_INLINE void softmax(A* weights, int64_t K) {
  constexpr int W = kLanes<A>;
  const auto larger = [](Vec<A> one, Vec<A> other) { return other > one ? other : one; };
  constexpr A kLeast = std::is_same<A, float>::value ? A(-3.4028234663852886e38) : A(-1.7976931348623157e308);
  Vec<A> largest = Vec<A>{} + kLeast, sums = {};
  for (int64_t k = 0; k < K; k += W) {
    const Vec<A> logits = first_lanes<A>(load(weights + k), K - k, -static_cast<A>(__builtin_inf()));
    store(weights + k, logits);
    largest = larger(largest, logits);
  }
  const A top = across_lanes<A>(largest, larger);
  for (int64_t k = 0; k < K; k += W) {
    const Vec<A> weight = exp_nonpositive<A>(load(weights + k) - top);
    store(weights + k, weight);
    sums += weight;
  }
  const A sum = sum_of_lanes<A>(sums);
  for (int64_t k = 0; k < K; k += W) store(weights + k, load(weights + k) / sum);
}

// Returns the size of a unit of offset in locations: a register of numbers from i on, alternately for x and for y.
template <typename T, typename A>
VISDET_INLINE Vec<A> offset_scale(const MsDeformAttnArrays<T, A>& a, const A* reference, int64_t i) {
  const Vec<A> scale = load(a.scale + i);
  return a.boxes ? scale * gather(reference + 2, a.center + i) : scale;
}

// In the fused form, turns offsets and logits into the row's locations and weights.
template <typename T, typename A>
VISDET_INLINE void begin_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  const int64_t K = a.K, D = a.boxes ? 4 : 2;
  A *locations = scratch, *weights = scratch + 2 * scratch_samples(K);
  const int64_t rows = a.B * a.Q * a.G;
  read_numbers<T>(a.offsets, a.in_sum_type, rows, row, 2 * K, locations);
  read_numbers<T>(a.logits, a.in_sum_type, rows, row, K, weights);
  softmax(weights, K);
  const A* reference = a.reference_points + row / a.G * a.L * D;
  for (int64_t i = 0; i < 2 * K; i += kLanes<A>) {
    store(locations + i, gather(reference, a.center + i) + load(locations + i) * offset_scale(a, reference, i));
  }
}

// In the fused form, turns the gradients of the row's locations and weights into those of its offsets, logits and
// reference points. A sample that does not count gives zero, whatever the box.
template <typename T, typename A>
VISDET_INLINE void end_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  constexpr int W = kLanes<A>;
  const int64_t K = a.K, N = scratch_samples(K), D = a.boxes ? 4 : 2, query = row / a.G;
  const A* weights = scratch + 2 * N;
  A *grad_locations = scratch + 3 * N, *grad_weights = scratch + 5 * N, *offsets = scratch + 6 * N;
  const A* reference = a.reference_points + query * a.L * D;
  Vec<A> products = {};
  for (int64_t k = 0; k < K; k += W) {
    products += load(weights + k) * first_lanes<A>(load(grad_weights + k), K - k, A(0));
  }
  const A mean = sum_of_lanes<A>(products);
  for (int64_t k = 0; k < K; k += W) store(grad_weights + k, load(weights + k) * (load(grad_weights + k) - mean));
  write_numbers<T>(grad_weights, a.in_sum_type, row, K, a.grad_logits);
  if (a.grad_reference != nullptr) {
    const int64_t b = query / a.Q, q = query - b * a.Q, g = row - query * a.G;
    A* sums = a.grad_reference + ((b * a.G + g) * a.Q + q) * a.L * D;
    for (int64_t i = 0; i < a.L * D; ++i) sums[i] = 0;
    read_numbers<T>(a.offsets, a.in_sum_type, a.B * a.Q * a.G, row, 2 * K, offsets);
    for (int64_t k = 0; k < K; ++k) {
      A* sum = sums + a.level[k] * D;
      for (int64_t i = 0; i < 2; ++i) {
        const A grad = grad_locations[2 * k + i];
        sum[i] += grad;
        if (a.boxes && grad != 0) sum[2 + i] += grad * offsets[2 * k + i] * a.scale[2 * k + i];
      }
    }
  }
  const Vec<A> zero = {};
  for (int64_t i = 0; i < 2 * K; i += W) {
    const Vec<A> grad = load(grad_locations + i);
    store(grad_locations + i, grad == zero ? zero : grad * offset_scale(a, reference, i));
  }
  write_numbers<T>(grad_locations, a.in_sum_type, row, 2 * K, a.grad_offsets);
}

}  // namespace visdet::VISDET_ISA

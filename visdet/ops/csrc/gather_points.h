// gather_points: features of chosen points, or weighted sums of three of them each.
//
// features [B, C, N], or [N, C] for every b; indices [B, M, K], int32 or int64; weight [B, M, 3] for K = 3, and [0] for
// K = 1, whose weights are 1. features and weight are both float32 or both float64, and every operation is rounded by
// itself.
//
//   output[b, c, m] = sum_k weight[b, m, k] * features[b, c, indices[b, m, k]]
//
// A term whose index is not in 0..N-1 is 0 with zeros_outside, and an error without: a RuntimeError on the CPU, and a
// failed assertion on CUDA, as of torch's own gather. On CUDA, threads add to the gradient of features in any order.
//
// stacked_indices: indices [M, K] within clouds, which stand one after another: `sizes` [clouds] says how many points
//   each has, and `groups` [clouds] how many rows of indices, both int32. The result is int64 [M, K], the indices among
//   the points of all clouds, or -1 for what is not one of a point of the cloud.
#pragma once

#include <algorithm>
#include <cassert>
#include <tuple>

#include "common/each.h"
#include "common/rounded.h"

namespace visdet {

#if defined(__CUDACC__)
constexpr int64_t kPoints = 1;  // that a computation of the output has
template <int K>
constexpr int64_t kChannels = K == 1 ? 8 : 4;
#else
constexpr int64_t kPoints = 4096;
template <int K>
constexpr int64_t kChannels = 1;
constexpr int64_t kSharedChannels = 16;  // a line of the cache
#endif

// The quotient of numbers from 0 on. A GPU takes several times as long for 64 bits.
VISDET_HOST_DEVICE int64_t whole_quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

template <typename A, typename I, int K>
struct GatherArrays {
  int64_t B, C, N, M;
  int64_t step_b, step_c, step_n;  // of the features, or of their gradient, in memory
  bool zeros_outside;
  const I* indices;
  const A* weight;

  // The points and channels of b that computation i has, and the number of computations.
  struct Part {
    int64_t b, m, c, end_m, end_c;
  };
  VISDET_HOST_DEVICE Part part(int64_t i) const {
    const int64_t parts = (M + kPoints - 1) / kPoints, blocks = (C + kChannels<K> - 1) / kChannels<K>;
    const int64_t row = whole_quotient(i, parts), b = whole_quotient(row, blocks);
    const int64_t m = (i - row * parts) * kPoints, c = (row - b * blocks) * kChannels<K>;
    return {b, m, c, m + kPoints < M ? m + kPoints : M, c + kChannels<K> < C ? c + kChannels<K> : C};
  }
  int64_t parts() const { return B * ((M + kPoints - 1) / kPoints) * ((C + kChannels<K> - 1) / kChannels<K>); }

  // Whether the term of an index is not 0.
  VISDET_HOST_DEVICE bool counts(int64_t n) const {
    const bool is_inside = static_cast<uint64_t>(n) < static_cast<uint64_t>(N);
#if defined(__CUDA_ARCH__)
    assert(is_inside || zeros_outside);
#endif
    return is_inside;
  }
  VISDET_HOST_DEVICE A weighted(int64_t term, A value) const { return K == 1 ? value : product(weight[term], value); }
};

template <typename A, typename I, int K>
struct Gather : GatherArrays<A, I, K> {
  const A* features;
  A* output;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const auto [b, m, c, end_m, end_c] = this->part(i);
    const A* from = features + b * this->step_b + c * this->step_c;
    A* to = output + (b * this->C + c) * this->M;
#if defined(__CUDACC__)
    A totals[kChannels<K>] = {};
    for (int k = 0; k < K; ++k) {
      const int64_t term = (b * this->M + m) * K + k, n = this->indices[term];
      if (!this->counts(n)) continue;
      const A factor = K == 1 ? A(1) : this->weight[term];
#pragma unroll
      for (int j = 0; j < kChannels<K>; ++j) {
        const A value = c + j < end_c ? product(factor, from[n * this->step_n + j * this->step_c]) : A(0);
        totals[j] = k == 0 ? value : sum(totals[j], value);
      }
    }
#pragma unroll
    for (int j = 0; j < kChannels<K>; ++j)
      if (c + j < end_c) to[j * this->M + m] = totals[j];
#else
    for (int64_t at = m; at < end_m; ++at) {
      A total = 0;
      for (int k = 0; k < K; ++k) {
        const int64_t term = (b * this->M + at) * K + k, n = this->indices[term];
        const A value = this->counts(n) ? this->weighted(term, from[n * this->step_n]) : A(0);
        total = k == 0 ? value : total + value;
      }
      to[at] = total;
    }
#endif
  }
};

// Adds up the gradient of the features. On the CPU, a computation is a row of the gradient or, of features for every b,
// a block of its channels.
template <typename A, typename I, int K>
struct SpreadGradient : GatherArrays<A, I, K> {
  const A* grad_output;
  A* grad_features;

  // Adds the gradient of a point's channels c..end_c-1, which are at most kBlock.
  template <int64_t kBlock>
  VISDET_HOST_DEVICE void add(int64_t b, int64_t m, int64_t c, int64_t end_c) const {
    A grad[kBlock];
#pragma unroll
    for (int64_t j = 0; j < kBlock; ++j)
      grad[j] = c + j < end_c ? grad_output[(b * this->C + c + j) * this->M + m] : A(0);
    for (int k = 0; k < K; ++k) {
      const int64_t term = (b * this->M + m) * K + k, n = this->indices[term];
      if (!this->counts(n)) continue;
      A* to = grad_features + b * this->step_b + n * this->step_n + c * this->step_c;
#pragma unroll
      for (int64_t j = 0; j < kBlock; ++j) {
        if (c + j >= end_c) break;
#if defined(__CUDA_ARCH__)
        atomicAdd(to + j * this->step_c, this->weighted(term, grad[j]));
#else
        to[j * this->step_c] += this->weighted(term, grad[j]);
#endif
      }
    }
  }

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
#if defined(__CUDACC__)
    const auto part = this->part(i);
    add<kChannels<K>>(part.b, part.m, part.c, part.end_c);
#else
    if (this->step_b != 0) {
      const int64_t b = i / this->C, c = i - b * this->C;
      for (int64_t m = 0; m < this->M; ++m) add<1>(b, m, c, c + 1);
      return;
    }
    const int64_t c = i * kSharedChannels, end_c = std::min(c + kSharedChannels, this->C);
    for (int64_t b = 0; b < this->B; ++b)
      for (int64_t m = 0; m < this->M; ++m) add<kSharedChannels>(b, m, c, end_c);
#endif
  }
};

// The gradient of the weight of a term.
template <typename A, typename I, int K>
struct WeightGradient : GatherArrays<A, I, K> {
  const A *grad_output, *features;
  A* grad_weight;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t point = i / K, b = whole_quotient(point, this->M), n = this->indices[i];
    const A* grad = grad_output + b * this->C * this->M + point - b * this->M;
    const A* from = features + b * this->step_b + n * this->step_n;
    A total = 0;
    for (int64_t c = 0, end = this->counts(n) ? this->C : 0; c < end; ++c)
      total += grad[c * this->M] * from[c * this->step_c];
    grad_weight[i] = total;
  }
};

template <typename I>
struct StackedIndex {
  int64_t K, clouds;
  const I* indices;
  const int32_t *sizes, *groups;
  int64_t* result;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    int64_t row = whole_quotient(i, K), cloud = 0, start = 0;
    for (; cloud + 1 < clouds && row >= groups[cloud]; ++cloud) row -= groups[cloud], start += sizes[cloud];
    const int64_t n = indices[i];
    result[i] = n >= 0 && n < sizes[cloud] ? start + n : -1;
  }
};

inline void check_indices(const char* op, const Tensor& indices, Shape expected) {
  check_shape(op, "indices", indices, expected);
  VISDET_CHECK(op, indices.scalar_type() == ScalarType::Int || indices.scalar_type() == ScalarType::Long,
               "indices must be int32 or int64, got ", dtype_text(indices));
}

template <typename F>
void dispatch_index_type(const Tensor& indices, const F& f) {
  if (indices.scalar_type() == ScalarType::Long) return f(int64_t{});
  f(int32_t{});
}

// The arguments of gather_points, checked and dense. `features` is as it was given.
struct GatherInputs {
  Tensor features, indices, weight;
  bool zeros_outside;
  int64_t B, C, N, M, K;

  GatherInputs(const char* op, const Tensor& features, const Tensor& indices_in, const Tensor& weight_in,
               bool zeros_outside)
      : features(features), indices(dense(indices_in)), weight(dense(weight_in)), zeros_outside(zeros_outside) {
    check_indices(op, indices, {"B", "M", "K"});
    B = indices.size(0), M = indices.size(1), K = indices.size(2);
    check_device(op, "indices", indices, "features", features);
    check_sum_type(op, "features", features);
    if (features.dim() != 2) check_shape(op, "features", features, {{"B", B}, "C", "N"});
    C = features.size(1), N = features.size(features.dim() == 2 ? 0 : 2);
    VISDET_CHECK(op, K == 1 || K == 3, "indices must be [B, M, 1] or [B, M, 3], got ", shape_text(indices));
    if (K == 1) {
      check_like(op, "weight", weight, {int64_t{0}}, "features", features);
    } else {
      check_like(op, "weight", weight, {{"B", B}, {"M", M}, 3}, "features", features);
    }
#if !defined(__CUDACC__)
    if (zeros_outside) return;
    dispatch_index_type(indices, [&]<typename I>(I) {
      const I *index = data_of(indices), *end = index + indices.numel();
      const auto is_outside = [N = N](I n) { return n < 0 || n >= N; };
      int outside = 0;  // A sum is found faster than the first one.
      for (const I* at = index; at < end; ++at) outside |= is_outside(*at);
      if (outside) fail(op, ": indices must be in 0..", N - 1, ", got ", *std::find_if(index, end, is_outside));
    });
#endif
  }

  // Calls f(GatherArrays<A, I, K>), whose steps are those of `tensor`, which has the shape of features.
  template <typename F>
  void dispatch(const Tensor& tensor, const F& f) const {
    const bool is_shared = tensor.dim() == 2;
    dispatch_sum_type(tensor.scalar_type(), [&]<typename A>(A) {
      dispatch_index_type(indices, [&]<typename I>(I) {
        const auto call = [&]<int kTerms>(std::integral_constant<int, kTerms>) {
          f(GatherArrays<A, I, kTerms>{B, C, N, M, is_shared ? 0 : tensor.stride(0), tensor.stride(1),
                                       tensor.stride(is_shared ? 0 : 2), zeros_outside, data_of(indices),
                                       data_of(weight)});
        };
        if (K == 1) return call(std::integral_constant<int, 1>{});
        call(std::integral_constant<int, 3>{});
      });
    });
  }
};

inline Tensor gather_points(const Tensor& features, const Tensor& indices, const Tensor& weight, bool zeros_outside) {
  constexpr const char* op = "gather_points";
  const GatherInputs given(op, features, indices, weight, zeros_outside);
  const OnDevice device(op, features);
  const Tensor output = new_empty(features, {given.B, given.C, given.M});
  given.dispatch(features, [&]<typename A, typename I, int K>(const GatherArrays<A, I, K>& arrays) {
    device.each(arrays.parts(), 2 * K * kChannels<K> * std::min(given.M, kPoints) + 1,
                Gather<A, I, K>{arrays, data_of(features), data_of(output)});
  });
  return output;
}

inline std::tuple<Tensor, Tensor> gather_points_backward(const Tensor& grad_output_in, const Tensor& features,
                                                         const Tensor& indices, const Tensor& weight,
                                                         bool zeros_outside, bool needs_features, bool needs_weight) {
  constexpr const char* op = "gather_points_backward";
  const GatherInputs given(op, features, indices, weight, zeros_outside);
  check_like(op, "grad_output", grad_output_in, {{"B", given.B}, {"C", given.C}, {"M", given.M}}, "features", features);
  const OnDevice device(op, features);
  const Tensor grad_output = dense(grad_output_in);
  Tensor grad_features = needs_features ? new_like(features) : new_empty(features, {0});
  const Tensor grad_weight = needs_weight ? new_like(given.weight) : new_empty(features, {0});
  zero_(grad_features);
  if (needs_features && grad_output.numel() > 0) {
    given.dispatch(grad_features, [&]<typename A, typename I, int K>(const GatherArrays<A, I, K>& arrays) {
#if defined(__CUDACC__)
      const int64_t count = arrays.parts();
#else
      const int64_t count =
          features.dim() == 2 ? (given.C + kSharedChannels - 1) / kSharedChannels : given.B * given.C;
#endif
      device.each(count, 2 * grad_output.numel() / count * K,
                  SpreadGradient<A, I, K>{arrays, data_of(grad_output), data_of(grad_features)});
    });
  }
  given.dispatch(features, [&]<typename A, typename I, int K>(const GatherArrays<A, I, K>& arrays) {
    device.each(grad_weight.numel(), 2 * given.C + 1,
                WeightGradient<A, I, K>{arrays, data_of(grad_output), data_of(features), data_of(grad_weight)});
  });
  return {grad_features, grad_weight};
}

inline Tensor stacked_indices(const Tensor& indices_in, const Tensor& sizes_in, const Tensor& groups_in) {
  constexpr const char* op = "stacked_indices";
  check_indices(op, indices_in, {"M", "K"});
  const Tensor indices = dense(indices_in), sizes = dense(sizes_in), groups = dense(groups_in);
  check_typed(op, "sizes", sizes, {"clouds"}, ScalarType::Int, "indices", indices);
  check_like(op, "groups", groups, {{"clouds", sizes.size(0)}}, "sizes", sizes);
  VISDET_CHECK(op, sizes.size(0) > 0 || indices.size(0) == 0, "sizes must have a cloud for the rows of indices");
  const OnDevice device(op, indices);
  const Tensor result = new_empty(indices, {indices.size(0), indices.size(1)}, ScalarType::Long);
  dispatch_index_type(indices, [&]<typename I>(I) {
    device.each(result.numel(), 8 + sizes.size(0),
                StackedIndex<I>{indices.size(1), sizes.size(0), data_of(indices), data_of(sizes), data_of(groups),
                                data_of(result)});
  });
  return result;
}

VISDET_OPERATORS(gather_points, m) {
  m.impl("gather_points", TORCH_BOX(&gather_points));
  m.impl("gather_points_backward", TORCH_BOX(&gather_points_backward));
  m.impl("stacked_indices", TORCH_BOX(&stacked_indices));
}

}  // namespace visdet

// carafe on the CPU. The contract is in ../carafe.h; how this file is compiled, in vec.h.
//
// The s * s pixels above one of the map's are phases. Masks are first copied into rows of one phase and one tap each,
// [B, G, H, s * s, K * K, W]; then all three passes are sums of products of rows of W numbers. Forward and the
// gradient of masks are parallel over rows of the map, the gradient of features over its channels.
#include "cpu/vec.h"

namespace visdet {

template <typename T, typename A>
struct CarafeArrays {
  int64_t B, C, H, W, G, K, s;
  const T* features;     // [B, C, H, W]
  const T* masks;        // [B, G * K * K, H * s, W * s]
  const T* grad_output;  // [B, C, H * s, W * s]
  A* phases;             // [B, G, H, s * s, K * K, W]: masks, later their gradients
  T* output;             // [B, C, H * s, W * s]
  T* grad_features;      // [B, C, H, W]
  T* grad_masks;         // as masks
};

namespace VISDET_ISA {

// target[w] += factor[w] * source[w], w < count
template <typename A>
VISDET_INLINE void add_products(A* target, const A* factor, const A* source, int64_t count) {
  constexpr int W = kLanes<A>;
  int64_t w = 0;
  for (; w + W <= count; w += W) store(target + w, load(target + w) + load(factor + w) * load(source + w));
  for (; w < count; ++w) target[w] += factor[w] * source[w];
}

// sums[w] = sum over the K * K taps of factors[tap][w] * rows[i][w + j]
template <typename A>
VISDET_INLINE void sum_of_taps(A* sums, const A* factors, const A* rows, int64_t count, int64_t K, int64_t stride) {
  constexpr int W = kLanes<A>;
  int64_t w = 0;
  for (; w + W <= count; w += W) {
    Vec<A> sum = {};
    const A* factor = factors + w;
    for (int64_t i = 0; i < K; ++i) {
      const A* row = rows + i * stride + w;
      for (int64_t j = 0; j < K; ++j, factor += count) sum += load(factor) * load(row + j);
    }
    store(sums + w, sum);
  }
  for (; w < count; ++w) {
    A sum = 0;
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < K; ++j) sum += factors[(i * K + j) * count + w] * rows[i * stride + w + j];
    }
    sums[w] = sum;
  }
}

// Copies rows h - K / 2 .. h + K / 2 of a map, with K / 2 zeros on each side, to rows [K, W + K - 1].
template <typename T, typename A>
VISDET_INLINE void copy_rows(const CarafeArrays<T, A>& a, const T* map, int64_t h, A* rows) {
  const int64_t edge = a.K / 2, stride = a.W + a.K - 1;
  for (int64_t i = 0; i < a.K; ++i) {
    A* row = rows + i * stride;
    const int64_t from = h + i - edge;
    const bool is_inside = from >= 0 && from < a.H;
    for (int64_t j = 0; j < edge; ++j) row[j] = row[edge + a.W + j] = 0;
    for (int64_t w = 0; w < a.W; ++w) row[edge + w] = is_inside ? to_accumulate(map[from * a.W + w]) : A(0);
  }
}

// One phase of W * s numbers, and back.
template <typename T, typename A>
VISDET_INLINE void gather_phase(const T* from, A* to, int64_t W, int64_t s) {
  for (int64_t w = 0; w < W; ++w) to[w] = to_accumulate(from[w * s]);
}
template <typename T, typename A>
VISDET_INLINE void scatter_phase(const A* from, T* to, int64_t W, int64_t s) {
  for (int64_t w = 0; w < W; ++w) from_accumulate(from[w], to[w * s]);
}

// Row h of group g of image b: masks to phases, or (BACK) gradients of phases to those of masks.
template <typename T, typename A, bool BACK>
void arrange_masks(const CarafeArrays<T, A>& a, int64_t b, int64_t g, int64_t h) {
  const int64_t taps = a.K * a.K, columns = a.W * a.s;
  A* row = a.phases + ((b * a.G + g) * a.H + h) * a.s * a.s * taps * a.W;
  for (int64_t phase = 0; phase < a.s * a.s; ++phase) {
    for (int64_t tap = 0; tap < taps; ++tap, row += a.W) {
      const int64_t at = (((b * a.G + g) * taps + tap) * a.H * a.s + h * a.s + phase / a.s) * columns + phase % a.s;
      if constexpr (BACK) {
        scatter_phase(row, a.grad_masks + at, a.W, a.s);
      } else {
        gather_phase(a.masks + at, row, a.W, a.s);
      }
    }
  }
}

// Row h of group g of image b. scratch: [K * (W + K - 1) + W].
template <typename T, typename A>
void upsample_row(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t g, int64_t h) {
  const int64_t taps = a.K * a.K, stride = a.W + a.K - 1, per_group = a.C / a.G;
  const A* kernels = a.phases + ((b * a.G + g) * a.H + h) * a.s * a.s * taps * a.W;
  A *rows = scratch, *sums = scratch + a.K * stride;
  for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) {
    copy_rows(a, a.features + (b * a.C + c) * a.H * a.W, h, rows);
    T* out = a.output + ((b * a.C + c) * a.H + h) * a.s * a.W * a.s;
    for (int64_t phase = 0; phase < a.s * a.s; ++phase) {
      sum_of_taps(sums, kernels + phase * taps * a.W, rows, a.W, a.K, stride);
      scatter_phase(sums, out + phase / a.s * a.W * a.s + phase % a.s, a.W, a.s);
    }
  }
}

// The gradient of phases, in row h of group g of image b, into `grads` [s * s, K * K, W]. scratch as above.
template <typename T, typename A>
void grad_masks_row(const CarafeArrays<T, A>& a, A* grads, A* scratch, int64_t b, int64_t g, int64_t h) {
  const int64_t taps = a.K * a.K, stride = a.W + a.K - 1, per_group = a.C / a.G;
  A *rows = scratch, *grad = scratch + a.K * stride;
  for (int64_t i = 0; i < a.s * a.s * taps * a.W; ++i) grads[i] = 0;
  for (int64_t c = g * per_group; c < (g + 1) * per_group; ++c) {
    copy_rows(a, a.features + (b * a.C + c) * a.H * a.W, h, rows);
    const T* out = a.grad_output + ((b * a.C + c) * a.H + h) * a.s * a.W * a.s;
    for (int64_t phase = 0; phase < a.s * a.s; ++phase) {
      gather_phase(out + phase / a.s * a.W * a.s + phase % a.s, grad, a.W, a.s);
      A* target = grads + phase * taps * a.W;
      for (int64_t i = 0; i < a.K; ++i) {
        for (int64_t j = 0; j < a.K; ++j, target += a.W) add_products(target, grad, rows + i * stride + j, a.W);
      }
    }
  }
}

// The gradient of channel c of image b. scratch: [(H + K - 1) * (W + K - 1) + W].
template <typename T, typename A>
void grad_features_map(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t c) {
  const int64_t taps = a.K * a.K, stride = a.W + a.K - 1, edge = a.K / 2, g = c / (a.C / a.G);
  A *sums = scratch, *grad = scratch + (a.H + a.K - 1) * stride;
  for (int64_t i = 0; i < (a.H + a.K - 1) * stride; ++i) sums[i] = 0;
  for (int64_t h = 0; h < a.H; ++h) {
    const A* kernels = a.phases + ((b * a.G + g) * a.H + h) * a.s * a.s * taps * a.W;
    const T* out = a.grad_output + ((b * a.C + c) * a.H + h) * a.s * a.W * a.s;
    for (int64_t phase = 0; phase < a.s * a.s; ++phase) {
      gather_phase(out + phase / a.s * a.W * a.s + phase % a.s, grad, a.W, a.s);
      for (int64_t i = 0; i < a.K; ++i) {
        for (int64_t j = 0; j < a.K; ++j, kernels += a.W) {
          add_products(sums + (h + i) * stride + j, kernels, grad, a.W);
        }
      }
    }
  }
  T* target = a.grad_features + (b * a.C + c) * a.H * a.W;
  for (int64_t h = 0; h < a.H; ++h) {
    for (int64_t w = 0; w < a.W; ++w) from_accumulate(sums[(h + edge) * stride + edge + w], target[h * a.W + w]);
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                    \
  template void arrange_masks<T, A, false>(const CarafeArrays<T, A>&, int64_t, int64_t, int64_t);   \
  template void arrange_masks<T, A, true>(const CarafeArrays<T, A>&, int64_t, int64_t, int64_t);    \
  template void upsample_row<T, A>(const CarafeArrays<T, A>&, A*, int64_t, int64_t, int64_t);       \
  template void grad_masks_row<T, A>(const CarafeArrays<T, A>&, A*, A*, int64_t, int64_t, int64_t); \
  template void grad_features_map<T, A>(const CarafeArrays<T, A>&, A*, int64_t, int64_t);
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

#include <tuple>

#include "carafe.h"
#include "cpu/dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                          \
  namespace isa {                                                                    \
  template <typename T, typename A, bool BACK>                                       \
  void arrange_masks(const CarafeArrays<T, A>&, int64_t, int64_t, int64_t);          \
  template <typename T, typename A>                                                  \
  void upsample_row(const CarafeArrays<T, A>&, A*, int64_t, int64_t, int64_t);       \
  template <typename T, typename A>                                                  \
  void grad_masks_row(const CarafeArrays<T, A>&, A*, A*, int64_t, int64_t, int64_t); \
  template <typename T, typename A>                                                  \
  void grad_features_map(const CarafeArrays<T, A>&, A*, int64_t, int64_t);           \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

template <typename T, typename A>
CarafeArrays<T, A> arrays_of(const CarafeProblem& p, const Tensor& features, const Tensor& masks) {
  CarafeArrays<T, A> a{};
  a.B = p.B, a.C = p.C, a.H = p.H, a.W = p.W, a.G = p.G, a.K = p.K, a.s = p.s;
  a.features = static_cast<const T*>(features.const_data_ptr());
  a.masks = static_cast<const T*>(masks.const_data_ptr());
  return a;
}

// run(b, g, h, thread's scratch of `numbers`) for every row of every group.
template <typename A, typename Arrays, typename F>
void for_rows(const Arrays& a, int64_t numbers, const F& run) {
  torch::stable::parallel_for(0, a.B * a.G * a.H, 1, [&](int64_t begin, int64_t end) {
    const Scratch<A> scratch(numbers);
    for (int64_t task = begin; task < end; ++task) {
      run(task / (a.G * a.H), task / a.H % a.G, task % a.H, scratch.data());
    }
  });
}

// Room for the masks by phase.
template <typename T, typename A>
Scratch<A> prepare(CarafeArrays<T, A>& a) {
  Scratch<A> phases(a.B * a.G * a.H * a.s * a.s * a.K * a.K * a.W);
  a.phases = phases.data();
  const auto arrange = VISDET_BEST_ISA(arrange_masks, T, A, false);
  for_rows<A>(a, 0, [&](int64_t b, int64_t g, int64_t h, A*) { arrange(a, b, g, h); });
  return phases;
}

Tensor carafe(const Tensor& features_in, const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  const auto problem = check_carafe("carafe", features_in, masks_in, K, G, s);
  const Tensor features = dense(features_in), masks = dense(masks_in);
  Tensor output = new_empty(features, {problem.B, problem.C, problem.H * s, problem.W * s});
  if (output.numel() == 0) return output;
  dispatch_value_type(features.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, features, masks);
    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto phases = prepare(a);
    const auto run = VISDET_BEST_ISA(upsample_row, T, A);
    for_rows<A>(a, K * (a.W + K - 1) + a.W,
                [&](int64_t b, int64_t g, int64_t h, A* scratch) { run(a, scratch, b, g, h); });
  });
  return output;
}

std::tuple<Tensor, Tensor> carafe_backward(const Tensor& grad_output_in, const Tensor& features_in,
                                           const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe_backward";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  check_carafe_shape(op, "grad_output", grad_output_in, features_in, problem.C, s);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in), masks = dense(masks_in);
  Tensor grad_features = new_empty(features, features.sizes()), grad_masks = new_empty(masks, masks.sizes());
  if (grad_output.numel() == 0) return {zero_(grad_features), zero_(grad_masks)};
  dispatch_value_type(features.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, features, masks);
    a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_features = static_cast<T*>(grad_features.mutable_data_ptr());
    a.grad_masks = static_cast<T*>(grad_masks.mutable_data_ptr());
    const auto phases = prepare(a);
    const auto of_features = VISDET_BEST_ISA(grad_features_map, T, A);
    torch::stable::parallel_for(0, a.B * a.C, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> scratch((a.H + K - 1) * (a.W + K - 1) + a.W);
      for (int64_t map = begin; map < end; ++map) of_features(a, scratch.data(), map / a.C, map % a.C);
    });
    const auto of_masks = VISDET_BEST_ISA(grad_masks_row, T, A);
    const auto arrange = VISDET_BEST_ISA(arrange_masks, T, A, true);
    for_rows<A>(a, K * (a.W + K - 1) + a.W, [&](int64_t b, int64_t g, int64_t h, A* scratch) {
      of_masks(a, a.phases + ((b * a.G + g) * a.H + h) * s * s * K * K * a.W, scratch, b, g, h);
      arrange(a, b, g, h);
    });
  });
  return {grad_features, grad_masks};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("carafe", TORCH_BOX(&visdet::carafe));
  m.impl("carafe_backward", TORCH_BOX(&visdet::carafe_backward));
}

#endif  // VISDET_ISA_BASELINE

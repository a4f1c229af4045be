// carafe on the CPU. The contract is in csrc/carafe.h.
//
// The s * s pixels of the output that one pixel of the map becomes are its phases. Masks are first copied into rows of
// one phase and one tap each, [B, G, H, s * s, K * K, W]; then all three passes are sums of products of rows of W
// numbers. Forward and the gradient of masks are parallel over rows of the map, the gradient of features over its
// channels.
#include "carafe.h"

#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Adds factor[w] * source[w] to target[w] for w < count.
template <typename A>
VISDET_INLINE void add_products(A* target, const A* factor, const A* source, int64_t count) {
  constexpr int W = kLanes<A>;
  int64_t w = 0;
  for (; w + W <= count; w += W) store(target + w, load(target + w) + load(factor + w) * load(source + w));
  for (; w < count; ++w) target[w] += factor[w] * source[w];
}

// Writes to sums[w] the sum over the K * K taps of factors[tap][w] * rows[i][w + j].
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

// They copy one phase of W * s numbers, and back.
template <typename T, typename A>
VISDET_INLINE void gather_phase(const T* from, A* to, int64_t W, int64_t s) {
  for (int64_t w = 0; w < W; ++w) to[w] = to_accumulate(from[w * s]);
}
template <typename T, typename A>
VISDET_INLINE void scatter_phase(const A* from, T* to, int64_t W, int64_t s) {
  for (int64_t w = 0; w < W; ++w) from_accumulate(from[w], to[w * s]);
}

// Copies row h of group g of image b from masks to phases, or (BACK) gradients of phases to those of masks.
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

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(CarafeKernels, arrange_masks<T, A, false>, arrange_masks<T, A, true>, upsample_row<T, A>,
               grad_masks_row<T, A>, grad_features_map<T, A>)

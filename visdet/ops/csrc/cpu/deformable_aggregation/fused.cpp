// deformable_aggregation_fused on the CPU: kernels that run before deformable_aggregation's, and after its backward.
// The contract is in csrc/deformable_aggregation_fused.h.
//
// Those before are parallel over (b, q). A query's logits are summed and exponentiated in a scratch row; of its weights
// only those of visible (point, camera) pairs are written, as deformable_aggregation reads no others. Those after are
// parallel over parts of a batch entry's queries, which depend on the sizes alone. A part works its rows out again and
// sums the gradients of camera_logits of its queries; the parts' sums are added in order. So there are no races and no
// dependence on the number of threads.
#include "cpu/deformable_aggregation/arrays.h"
#include "cpu/deformable_aggregation/fused_arrays.h"
#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Writes to[i] = x[i] + y[i].
template <typename T, typename A>
VISDET_INLINE void add_rows(const T* x, const T* y, A* to, int64_t count) {
  constexpr int W = kLanes<A>;
  int64_t i = 0;
  for (; i + W <= count; i += W) store(to + i, load(x + i) + load(y + i));
  for (; i < count; ++i) to[i] = to_accumulate(x[i]) + to_accumulate(y[i]);
}

// Writes to pattern[j], for each j, the numbers of group j % G combined by f.
template <typename A, typename F>
VISDET_INLINE void combine_groups(A* pattern, int64_t period, int64_t G, const F& f) {
  for (int64_t j = G; j < period; j += G) {
    for (int64_t g = 0; g < G; ++g) pattern[g] = f(pattern[g], pattern[j + g]);
  }
  for (int64_t j = G; j < period; ++j) pattern[j] = pattern[j - G];
}

// Writes row[n] = exp(logit n - the greatest of its group), for n over [V, L, P, G], and reciprocals[n % period] = 1 /
// the sum of its group's. A logit that is NaN or inf, or a group that is all -inf, makes the group's sum NaN.
// `greatest` is scratch.
template <typename TL, typename A>
void exponentiate(const FusedAggregationArrays<TL, A>& a, int64_t query, A* row, A* reciprocals, A* greatest) {
  constexpr int W = kLanes<A>;
  const int64_t stride = a.L * a.P * a.G, N = a.V * stride, period = a.period;
  if (a.camera_logits) {
    const TL* camera_logits = a.camera_logits + query / a.Q * N;
    for (int64_t n = 0; n < N; n += stride) add_rows(a.logits + query * stride, camera_logits + n, row + n, stride);
  } else {
    copy_numbers(a.logits + query * N, N, N, row);
  }
  for (int64_t n = N; n < a.row; ++n) row[n] = -A(__builtin_inf());
  for (int64_t j = 0; j < period; ++j) greatest[j] = -A(__builtin_inf()), reciprocals[j] = 0;
  for (int64_t first = 0; first < a.row; first += period) {
    for (int64_t j = 0; j < period; j += W) {
      const Vec<A> x = load(row + first + j), most = load(greatest + j);
      store(greatest + j, x > most ? x : most);
    }
  }
  combine_groups(greatest, period, a.G, [](A x, A y) { return y > x ? y : x; });
  for (int64_t first = 0; first < a.row; first += period) {
    for (int64_t j = 0; j < period; j += W) {
      const Vec<A> e = exp_nonpositive<A>(load(row + first + j) - load(greatest + j));
      store(row + first + j, e);
      store(reciprocals + j, load(reciprocals + j) + e);
    }
  }
  combine_groups(reciprocals, period, a.G, [](A x, A y) { return x + y; });
  for (int64_t j = 0; j < period; ++j) reciprocals[j] = 1 / reciprocals[j];
}

// Writes a query's locations. Lanes are points, whose coordinates `points` holds one after the other.
template <typename TL, typename A>
VISDET_INLINE void project(const FusedAggregationArrays<TL, A>& a, int64_t query, A* points) {
  constexpr int W = kLanes<A>;
  for (int d = 0; d < 3; ++d) {
    for (int64_t p = 0; p < a.P; ++p) points[d * a.points + p] = a.key_points[(query * a.P + p) * 3 + d];
    for (int64_t p = a.P; p < a.points; ++p) points[d * a.points + p] = 0;
  }
  A* to = a.locations + query * a.P * a.V * 2;
  for (int64_t v = 0; v < a.V; ++v) {
    const int64_t camera = query / a.Q * a.V + v;
    const A *m = a.projection + camera * 16, *wh = a.image_wh + camera * 2;
    const bool* keep = a.keep ? a.keep + (query * a.V + v) * a.P : nullptr;
    for (int64_t first = 0; first < a.P; first += W) {
      const Vec<A> x = load(points + first), y = load(points + a.points + first),
                   z = load(points + 2 * a.points + first);
      const Vec<A> least = Vec<A>{} + a.min_depth, raw = m[8] * x + m[9] * y + m[10] * z + m[11];
      const Vec<A> depth = raw < least ? least : raw;  // NaN stays
      const Vec<A> across = (m[0] * x + m[1] * y + m[2] * z + m[3]) / depth / wh[0],
                   down = (m[4] * x + m[5] * y + m[6] * z + m[7]) / depth / wh[1];
      for (int64_t p = first; p < first + W && p < a.P; ++p) {
        const bool counts = keep == nullptr || keep[p];
        to[(p * a.V + v) * 2] = counts ? across[p - first] : A(-1);
        to[(p * a.V + v) * 2 + 1] = counts ? down[p - first] : A(-1);
      }
    }
  }
}

template <typename TL, typename A>
void prepare_queries(const FusedAggregationArrays<TL, A>& a, A* scratch, int64_t begin, int64_t end) {
  A *factors = scratch, *greatest = factors + a.period, *row = greatest + a.period, *points = row + a.row;
  for (int64_t query = begin; query < end; ++query) {
    project(a, query, points);
    exponentiate(a, query, row, factors, greatest);
    for (int64_t g = 0; g < a.G; ++g) factors[g] *= a.keep_scale;
    for (int64_t i = 0; i < a.P * a.V; ++i) {
      const int64_t pair = query * a.P * a.V + i, p = i / a.V, v = i % a.V;
      if (!is_visible(a.locations + 2 * pair)) continue;
      for (int64_t l = 0; l < a.L; ++l) {
        const A* from = row + ((v * a.L + l) * a.P + p) * a.G;
        A* to = a.weights + (pair * a.L + l) * a.G;
        for (int64_t g = 0; g < a.G; ++g) to[g] = from[g] * factors[g];
      }
    }
  }
}

// Adds the gradient of one visible pair's location to its point's.
template <typename TL, typename A>
VISDET_INLINE void add_point_grad(const FusedAggregationArrays<TL, A>& a, int64_t camera, int64_t pair, const A* point,
                                  A* grad) {
  const A *m = a.projection + camera * 16, *wh = a.image_wh + camera * 2, *location = a.locations + 2 * pair,
          *grad_location = a.grad_locations + 2 * pair;
  const A raw = m[8] * point[0] + m[9] * point[1] + m[10] * point[2] + m[11];
  const bool is_clamped = raw < a.min_depth;
  const A depth = is_clamped ? a.min_depth : raw;
  const A x = grad_location[0] / wh[0] / depth, y = grad_location[1] / wh[1] / depth;
  const A z = is_clamped ? A(0) : -(x * location[0] * wh[0] + y * location[1] * wh[1]);
  for (int d = 0; d < 3; ++d) grad[d] += m[d] * x + m[4 + d] * y + m[8 + d] * z;
}

// Writes the gradients of a query's points, and to row those of its logits, in each camera. With s the softmax and w =
// s * keep_scale, that of a logit is s (keep_scale grad_w - dot) = w grad_w - s dot, where dot is its group's sum of w
// grad_w.
template <typename TL, typename A>
VISDET_INLINE void finish_query(const FusedAggregationArrays<TL, A>& a, int64_t query, A* row, A* factors, A* dots) {
  constexpr int W = kLanes<A>;
  exponentiate(a, query, row, factors, dots);
  for (int64_t g = 0; g < a.G; ++g) dots[g] = 0;
  const int64_t pairs = a.P * a.V, first = query * pairs, line = a.L * a.G;
  for (int64_t p = 0; p < a.P; ++p) {
    const A* point = a.key_points + (query * a.P + p) * 3;
    A grad[3] = {};
    for (int64_t v = 0; v < a.V; ++v) {
      const int64_t pair = first + p * a.V + v;
      if (!is_visible(a.locations + 2 * pair)) continue;
      add_point_grad(a, query / a.Q * a.V + v, pair, point, grad);
      const A *weights = a.weights + pair * line, *grads = a.grad_weights + pair * line;
      for (int64_t n = 0; n < line; n += a.G) {
        for (int64_t g = 0; g < a.G; ++g) dots[g] += weights[n + g] * grads[n + g];
      }
    }
    for (int d = 0; d < 3; ++d) a.grad_key_points[(query * a.P + p) * 3 + d] = grad[d];
  }
  for (int64_t g = 0; g < a.G; ++g) factors[g] *= -dots[g];
  for (int64_t j = a.G; j < a.period; ++j) factors[j] = factors[j - a.G];
  for (int64_t n = 0; n < a.row; n += a.period) {
    for (int64_t j = 0; j < a.period; j += W) store(row + n + j, load(row + n + j) * load(factors + j));
  }
  for (int64_t i = 0; i < pairs; ++i) {
    if (!is_visible(a.locations + 2 * (first + i))) continue;
    const int64_t p = i / a.V, v = i % a.V;
    const A *weights = a.weights + (first + i) * line, *grads = a.grad_weights + (first + i) * line;
    for (int64_t l = 0; l < a.L; ++l) {
      A* to = row + ((v * a.L + l) * a.P + p) * a.G;
      for (int64_t g = 0; g < a.G; ++g) to[g] += weights[l * a.G + g] * grads[l * a.G + g];
    }
  }
}

template <typename TL, typename A>
void finish_part(const FusedAggregationArrays<TL, A>& a, A* scratch, int64_t task) {
  A *factors = scratch, *dots = factors + a.period, *row = dots + a.period;
  const int64_t stride = a.L * a.P * a.G, N = a.V * stride;
  const int64_t begin = task % a.parts * a.part, end = begin + a.part < a.Q ? begin + a.part : a.Q;
  A* sums = a.part_sums + task * N;
  for (int64_t n = 0; a.camera_logits && n < N; ++n) sums[n] = 0;
  for (int64_t q = begin; q < end; ++q) {
    const int64_t query = task / a.parts * a.Q + q;
    finish_query(a, query, row, factors, dots);
    if (a.camera_logits) {
      add_rows(sums, row, sums, N);
      for (int64_t n = stride; n < N; n += stride) add_rows(row, row + n, row, stride);
      round_numbers(row, a.grad_logits + query * stride, stride);
    } else {
      round_numbers(row, a.grad_logits + query * N, N);
    }
  }
}

template <typename TL, typename A>
void add_parts(const FusedAggregationArrays<TL, A>& a, int64_t b, int64_t begin, int64_t end) {
  const int64_t N = a.V * a.L * a.P * a.G;
  A* sums = a.part_sums + b * a.parts * N;
  for (int64_t part = 1; part < a.parts; ++part) {
    add_rows(sums + begin, sums + part * N + begin, sums + begin, end - begin);
  }
  round_numbers(sums + begin, a.grad_camera_logits + b * N + begin, end - begin);
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(FusedAggregationKernels, prepare_queries<T, A>, finish_part<T, A>, add_parts<T, A>)

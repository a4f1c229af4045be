// deformable_aggregation on the CPU. The contract is in csrc/deformable_aggregation.h.
//
// Most (point, camera) pairs do not count, and are passed over before anything of theirs but the location is read.
// Forward: parallel over (b, q). Backward: parallel over (b, v), one task owning camera v's rows of grad_features and
// its pairs' grad_locations and grad_weights, so there are no races and no dependence on the number of threads.
// Gradients of 16-bit features are summed in float32 in a scratch of one camera's rows, and rounded once.
#include "common/bilinear.h"
#include "cpu/deformable_aggregation/arrays.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Corners has the four corners of a visible pair in one level.
template <typename A>
struct Corners {
  int64_t index[4];  // texel of the map
  A bilinear[4];     // zero for a corner outside the map
  A weight[4];       // bilinear times depth
  A is_inside[4];    // 1 or 0
  A fx, fy, H, W;
  // The number of each corner at the sample's depth, and its derivative; 1 and 0 without depths.
  A depth[4], slope[4];
  int64_t near;  // the first of two depths
  A fraction;    // of the way to the second
};

// Interpolates the depths of each corner at location[2]. depths: [H * W, D] of the map.
template <typename T, typename TW, typename A>
VISDET_INLINE void weigh_depths(const DeformableAggregationArrays<T, TW, A>& a, const T* depths, A d, Corners<A>& out) {
  const A below = __builtin_floor(d);
  out.near = static_cast<int64_t>(below), out.fraction = d - below;
  for (int k = 0; k < 4; ++k) {
    const T* of_texel = depths + out.index[k] * a.depth_row;
    const A near = out.is_inside[k] != 0 && out.near >= 0 ? to_accumulate(of_texel[out.near]) : A(0);
    const A far = out.is_inside[k] != 0 && out.near + 1 < a.D ? to_accumulate(of_texel[out.near + 1]) : A(0);
    out.depth[k] = (1 - out.fraction) * near + out.fraction * far, out.slope[k] = far - near;
    out.weight[k] *= out.depth[k];
  }
}

template <typename T, typename TW, typename A>
VISDET_INLINE void locate_corners(const DeformableAggregationArrays<T, TW, A>& a, const A* location, int64_t b,
                                  int64_t v, int64_t l, Corners<A>& out) {
  const int64_t map = v * a.L + l;
  const int32_t H = static_cast<int32_t>(a.level_shapes[2 * map]),
                W = static_cast<int32_t>(a.level_shapes[2 * map + 1]);
  Bilinear<A> at;
  locate(location[0] * W - A(0.5), location[1] * H - A(0.5), H, W, at);
  at.corner_weights(out.bilinear);
  for (int k = 0; k < 4; ++k) {
    out.index[k] = at.index[k];
    out.is_inside[k] = at.is_inside[k] ? A(1) : A(0);
    out.weight[k] = out.bilinear[k], out.depth[k] = 1, out.slope[k] = 0;
  }
  out.fx = at.fx, out.fy = at.fy, out.H = static_cast<A>(H), out.W = static_cast<A>(W);
  if (a.has_depths) weigh_depths(a, a.depths + (b * a.S + a.level_starts[map]) * a.depth_row, location[2], out);
}

// Adds to acc[c] the bilinear sample of channel c of a map times weights[g(c)].
template <typename T, typename TW, typename A>
VISDET_INLINE void sum_corners(const T* map, int64_t row, const Corners<A>& at, const TW* weights, int64_t C, int64_t G,
                               A* acc) {
  constexpr int W = kLanes<A>;
  const T* rows[4];
  for (int k = 0; k < 4; ++k) rows[k] = map + at.index[k] * row;
  const int64_t group = C / G;
  for (int64_t g = 0, c = 0; g < G; ++g) {
    const int64_t end = c + group;
    const A weight = to_accumulate(weights[g]);
    A w[4];
    for (int k = 0; k < 4; ++k) w[k] = at.weight[k] * weight;
    for (; c + W <= end; c += W) {
      const Vec<A> top = load(rows[0] + c) * w[0] + load(rows[1] + c) * w[1];
      const Vec<A> bottom = load(rows[2] + c) * w[2] + load(rows[3] + c) * w[3];
      store(acc + c, load(acc + c) + (top + bottom));
    }
    for (; c < end; ++c) {
      acc[c] += (to_accumulate(rows[0][c]) * w[0] + to_accumulate(rows[1][c]) * w[1]) +
                (to_accumulate(rows[2][c]) * w[2] + to_accumulate(rows[3][c]) * w[3]);
    }
  }
}

template <typename T, typename TW, typename A = typename AccumulateType<T>::type>
void forward_row(const DeformableAggregationArrays<T, TW, A>& a, A* acc, int64_t row) {
  const int64_t b = row / a.Q;
  const T* features = a.features + b * a.S * a.feature_row;
  for (int64_t c = 0; c < a.C; ++c) acc[c] = 0;
  for (int64_t i = 0; i < a.P * a.V; ++i) {
    const int64_t pair = row * a.P * a.V + i;
    const A* location = a.locations + a.coordinates() * pair;
    if (!is_visible(a, location)) continue;
    for (int64_t l = 0; l < a.L; ++l) {
      Corners<A> at;
      locate_corners(a, location, b, i % a.V, l, at);
      const T* map = features + a.level_starts[i % a.V * a.L + l] * a.feature_row;
      sum_corners(map, a.feature_row, at, a.weights + (pair * a.L + l) * a.G, a.C, a.G, acc);
    }
  }
  for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], a.output[row * a.C + c]);
}

// Adds what one sample gives to the gradients of its map, and writes its weights' gradients, and to dots[k] the sum
// over the groups of weight * <grad_output, corner k>.
template <typename T, typename TW, typename A>
VISDET_INLINE void scatter_corners(const T* map, int64_t row, A* grad_map, const Corners<A>& at, const A* g_row,
                                   const TW* weights, int64_t C, int64_t G, TW* grad_weights, A (&dots)[4]) {
  constexpr int W = kLanes<A>;
  const T* rows[4];
  A* grads[4];
  for (int k = 0; k < 4; ++k) {
    rows[k] = map + at.index[k] * row;
    grads[k] = grad_map + at.index[k] * C;
    dots[k] = 0;
  }
  const int64_t group = C / G;
  for (int64_t g = 0, c = 0; g < G; ++g) {
    const int64_t end = c + group;
    const A weight = to_accumulate(weights[g]);
    A w[4], sums[4];
    Vec<A> products[4] = {};
    for (int k = 0; k < 4; ++k) w[k] = at.weight[k] * weight;
    for (; c + W <= end; c += W) {
      const Vec<A> grad = load(g_row + c);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        products[k] += load(rows[k] + c) * grad;
        store(grads[k] + c, load(grads[k] + c) + grad * w[k]);
      }
    }
    horizontal_sums(products, sums);
    for (; c < end; ++c) {
      for (int k = 0; k < 4; ++k) {
        sums[k] += to_accumulate(rows[k][c]) * g_row[c];
        grads[k][c] += w[k] * g_row[c];
      }
    }
    A grad_weight = 0;
    for (int k = 0; k < 4; ++k) {
      const A dot = at.is_inside[k] != 0 ? sums[k] : A(0);
      grad_weight += at.weight[k] * dot;
      dots[k] += weight * dot;
    }
    from_accumulate(grad_weight, grad_weights[g]);
  }
}

// Adds what one sample gives to the gradients of its map's depths [H * W, D], multiplies dots[k] by the corner's depth,
// and returns the gradient of the sample's depth.
template <typename A>
VISDET_INLINE A scatter_depths(A* grad_map, int64_t D, const Corners<A>& at, A (&dots)[4]) {
  A grad = 0;
  for (int k = 0; k < 4; ++k) {
    const A of_depth = at.bilinear[k] * dots[k];
    A* to = grad_map + at.index[k] * D + at.near;
    if (at.is_inside[k] != 0 && at.near >= 0) to[0] += (1 - at.fraction) * of_depth;
    if (at.is_inside[k] != 0 && at.near + 1 < D) to[1] += at.fraction * of_depth;
    grad += at.slope[k] * of_depth;
    dots[k] *= at.depth[k];
  }
  return grad;
}

template <typename T, typename TW, typename A = typename AccumulateType<T>::type>
void backward_camera(const DeformableAggregationArrays<T, TW, A>& a, A* g_row, A* sums, A* depth_sums, int64_t b,
                     int64_t v) {
  const T* features = a.features + b * a.S * a.feature_row;
  for (int64_t q = 0; q < a.Q; ++q) {
    const int64_t row = b * a.Q + q;
    bool is_loaded = false;
    for (int64_t p = 0; p < a.P; ++p) {
      const int64_t pair = (row * a.P + p) * a.V + v;
      const A* location = a.locations + a.coordinates() * pair;
      if (!is_visible(a, location)) continue;
      if (!is_loaded) {
        for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
        is_loaded = true;
      }
      A grad_x = 0, grad_y = 0, grad_d = 0;
      for (int64_t l = 0; l < a.L; ++l) {
        const int64_t line = (pair * a.L + l) * a.G, map = v * a.L + l;
        Corners<A> at;
        A d[4];
        locate_corners(a, location, b, v, l, at);
        scatter_corners(features + a.level_starts[map] * a.feature_row, a.feature_row, sums + a.grad_starts[map] * a.C,
                        at, g_row, a.weights + line, a.C, a.G, a.grad_weights + line, d);
        if (a.has_depths) grad_d += scatter_depths(depth_sums + a.grad_starts[map] * a.D, a.D, at, d);
        grad_x += at.W * ((1 - at.fy) * (d[1] - d[0]) + at.fy * (d[3] - d[2]));
        grad_y += at.H * ((1 - at.fx) * (d[2] - d[0]) + at.fx * (d[3] - d[1]));
      }
      A* grad_location = a.grad_locations + a.coordinates() * pair;
      grad_location[0] = grad_x, grad_location[1] = grad_y;
      if (a.has_depths) grad_location[2] = grad_d;
    }
  }
}

}  // namespace visdet::VISDET_ISA

// A is the type of weights here: that of sums, or that of 16-bit features.
VISDET_KERNELS(DeformableAggregationKernels, forward_row<T, A>, backward_camera<T, A>,
               round_numbers<T, typename AccumulateType<T>::type>)
VISDET_KERNELS_OF(DeformableAggregationKernels, Float16, Float16, forward_row<T, A>, backward_camera<T, A>,
                  round_numbers<T, typename AccumulateType<T>::type>)
VISDET_KERNELS_OF(DeformableAggregationKernels, BFloat16, BFloat16, forward_row<T, A>, backward_camera<T, A>,
                  round_numbers<T, typename AccumulateType<T>::type>)

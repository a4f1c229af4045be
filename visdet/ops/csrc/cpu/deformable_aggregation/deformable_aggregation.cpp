// deformable_aggregation on the CPU. The contract is in ../deformable_aggregation.h; how this file is compiled, in
// vec.h.
//
// Most (point, camera) pairs do not count, and are passed over before anything of theirs but the location is read.
// Forward: parallel over (b, q). Backward: parallel over (b, v), one task owning camera v's rows of grad_features and
// its pairs' grad_locations and grad_weights, so there are no races and no dependence on the number of threads.
// Gradients of 16-bit features are summed in float32 in a scratch of one camera's rows, and rounded once.
#include "common/bilinear.h"
#include "cpu/vec.h"

namespace visdet {

// The tensors of one call, all contiguous. TW is the type of weights.
template <typename T, typename TW, typename A>
struct DeformableAggregationArrays {
  int64_t B, S, C, V, L, Q, P, G;
  const int64_t* level_shapes;  // [V, L, 2]
  const int64_t* level_starts;  // [V, L]
  const T* features;            // [B, S, C]
  const A* locations;           // [B, Q, P, V, 2]
  const TW* weights;            // [B, Q, P, V, L, G]
  T* output;                    // [B, Q, C]     forward
  const T* grad_output;         // [B, Q, C]     backward
  const int64_t* grad_starts;   // [V, L]        first row of each map in the gradients' sums
  A* grad_locations;            // [B, Q, P, V, 2]     zeroed
  TW* grad_weights;             // [B, Q, P, V, L, G]  zeroed
};

namespace VISDET_ISA {

// Whether a pair counts: strictly inside the image.
template <typename A>
VISDET_INLINE bool is_visible(const A* location) {
  return location[0] > A(0) && location[0] < A(1) && location[1] > A(0) && location[1] < A(1);
}

// The four corners of a visible pair in one level.
template <typename A>
struct Corners {
  int64_t offset[4];  // element of the map where each corner's channels begin
  A weight[4];        // zero for a corner outside the map
  A is_inside[4];     // 1 or 0
  A fx, fy, H, W;
};

template <typename T, typename TW, typename A>
VISDET_INLINE void locate_corners(const DeformableAggregationArrays<T, TW, A>& a, const A* location, int64_t v,
                                  int64_t l, Corners<A>& out) {
  const int64_t map = v * a.L + l;
  const int32_t H = static_cast<int32_t>(a.level_shapes[2 * map]),
                W = static_cast<int32_t>(a.level_shapes[2 * map + 1]);
  Bilinear<A> at;
  locate(location[0] * W - A(0.5), location[1] * H - A(0.5), H, W, at);
  at.corner_weights(out.weight);
  for (int k = 0; k < 4; ++k) {
    out.offset[k] = at.index[k] * a.C;
    out.is_inside[k] = at.is_inside[k] ? A(1) : A(0);
  }
  out.fx = at.fx, out.fy = at.fy, out.H = static_cast<A>(H), out.W = static_cast<A>(W);
}

// acc[c] += weights[g(c)] * the bilinear sample of channel c of a map.
template <typename T, typename TW, typename A>
VISDET_INLINE void sum_corners(const T* map, const Corners<A>& at, const TW* weights, int64_t C, int64_t G, A* acc) {
  constexpr int W = kLanes<A>;
  const T* rows[4];
  for (int k = 0; k < 4; ++k) rows[k] = map + at.offset[k];
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

// One row (b, q) of the output. acc is a scratch of C numbers.
template <typename T, typename TW, typename A>
void forward_row(const DeformableAggregationArrays<T, TW, A>& a, A* acc, int64_t row) {
  const T* features = a.features + row / a.Q * a.S * a.C;
  for (int64_t c = 0; c < a.C; ++c) acc[c] = 0;
  for (int64_t i = 0; i < a.P * a.V; ++i) {
    const int64_t pair = row * a.P * a.V + i;
    const A* location = a.locations + 2 * pair;
    if (!is_visible(location)) continue;
    for (int64_t l = 0; l < a.L; ++l) {
      Corners<A> at;
      locate_corners(a, location, i % a.V, l, at);
      const T* map = features + a.level_starts[i % a.V * a.L + l] * a.C;
      sum_corners(map, at, a.weights + (pair * a.L + l) * a.G, a.C, a.G, acc);
    }
  }
  for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], a.output[row * a.C + c]);
}

// One sample's share of the gradients of its map, its weights' gradients, and in dots[k] the sum over the groups of
// weight * <grad_output, corner k>.
template <typename T, typename TW, typename A>
VISDET_INLINE void scatter_corners(const T* map, A* grad_map, const Corners<A>& at, const A* g_row, const TW* weights,
                                   int64_t C, int64_t G, TW* grad_weights, A (&dots)[4]) {
  constexpr int W = kLanes<A>;
  const T* rows[4];
  A* grads[4];
  for (int k = 0; k < 4; ++k) {
    rows[k] = map + at.offset[k];
    grads[k] = grad_map + at.offset[k];
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

// One task: every gradient that camera v of batch entry b has. g_row is a scratch of C numbers; sums, zeroed, are the
// gradients of features, where map (v, l) begins at row grad_starts[v, l].
template <typename T, typename TW, typename A>
void backward_camera(const DeformableAggregationArrays<T, TW, A>& a, A* g_row, A* sums, int64_t b, int64_t v) {
  const T* features = a.features + b * a.S * a.C;
  for (int64_t q = 0; q < a.Q; ++q) {
    const int64_t row = b * a.Q + q;
    bool is_loaded = false;
    for (int64_t p = 0; p < a.P; ++p) {
      const int64_t pair = (row * a.P + p) * a.V + v;
      const A* location = a.locations + 2 * pair;
      if (!is_visible(location)) continue;
      if (!is_loaded) {
        for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
        is_loaded = true;
      }
      A grad_x = 0, grad_y = 0;
      for (int64_t l = 0; l < a.L; ++l) {
        const int64_t line = (pair * a.L + l) * a.G, map = v * a.L + l;
        Corners<A> at;
        A d[4];
        locate_corners(a, location, v, l, at);
        scatter_corners(features + a.level_starts[map] * a.C, sums + a.grad_starts[map] * a.C, at, g_row,
                        a.weights + line, a.C, a.G, a.grad_weights + line, d);
        grad_x += at.W * ((1 - at.fy) * (d[1] - d[0]) + at.fy * (d[3] - d[2]));
        grad_y += at.H * ((1 - at.fx) * (d[2] - d[0]) + at.fx * (d[3] - d[1]));
      }
      a.grad_locations[2 * pair] = grad_x;
      a.grad_locations[2 * pair + 1] = grad_y;
    }
  }
}

// Sums back to the type of features.
template <typename T, typename A>
void round_sums(const A* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) from_accumulate(from[i], to[i]);
}

#define VISDET_INSTANTIATE(T, TW, A)                                                              \
  template void forward_row<T, TW, A>(const DeformableAggregationArrays<T, TW, A>&, A*, int64_t); \
  template void backward_camera<T, TW, A>(const DeformableAggregationArrays<T, TW, A>&, A*, A*, int64_t, int64_t);
VISDET_INSTANTIATE(float, float, float)
VISDET_INSTANTIATE(double, double, double)
VISDET_INSTANTIATE(Float16, float, float)
VISDET_INSTANTIATE(Float16, Float16, float)
VISDET_INSTANTIATE(BFloat16, float, float)
VISDET_INSTANTIATE(BFloat16, BFloat16, float)
#undef VISDET_INSTANTIATE
template void round_sums<Float16, float>(const float*, Float16*, int64_t);
template void round_sums<BFloat16, float>(const float*, BFloat16*, int64_t);

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/deformable_aggregation/deformable_aggregation_cpu.h"
#include "cpu/dispatch.h"
#include "deformable_aggregation.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                                     \
  namespace isa {                                                                               \
  template <typename T, typename TW, typename A>                                                \
  void forward_row(const DeformableAggregationArrays<T, TW, A>&, A*, int64_t);                  \
  template <typename T, typename TW, typename A>                                                \
  void backward_camera(const DeformableAggregationArrays<T, TW, A>&, A*, A*, int64_t, int64_t); \
  template <typename T, typename A>                                                             \
  void round_sums(const A*, T*, int64_t);                                                       \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// (b, q) rows of one piece of work.
constexpr int64_t kRowGrain = 8;

// Calls f(T{}, TW{}, A{}) for the types of features and weights.
template <typename F>
void dispatch_types(const Tensor& features, const Tensor& weights, const F& f) {
  const bool same = weights.scalar_type() == features.scalar_type();
  dispatch_value_type(features.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (std::is_same_v<T, A>) {
      f(T{}, A{}, A{});
    } else if (same) {
      f(T{}, T{}, A{});
    } else {
      f(T{}, A{}, A{});
    }
  });
}

template <typename T, typename TW, typename A>
DeformableAggregationArrays<T, TW, A> arrays_of(const DeformableAggregationProblem& problem, const Tensor& features,
                                                const Tensor& level_shapes, const Tensor& level_starts,
                                                const Tensor& locations, const Tensor& weights) {
  DeformableAggregationArrays<T, TW, A> a{};
  a.B = problem.B, a.S = problem.S, a.C = problem.C, a.V = problem.V, a.L = problem.L;
  a.Q = problem.Q, a.P = problem.P, a.G = problem.G;
  a.level_shapes = level_shapes.const_data_ptr<int64_t>();
  a.level_starts = level_starts.const_data_ptr<int64_t>();
  a.features = static_cast<const T*>(features.const_data_ptr());
  a.locations = static_cast<const A*>(locations.const_data_ptr());
  a.weights = static_cast<const TW*>(weights.const_data_ptr());
  return a;
}

DeformableAggregationProblem check_all(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
                                       const Tensor& locations, const Tensor& weights) {
  const auto problem = check_deformable_aggregation(features, level_shapes, level_starts, locations, weights);
  VISDET_CHECK("deformable_aggregation", level_shapes.is_cpu() && level_starts.is_cpu(),
               "level_shapes and level_starts must be on the CPU");
  return problem;
}

// The maps of each camera one behind the other.
struct CameraRows {
  std::vector<int64_t> starts, of_camera;  // [V, L], each map's first row among its camera's; [V], a camera's rows
  int64_t most = 0, total = 0;             // of the camera with most, and of all

  CameraRows(const DeformableAggregationProblem& problem, const int64_t* level_shapes) {
    for (int64_t v = 0; v < problem.V; ++v) {
      int64_t rows = 0;
      for (int64_t map = v * problem.L; map < (v + 1) * problem.L; ++map) {
        starts.push_back(rows);
        rows += level_shapes[2 * map] * level_shapes[2 * map + 1];
      }
      of_camera.push_back(rows);
      most = std::max(most, rows), total += rows;
    }
  }
};

}  // namespace

Tensor deformable_aggregation_cpu(const Tensor& features_in, const Tensor& level_shapes_in,
                                  const Tensor& level_starts_in, const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_all(features_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  const Tensor features = dense(features_in), level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), locations = dense(locations_in), weights = dense(weights_in);
  check_camera_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  Tensor output = new_empty(features_in, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  dispatch_types(features, weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using TW = decltype(weight_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, TW, A>(problem, features, level_shapes, level_starts, locations, weights);
    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(forward_row, T, TW, A);
    torch::stable::parallel_for(0, problem.B * problem.Q, kRowGrain, [&](int64_t begin, int64_t end) {
      Scratch<A> acc(problem.C);
      for (int64_t row = begin; row < end; ++row) run(a, acc.data(), row);
    });
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> deformable_aggregation_backward_cpu(
    const Tensor& grad_output_in, const Tensor& features_in, const Tensor& level_shapes_in,
    const Tensor& level_starts_in, const Tensor& locations_in, const Tensor& weights_in,
    bool /*deterministic: always*/) {
  const auto problem = check_all(features_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_deformable_aggregation_grad(problem, grad_output_in, features_in);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in),
               level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               locations = dense(locations_in), weights = dense(weights_in);
  check_camera_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  Tensor grad_locations = new_empty(locations, locations.sizes()), grad_weights = new_empty(weights, weights.sizes());
  zero_(grad_locations), zero_(grad_weights);
  const CameraRows rows(problem, level_shapes.const_data_ptr<int64_t>());
  const bool is_rounded = accumulate_dtype(features.scalar_type()) != features.scalar_type();
  Tensor grad_features = new_empty(features, features.sizes());
  if (!is_rounded || rows.total < problem.S || problem.C == 0) zero_(grad_features);
  if (problem.C > 0) {
    dispatch_types(features, weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
      using T = decltype(value_tag);
      using TW = decltype(weight_tag);
      using A = decltype(accumulate_tag);
      auto a = arrays_of<T, TW, A>(problem, features, level_shapes, level_starts, locations, weights);
      a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
      a.grad_starts = is_rounded ? rows.starts.data() : a.level_starts;
      a.grad_locations = static_cast<A*>(grad_locations.mutable_data_ptr());
      a.grad_weights = static_cast<TW*>(grad_weights.mutable_data_ptr());
      const auto run = VISDET_BEST_ISA(backward_camera, T, TW, A);
      T* to = static_cast<T*>(grad_features.mutable_data_ptr());
      torch::stable::parallel_for(0, problem.B * problem.V, 1, [&](int64_t begin, int64_t end) {
        Scratch<A> g_row(problem.C);
        const Scratch<A> camera_sums(is_rounded ? rows.most * problem.C : 0);
        for (int64_t task = begin; task < end; ++task) {
          const int64_t b = task / problem.V, v = task % problem.V;
          T* entry = to + b * problem.S * problem.C;
          if constexpr (std::is_same_v<T, A>) {
            run(a, g_row.data(), entry, b, v);
          } else {
            std::fill_n(camera_sums.data(), rows.of_camera[v] * problem.C, A(0));
            run(a, g_row.data(), camera_sums.data(), b, v);
            for (int64_t map = v * problem.L; map < (v + 1) * problem.L; ++map) {
              VISDET_BEST_ISA(round_sums, T, A)
              (camera_sums.data() + rows.starts[map] * problem.C, entry + a.level_starts[map] * problem.C,
               a.level_shapes[2 * map] * a.level_shapes[2 * map + 1] * problem.C);
            }
          }
        }
      });
    });
  }
  return {grad_features, grad_locations, grad_weights};
}

}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("deformable_aggregation", TORCH_BOX(&visdet::deformable_aggregation_cpu));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&visdet::deformable_aggregation_backward_cpu));
}

#endif  // VISDET_ISA_BASELINE

// deformable_aggregation: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "deformable_aggregation.h"

#include "cpu/deformable_aggregation/arrays.h"
#include "cpu/dispatch.h"

namespace visdet {
namespace {

// (b, q) rows of one piece of work.
constexpr int64_t kRowGrain = 8;

template <typename T, typename TW, typename A>
DeformableAggregationArrays<T, TW, A> arrays_of(const DeformableAggregationProblem& problem, const Tensor& features,
                                                const Tensor& level_shapes, const Tensor& level_starts,
                                                const Tensor& locations, const Tensor& weights) {
  DeformableAggregationArrays<T, TW, A> a{};
  a.B = problem.B, a.S = problem.S, a.C = problem.C, a.V = problem.V, a.L = problem.L;
  a.Q = problem.Q, a.P = problem.P, a.G = problem.G;
  a.level_shapes = data_of<int64_t>(level_shapes);
  a.level_starts = data_of<int64_t>(level_starts);
  a.features = data_of<T>(features);
  a.locations = data_of<A>(locations);
  a.weights = data_of<TW>(weights);
  return a;
}

DeformableAggregationProblem check_all(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
                                       const Tensor& locations, const Tensor& weights) {
  const auto problem = check_deformable_aggregation(features, level_shapes, level_starts, locations, weights);
  VISDET_CHECK("deformable_aggregation", level_shapes.is_cpu() && level_starts.is_cpu(),
               "level_shapes and level_starts must be on the CPU");
  return problem;
}

// Where the rows of a map begin if the maps of each camera lie one behind the other.
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
  check_camera_levels(problem, data_of<int64_t>(level_shapes), data_of<int64_t>(level_starts));
  Tensor output = new_empty(features_in, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  dispatch_types(features, weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using TW = decltype(weight_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, TW, A>(problem, features, level_shapes, level_starts, locations, weights);
    a.output = mutable_data_of<T>(output);
    const auto run = best_kernels<DeformableAggregationKernels<T, TW>>().forward_row;
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
  check_camera_levels(problem, data_of<int64_t>(level_shapes), data_of<int64_t>(level_starts));
  Tensor grad_locations = new_like(locations), grad_weights = new_like(weights);
  zero_(grad_locations), zero_(grad_weights);
  const CameraRows rows(problem, data_of<int64_t>(level_shapes));
  const bool is_rounded = accumulate_dtype(features.scalar_type()) != features.scalar_type();
  Tensor grad_features = new_like(features);
  if (!is_rounded || rows.total < problem.S || problem.C == 0) zero_(grad_features);
  if (problem.C > 0) {
    dispatch_types(features, weights, [&](auto value_tag, auto weight_tag, auto accumulate_tag) {
      using T = decltype(value_tag);
      using TW = decltype(weight_tag);
      using A = decltype(accumulate_tag);
      auto a = arrays_of<T, TW, A>(problem, features, level_shapes, level_starts, locations, weights);
      a.grad_output = data_of<T>(grad_output);
      a.grad_starts = is_rounded ? rows.starts.data() : a.level_starts;
      a.grad_locations = mutable_data_of<A>(grad_locations);
      a.grad_weights = mutable_data_of<TW>(grad_weights);
      const auto& kernels = best_kernels<DeformableAggregationKernels<T, TW>>();
      T* to = mutable_data_of<T>(grad_features);
      torch::stable::parallel_for(0, problem.B * problem.V, 1, [&](int64_t begin, int64_t end) {
        Scratch<A> g_row(problem.C);
        const Scratch<A> camera_sums(is_rounded ? rows.most * problem.C : 0);
        for (int64_t task = begin; task < end; ++task) {
          const int64_t b = task / problem.V, v = task % problem.V;
          T* entry = to + b * problem.S * problem.C;
          if constexpr (std::is_same_v<T, A>) {
            kernels.backward_camera(a, g_row.data(), entry, b, v);
          } else {
            std::fill_n(camera_sums.data(), rows.of_camera[v] * problem.C, A(0));
            kernels.backward_camera(a, g_row.data(), camera_sums.data(), b, v);
            for (int64_t map = v * problem.L; map < (v + 1) * problem.L; ++map) {
              kernels.round_sums(camera_sums.data() + rows.starts[map] * problem.C,
                                 entry + a.level_starts[map] * problem.C,
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

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deformable_aggregation(Tensor features, Tensor level_shapes, Tensor level_starts, Tensor locations,"
      " Tensor weights) -> Tensor");
  m.def(
      "deformable_aggregation_backward(Tensor grad_output, Tensor features, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_locations, Tensor grad_weights)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("deformable_aggregation", TORCH_BOX(&visdet::deformable_aggregation_cpu));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&visdet::deformable_aggregation_backward_cpu));
}

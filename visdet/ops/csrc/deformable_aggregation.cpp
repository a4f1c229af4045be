// deformable_aggregation: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "deformable_aggregation.h"

#include <array>

#include "cpu/deformable_aggregation/arrays.h"
#include "cpu/dispatch.h"

namespace visdet {
namespace {

// (b, q) rows of one piece of work.
constexpr int64_t kRowGrain = 8;

template <typename T, typename TW, typename A>
DeformableAggregationArrays<T, TW, A> arrays_of(const DeformableAggregationProblem& problem, const Tensor& features,
                                                const Tensor* depths, const Tensor& level_shapes,
                                                const Tensor& level_starts, const Tensor& locations,
                                                const Tensor& weights) {
  DeformableAggregationArrays<T, TW, A> a{};
  a.B = problem.B, a.S = problem.S, a.C = problem.C, a.V = problem.V, a.L = problem.L;
  a.Q = problem.Q, a.P = problem.P, a.G = problem.G, a.D = problem.D;
  a.level_shapes = data_of(level_shapes);
  a.level_starts = data_of(level_starts);
  a.features = data_of(features), a.feature_row = features.stride(1);
  if (depths) a.has_depths = true, a.depths = data_of(*depths), a.depth_row = depths->stride(1);
  a.locations = data_of(locations);
  a.weights = data_of(weights);
  return a;
}

DeformableAggregationProblem check_all(const Tensor& features, const Tensor* depths, const Tensor& level_shapes,
                                       const Tensor& level_starts, const Tensor& locations, const Tensor& weights) {
  const auto problem =
      depths ? check_aggregation_with_depth(features, *depths, level_shapes, level_starts, locations, weights)
             : check_deformable_aggregation(features, level_shapes, level_starts, locations, weights);
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

// depths_in: null for deformable_aggregation.
Tensor aggregate(const Tensor& features_in, const Tensor* depths_in, const Tensor& level_shapes_in,
                 const Tensor& level_starts_in, const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_all(features_in, depths_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  const Tensor features = rows_of(features_in), depth_rows = depths_in ? rows_of(*depths_in) : features,
               level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               locations = dense(locations_in), weights = dense(weights_in);
  const Tensor* depths = depths_in ? &depth_rows : nullptr;
  check_camera_levels(problem, data_of(level_shapes), data_of(level_starts));
  Tensor output = new_empty(features_in, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  dispatch_types(features, weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
    auto a = arrays_of<T, TW, A>(problem, features, depths, level_shapes, level_starts, locations, weights);
    a.output = data_of(output);
    const auto run = best_kernels<DeformableAggregationKernels<T, TW>>().forward_row;
    parallel_each<A>(problem.B * problem.Q, kRowGrain, problem.C, [&](A* sums, int64_t row) { run(a, sums, row); });
  });
  return output;
}

// Returns the gradients of features, locations, weights and depths.
std::array<Tensor, 4> gradients(const Tensor& grad_output_in, const Tensor& features_in, const Tensor* depths_in,
                                const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_all(features_in, depths_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_deformable_aggregation_grad(problem, grad_output_in, features_in);
  const Tensor grad_output = dense(grad_output_in), features = rows_of(features_in),
               depth_rows = depths_in ? rows_of(*depths_in) : features, level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), locations = dense(locations_in), weights = dense(weights_in);
  const Tensor* depths = depths_in ? &depth_rows : nullptr;
  check_camera_levels(problem, data_of(level_shapes), data_of(level_starts));
  Tensor grad_locations = new_like(locations), grad_weights = new_like(weights);
  zero_(grad_locations), zero_(grad_weights);
  const CameraRows rows(problem, data_of(level_shapes));
  const bool is_rounded = accumulate_dtype(features.scalar_type()) != features.scalar_type();
  Tensor grad_features = new_like(features), grad_depths = depths ? new_like(*depths) : grad_features;
  if (!is_rounded || rows.total < problem.S || problem.C == 0) zero_(grad_features), zero_(grad_depths);
  if (problem.C > 0) {
    dispatch_types(features, weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
      auto a = arrays_of<T, TW, A>(problem, features, depths, level_shapes, level_starts, locations, weights);
      a.grad_output = data_of(grad_output);
      a.grad_starts = is_rounded ? rows.starts.data() : a.level_starts;
      a.grad_locations = data_of(grad_locations);
      a.grad_weights = data_of(grad_weights);
      const auto& kernels = best_kernels<DeformableAggregationKernels<T, TW>>();
      T *to = data_of(grad_features), *to_depths = data_of(grad_depths);
      torch::stable::parallel_for(0, problem.B * problem.V, 1, [&](int64_t begin, int64_t end) {
        Scratch<A> g_row(problem.C);
        const Scratch<A> camera_sums(is_rounded ? rows.most * (problem.C + problem.D) : 0);
        for (int64_t task = begin; task < end; ++task) {
          const int64_t b = task / problem.V, v = task % problem.V;
          T *entry = to + b * problem.S * problem.C, *of_depths = to_depths + b * problem.S * problem.D;
          if constexpr (std::is_same_v<T, A>) {
            kernels.backward_camera(a, g_row.data(), entry, of_depths, b, v);
          } else {
            A *sums = camera_sums.data(), *depth_sums = sums + rows.of_camera[v] * problem.C;
            std::fill_n(sums, rows.of_camera[v] * (problem.C + problem.D), A(0));
            kernels.backward_camera(a, g_row.data(), sums, depth_sums, b, v);
            for (int64_t map = v * problem.L; map < (v + 1) * problem.L; ++map) {
              const int64_t count = a.level_shapes[2 * map] * a.level_shapes[2 * map + 1], from = rows.starts[map],
                            start = a.level_starts[map];
              kernels.round_sums(sums + from * problem.C, entry + start * problem.C, count * problem.C);
              if (!depths) continue;
              kernels.round_sums(depth_sums + from * problem.D, of_depths + start * problem.D, count * problem.D);
            }
          }
        }
      });
    });
  }
  return {grad_features, grad_locations, grad_weights, grad_depths};
}

Tensor deformable_aggregation_cpu(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
                                  const Tensor& locations, const Tensor& weights) {
  return aggregate(features, nullptr, level_shapes, level_starts, locations, weights);
}

std::tuple<Tensor, Tensor, Tensor> deformable_aggregation_backward_cpu(
    const Tensor& grad_output, const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& locations, const Tensor& weights, bool /*deterministic: always*/) {
  const auto grads = gradients(grad_output, features, nullptr, level_shapes, level_starts, locations, weights);
  return {grads[0], grads[1], grads[2]};
}

Tensor deformable_aggregation_with_depth_cpu(const Tensor& features, const Tensor& depths, const Tensor& level_shapes,
                                             const Tensor& level_starts, const Tensor& locations,
                                             const Tensor& weights) {
  return aggregate(features, &depths, level_shapes, level_starts, locations, weights);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> deformable_aggregation_with_depth_backward_cpu(
    const Tensor& grad_output, const Tensor& features, const Tensor& depths, const Tensor& level_shapes,
    const Tensor& level_starts, const Tensor& locations, const Tensor& weights, bool /*deterministic: always*/) {
  const auto grads = gradients(grad_output, features, &depths, level_shapes, level_starts, locations, weights);
  return {grads[0], grads[3], grads[1], grads[2]};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deformable_aggregation(Tensor features, Tensor level_shapes, Tensor level_starts, Tensor locations,"
      " Tensor weights) -> Tensor");
  m.def(
      "deformable_aggregation_backward(Tensor grad_output, Tensor features, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_locations, Tensor grad_weights)");
  m.def(
      "deformable_aggregation_with_depth(Tensor features, Tensor depth_probs, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights) -> Tensor");
  m.def(
      "deformable_aggregation_with_depth_backward(Tensor grad_output, Tensor features, Tensor depth_probs,"
      " Tensor level_shapes, Tensor level_starts, Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_depth_probs, Tensor grad_locations, Tensor grad_weights)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("deformable_aggregation", TORCH_BOX(&visdet::deformable_aggregation_cpu));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&visdet::deformable_aggregation_backward_cpu));
  m.impl("deformable_aggregation_with_depth", TORCH_BOX(&visdet::deformable_aggregation_with_depth_cpu));
  m.impl("deformable_aggregation_with_depth_backward",
         TORCH_BOX(&visdet::deformable_aggregation_with_depth_backward_cpu));
}

// deformable_aggregation_fused: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "deformable_aggregation_fused.h"

#include <numeric>

#include "cpu/deformable_aggregation/fused_arrays.h"
#include "cpu/dispatch.h"

namespace visdet {

// In deformable_aggregation.cpp.
Tensor deformable_aggregation_cpu(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
                                  const Tensor& locations, const Tensor& weights);
std::tuple<Tensor, Tensor, Tensor> deformable_aggregation_backward_cpu(
    const Tensor& grad_output, const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& locations, const Tensor& weights, bool deterministic);

namespace {

using torch::stable::contiguous;
using torch::stable::new_empty;
using torch::stable::parallel_for;
using torch::stable::zero_;

// Queries of one piece of work; entries of camera_logits in one; a batch entry has at most kMostParts parts, of at
// least kLeastPart queries.
constexpr int64_t kQueryGrain = 8, kEntryGrain = 256, kMostParts = 64, kLeastPart = 8;
constexpr int64_t kLeastPeriod = 64;

template <typename TL, typename A>
FusedAggregationArrays<TL, A> arrays_of(const FusedAggregationInputs& it) {
  const auto& problem = it.problem;
  FusedAggregationArrays<TL, A> a{};
  a.B = problem.B, a.Q = problem.Q, a.V = problem.V, a.L = problem.L, a.P = problem.P, a.G = problem.G;
  a.keep_scale = static_cast<A>(it.keep_scale), a.min_depth = static_cast<A>(kMinDepth);
  a.key_points = data_of<A>(it.key_points);
  a.projection = data_of<A>(it.projection);
  a.image_wh = data_of<A>(it.image_wh);
  a.logits = data_of<TL>(it.logits);
  if (problem.has_camera) a.camera_logits = data_of<TL>(it.camera_logits);
  if (problem.has_keep) a.keep = data_of<bool>(it.keep);
  a.locations = mutable_data_of<A>(it.locations);
  a.weights = mutable_data_of<A>(it.weights);
  a.period = std::lcm(a.G, kAnyLanes);
  a.period *= ceil_of(kLeastPeriod, a.period);
  a.row = ceil_of(a.V * a.L * a.P * a.G, a.period) * a.period;
  a.points = ceil_of(a.P, kAnyLanes) * kAnyLanes;
  a.part = std::max(kLeastPart, ceil_of(a.Q, kMostParts)), a.parts = ceil_of(a.Q, a.part);
  return a;
}

template <typename TL, typename A>
int64_t scratch_size(const FusedAggregationArrays<TL, A>& a) {
  return 2 * a.period + a.row + 3 * a.points;
}

// Makes the arguments of deformable_aggregation.
void prepare(const FusedAggregationInputs& it) {
  if (it.weights.numel() == 0) return;
  dispatch_value_type(it.logits.scalar_type(), [&]<typename TL, typename A>(TL, A) {
    const auto a = arrays_of<TL, A>(it);
    const auto run = best_kernels<FusedAggregationKernels<TL, A>>().prepare_queries;
    parallel_for(0, a.B * a.Q, kQueryGrain, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(scratch_size(a));
      run(a, scratch.data(), begin, end);
    });
  });
}

Tensor fused_forward(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts,
                     const Tensor& key_points, const Tensor& projection, const Tensor& image_wh, const Tensor& logits,
                     const Tensor& camera_logits, const Tensor& keep, double keep_scale) {
  const FusedAggregationInputs it(features, level_shapes, key_points, projection, image_wh, logits, camera_logits, keep,
                                  keep_scale);
  prepare(it);
  return deformable_aggregation_cpu(features, level_shapes, level_starts, it.locations, it.weights);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_backward(const Tensor& grad_output, const Tensor& features,
                                                          const Tensor& level_shapes, const Tensor& level_starts,
                                                          const Tensor& key_points, const Tensor& projection,
                                                          const Tensor& image_wh, const Tensor& logits,
                                                          const Tensor& camera_logits, const Tensor& keep,
                                                          double keep_scale, bool deterministic) {
  const FusedAggregationInputs it(features, level_shapes, key_points, projection, image_wh, logits, camera_logits, keep,
                                  keep_scale);
  prepare(it);
  Tensor grad_features, grad_locations, grad_weights;  // structured bindings could not be captured
  std::tie(grad_features, grad_locations, grad_weights) = deformable_aggregation_backward_cpu(
      grad_output, features, level_shapes, level_starts, it.locations, it.weights, deterministic);
  Tensor grad_key_points = new_like(it.key_points), grad_logits = new_like(it.logits),
         grad_camera_logits = new_like(it.camera_logits);
  if (it.weights.numel() == 0) {
    zero_(grad_key_points), zero_(grad_logits), zero_(grad_camera_logits);
    return {grad_features, grad_key_points, grad_logits, grad_camera_logits};
  }
  dispatch_value_type(it.logits.scalar_type(), [&]<typename TL, typename A>(TL, A) {
    auto a = arrays_of<TL, A>(it);
    const int64_t N = a.V * a.L * a.P * a.G;
    const Scratch<A> part_sums(a.camera_logits ? a.B * a.parts * N : 0);
    a.grad_locations = data_of<A>(grad_locations);
    a.grad_weights = data_of<A>(grad_weights);
    a.grad_key_points = mutable_data_of<A>(grad_key_points);
    a.grad_logits = mutable_data_of<TL>(grad_logits);
    a.part_sums = part_sums.data();
    a.grad_camera_logits = mutable_data_of<TL>(grad_camera_logits);
    const auto& kernels = best_kernels<FusedAggregationKernels<TL, A>>();
    parallel_for(0, a.B * a.parts, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(scratch_size(a));
      for (int64_t task = begin; task < end; ++task) kernels.finish_part(a, scratch.data(), task);
    });
    if (!a.camera_logits) return;
    for (int64_t b = 0; b < a.B; ++b) {
      parallel_for(0, N, kEntryGrain, [&](int64_t begin, int64_t end) { kernels.add_parts(a, b, begin, end); });
    }
  });
  return {grad_features, grad_key_points, grad_logits, grad_camera_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deformable_aggregation_fused(Tensor features, Tensor level_shapes, Tensor level_starts, Tensor key_points,"
      " Tensor projection, Tensor image_wh, Tensor logits, Tensor camera_logits, Tensor keep, float keep_scale)"
      " -> Tensor");
  m.def(
      "deformable_aggregation_fused_backward(Tensor grad_output, Tensor features, Tensor level_shapes,"
      " Tensor level_starts, Tensor key_points, Tensor projection, Tensor image_wh, Tensor logits,"
      " Tensor camera_logits, Tensor keep, float keep_scale, bool deterministic)"
      " -> (Tensor grad_features, Tensor grad_key_points, Tensor grad_logits, Tensor grad_camera_logits)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("deformable_aggregation_fused", TORCH_BOX(&visdet::fused_forward));
  m.impl("deformable_aggregation_fused_backward", TORCH_BOX(&visdet::fused_backward));
}

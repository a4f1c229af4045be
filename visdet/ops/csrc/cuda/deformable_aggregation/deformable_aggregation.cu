// deformable_aggregation, its form with depth and its fused form on CUDA. The contracts are in deformable_aggregation.h
// and deformable_aggregation_fused.h; how the work is laid out, above each kernel.
#include <tuple>

#include "common/launch.h"
#include "common/paths.h"
#include "cuda/deformable_aggregation/depth.cuh"
#include "cuda/deformable_aggregation/forward.cuh"
#include "cuda/deformable_aggregation/fused.cuh"
#include "cuda/deformable_aggregation/pairs.cuh"
#include "cuda/deformable_aggregation/records.cuh"
#include "cuda/deformable_aggregation/texels.cuh"
#include "deformable_aggregation.h"

namespace visdet::deformable_aggregation {
namespace {

constexpr Path<ForwardCall> kForwardPaths[] = {
    {"packs", packs_decline<ForwardCall>, launch_forward<true>},
    {"single_values", nullptr, launch_forward_of_values},
};

const char* packs_decline_backward(const BackwardCall& call) {
  if (const char* reason = packs_decline(call)) return reason;
  const int64_t vec = vector_values(call.features);
  const Sizes sizes = sizes_of(call.problem, 0, vec);
  if (sizes.lane_packs > 1 || sizes.warp_packs > kHeldChannels / vec)
    return "a warp cannot hold the channels of grad_output";
  return aligned(call.grad_output, kVectorBytes) ? nullptr : "grad_output does not start at a multiple of 16 bytes";
}

template <bool PACKS>
void launch_backward(const BackwardCall& call) {
  dispatch_types(call.features, call.weights, [&]<typename T, typename TW, typename A>(T, TW, A) {
    if constexpr (kHasKernels<T, PACKS>) {
      const auto& problem = call.problem;
      Sizes sizes = sizes_of(problem, call.maps.cell_entries, kPackValues<T, PACKS>);
      sizes.splits = splits_of(problem, problem.B * problem.Q, 8 * call.scope.device().multiprocessors);
      const Tensor starts = new_zeros(call.features, {problem.B * sizes.cell_entries}, ScalarType::Int);
      const Tensor ranks = new_empty(call.features, {call.locations.numel() / 2 * problem.L}, ScalarType::Int);
      launch_pairs<T, TW, A, PACKS>(call, sizes, starts, ranks);
      const Tensor records = write_records<A>(call, sizes, starts, ranks);
      launch_texels<T, TW, A, PACKS>(call, sizes, starts, records);
    }
  });
}

void launch_backward_of_values(const BackwardCall& call) {
  if (!is_16_bit(call.features)) return launch_backward<false>(call);
  const Tensor features = in_float32(call.features), weights = in_float32(call.weights),
               grad_output = in_float32(call.grad_output), of_features = new_like(features),
               of_weights = new_like(weights);
  launch_backward<false>({{call.scope, call.problem, call.maps, features, call.locations, weights},
                          grad_output,
                          call.deterministic,
                          of_features,
                          call.grad_locations,
                          of_weights});
  Tensor grad_features = call.grad_features, grad_weights = call.grad_weights;
  copy_(grad_features, of_features), copy_(grad_weights, of_weights);
}

constexpr Path<BackwardCall> kBackwardPaths[] = {
    {"packs", packs_decline_backward, launch_backward<true>},
    {"single_values", nullptr, launch_backward_of_values},
};

Tensor forward(const Tensor& features_in, const Tensor& level_shapes, const Tensor& level_starts,
               const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_deformable_aggregation(features_in, level_shapes, level_starts, locations_in, weights_in);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor features = dense(features_in), locations = contiguous_pairs(locations_in), weights = dense(weights_in);
  const CallMaps maps = maps_of_call(kOp, scope, problem, level_shapes, level_starts, features);
  Tensor output = new_empty(features, {problem.B, problem.Q, problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0 || weights.numel() == 0) return zero_(output);
  run_first(kOp, kForwardPaths, ForwardCall{{scope, problem, maps, features, locations, weights}, output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& features_in,
                                            const Tensor& level_shapes, const Tensor& level_starts,
                                            const Tensor& locations_in, const Tensor& weights_in, bool deterministic) {
  const auto problem = check_deformable_aggregation(features_in, level_shapes, level_starts, locations_in, weights_in);
  check_deformable_aggregation_grad(problem, grad_output_in, features_in);
  check_sizes(problem);
  const DeviceScope scope(features_in);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in),
               locations = contiguous_pairs(locations_in), weights = dense(weights_in);
  const CallMaps maps = maps_of_call(kBackwardOp, scope, problem, level_shapes, level_starts, features);
  Tensor grad_features = new_like(features), grad_locations = new_like(locations), grad_weights = new_like(weights);
  if (problem.S == 0 || problem.C == 0 || weights.numel() == 0 || grad_output.numel() == 0) {
    zero_(grad_features), zero_(grad_locations), zero_(grad_weights);
    return {grad_features, grad_locations, grad_weights};
  }
  run_first(kBackwardOp, kBackwardPaths,
            BackwardCall{{scope, problem, maps, features, locations, weights},
                         grad_output,
                         deterministic,
                         grad_features,
                         grad_locations,
                         grad_weights});
  return {grad_features, grad_locations, grad_weights};
}

}  // namespace
}  // namespace visdet::deformable_aggregation

VISDET_CUDA_OPERATORS(deformable_aggregation, m) {
  m.impl("deformable_aggregation", TORCH_BOX(&visdet::deformable_aggregation::forward));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&visdet::deformable_aggregation::backward));
  m.impl("deformable_aggregation_with_depth", TORCH_BOX(&visdet::deformable_aggregation::forward_with_depth));
  m.impl("deformable_aggregation_with_depth_backward", TORCH_BOX(&visdet::deformable_aggregation::backward_with_depth));
  m.impl("deformable_aggregation_fused", TORCH_BOX(&visdet::deformable_aggregation_fused::forward));
  m.impl("deformable_aggregation_fused_backward", TORCH_BOX(&visdet::deformable_aggregation_fused::backward));
}

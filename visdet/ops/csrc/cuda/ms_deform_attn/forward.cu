// Forward of ms_deform_attn on CUDA, given locations and weights. The contract is in ms_deform_attn.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cuda/ms_deform_attn/forward.cuh"

namespace visdet::ms_deform_attn {
namespace {

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor value = dense(value_in), level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               locations = contiguous_pairs(locations_in), weights = contiguous_pairs(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  return forward(problem, scope, value, levels, GivenForm{locations, weights});
}

}  // namespace
}  // namespace visdet::ms_deform_attn

VISDET_CUDA_OPERATORS(ms_deform_attn, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn));
}

// Forward of ms_deform_attn_fused on CUDA, from reference points, offsets and logits. The contract is in
// ms_deform_attn.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cuda/ms_deform_attn/forward.cuh"

namespace visdet::ms_deform_attn {
namespace {

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                            const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in,
                            std::vector<int64_t> num_points) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor value = dense(value_in), level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               reference = contiguous_pairs(reference_in), offsets = contiguous_pairs(offsets_in),
               logits = contiguous_pairs(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  return forward(problem, scope, value, levels, FusedForm{reference, offsets, logits});
}

}  // namespace
}  // namespace visdet::ms_deform_attn

VISDET_CUDA_OPERATORS(ms_deform_attn_fused, m) {
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused));
}

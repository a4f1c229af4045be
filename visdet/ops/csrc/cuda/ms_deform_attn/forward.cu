// The forward of ms_deform_attn and ms_deform_attn_fused on CUDA: its paths, the best first. common/paths.h says how a
// path is chosen, and the header of each path describes its kernel. The contract is in ms_deform_attn.h.
#include <vector>

#include "common/torch.h"
#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_decoder.cuh"
#include "cuda/ms_deform_attn/forward_encoder.cuh"
#include "cuda/ms_deform_attn/forward_rows.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename Form>
constexpr Path<ForwardCall<Form>> kForwardPaths[] = {
    {"decoder", decoder_declines<Form>, decoder_launch<Form>},
    {"encoder", encoder_declines<Form>, encoder_launch<Form>},
    {"rows", nullptr, rows_launch<Form>},
};

template <typename Form>
Tensor forward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& value, const Levels& levels,
               const Form& form) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0 || problem.K == 0) return zero_(output);
  if (const int64_t channels = filled_channels(problem, value); channels > problem.C) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    const Tensor filled_output = forward(filled, scope, fill_rows(value, problem, channels), levels, form);
    Tensor rows = view(output, {problem.B, problem.Q, problem.G, problem.C});
    Tensor all_rows = view(filled_output, {problem.B, problem.Q, problem.G, channels});
    copy_(rows, narrow(all_rows, 3, 0, problem.C));
    return output;
  }
  run_first("ms_deform_attn", kForwardPaths<Form>, {problem, scope, levels, form, value, output});
  return output;
}

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

VISDET_CUDA_OPERATORS(ms_deform_attn, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused));
}

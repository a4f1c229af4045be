// The forward of ms_deform_attn on CUDA, for both forms of the operator: its paths, the best first. common/paths.h says
// how a path is chosen, and the header of each path describes its kernel. forward.cu and forward_fused.cu each compile
// the kernels of one form.
#pragma once

#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_decoder.cuh"
#include "cuda/ms_deform_attn/forward_encoder.cuh"
#include "cuda/ms_deform_attn/forward_rows.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename Form>
constexpr Path<ForwardCall<Form>> kForwardPaths[] = {
    {"decoder", decoder_declines<Form>, decoder_launch<Form>},
    {"few_rows", few_rows_declines<Form>, few_rows_launch<Form>},
    {"encoder", encoder_declines<Form>, encoder_launch<Form>},
    {"rows", nullptr, rows_launch<Form>},
};

template <typename Form>
Tensor forward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& value, const Levels& levels,
               const Form& form) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0) return zero_(output);
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

}  // namespace
}  // namespace visdet::ms_deform_attn

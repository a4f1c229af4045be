// Backward of ms_deform_attn on CUDA. The contract is in csrc/ms_deform_attn.h.
#include <tuple>

#include "common/torch.h"
#include "cuda/ms_deform_attn/backward_direct.cuh"
#include "cuda/ms_deform_attn/backward_encoder.cuh"
#include "cuda/ms_deform_attn/backward_sorted.cuh"
#include "cuda/ms_deform_attn/backward_strips.cuh"
#include "cuda/ms_deform_attn/softmax.cuh"

namespace visdet::ms_deform_attn {
namespace {

template <typename Form>
constexpr Path<BackwardCall<Form>> kBackwardPaths[] = {
    {"encoder", encoder_declines<Form>, encoder_launch<Form>},
    {"strips", strips_declines<Form>, strips_launch<Form>},
    {"direct", direct_declines<Form>, direct_launch<Form>},
    {"sorted", nullptr, sorted_launch<Form>},
};

// Fills grad_value and the samples' gradients, none of which is empty. The kernels read rows 16 bytes at a time: where
// C or an address does not allow it, the call goes on with copies whose rows are filled up with zeros.
template <typename Form>
void backward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& grad_output,
              const Tensor& value, const Levels& levels, Plans& plans, Form& form, bool deterministic,
              Tensor& grad_value) {
  const int64_t vec = vector_values(value), channels = ceil_div(problem.C, vec) * vec;
  if (channels > problem.C || !aligned(value, kVectorBytes) || !aligned(grad_output, kVectorBytes)) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    check_sizes(filled);
    const auto copy = [&](const Tensor& rows) {
      return channels > problem.C ? fill_rows(rows, problem, channels) : clone(rows);
    };
    Tensor filled_grad = new_empty(value, {problem.B, problem.S, problem.G, channels});
    backward(filled, scope, copy(grad_output), copy(value), levels, plans, form, deterministic, filled_grad);
    copy_(grad_value, narrow(filled_grad, 3, 0, problem.C));
    return;
  }
  run_first(kOp, kBackwardPaths<Form>,
            {problem, scope, levels, plans, form, grad_output, value, deterministic, grad_value});
}

struct GivenBackward {
  static constexpr bool kHasSoftmax = false;
  const GivenForm given;
  Tensor &grad_locations, &grad_weights;

  template <typename T, typename A>
  GivenSamples<A> source() const {
    return given.template source<T, A>();
  }
  template <typename T, typename A>
  GivenSamples<A> source_with_softmax() const {
    return source<T, A>();
  }
  template <typename A, typename F>
  void with_source(const F& f) const {
    f(source<A, A>());
  }
  template <typename A>
  SampleGrads<A> grads() const {
    return {data_of(grad_locations), data_of(grad_weights), nullptr, nullptr};
  }
  template <typename A>
  SampleGrads<A> final_grads() const {
    return grads<A>();
  }
};

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool deterministic) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor grad_output = dense(grad_output_in), value = dense(value_in), level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), locations = contiguous_pairs(locations_in),
               weights = dense(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_like(value), grad_locations = new_like(locations), grad_weights = new_like(weights);
  if (problem.C == 0 || problem.S == 0 || grad_weights.numel() == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  Plans plans(problem, scope, value, levels);
  GivenBackward form{{locations, weights}, grad_locations, grad_weights};
  backward(problem, scope, grad_output, value, levels, plans, form, deterministic, grad_value);
  return {grad_value, grad_locations, grad_weights};
}

// The gradients of value, reference points, offsets and logits.
std::tuple<Tensor, Tensor, Tensor, Tensor> ms_deform_attn_fused_backward(
    const Tensor& grad_output_in, const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
    const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in, std::vector<int64_t> num_points,
    bool needs_reference, bool deterministic) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor grad_output = dense(grad_output_in), value = dense(value_in), level_shapes = dense(level_shapes_in),
               level_starts = dense(level_starts_in), reference = contiguous_pairs(reference_in),
               offsets = contiguous_pairs(offsets_in), logits = dense(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  Tensor grad_value = new_like(value);
  const FusedForm samples{reference, offsets, logits};
  FusedBackward form(problem, scope, samples, needs_reference);
  if (problem.C == 0 || problem.S == 0 || logits.numel() == 0) {
    zero_(grad_value), zero_(form.grad_reference), zero_(form.grad_offsets), zero_(form.grad_logits);
    return {grad_value, form.grad_reference, form.grad_offsets, form.grad_logits};
  }
  Plans plans(problem, scope, value, levels);
  backward(problem, scope, grad_output, value, levels, plans, form, deterministic, grad_value);
  dispatch_value_type(reference.scalar_type(),
                      [&](auto, auto accumulate) { form.finish<decltype(accumulate)>(plans); });
  return {grad_value, form.grad_reference, form.grad_offsets, form.grad_logits};
}

}  // namespace
}  // namespace visdet::ms_deform_attn

VISDET_CUDA_OPERATORS(ms_deform_attn_backward, m) {
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused_backward));
}

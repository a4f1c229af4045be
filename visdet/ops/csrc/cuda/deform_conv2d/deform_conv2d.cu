// deform_conv2d on CUDA. The contract is in csrc/deform_conv2d.h; convolution.cuh has the steps, of which this file
// makes the forward and the backward pass.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "common/launch.h"
#include "common/paths.h"
#include "cuda/deform_conv2d/convolution.cuh"
#include "deform_conv2d.h"

namespace visdet::deform_conv2d {
namespace {

// The kernels compute channels in int32.
void check_sizes(const char* op, const DeformConvProblem& p) {
  VISDET_CHECK(op, p.C <= 1 << 23, "input must have at most 2^23 channels on CUDA, got ", p.C);
  VISDET_CHECK(op, p.M <= 1 << 30, "weight must have at most 2^30 output channels on CUDA, got ", p.M);
}

// A call of either direction, none of whose tensors is empty.
struct Call {
  const char* op;
  const DeformConvProblem& problem;
  const DeviceScope& scope;
  const Tensor &input, &offset;
  const std::optional<Tensor>& mask;
  const Tensor& weight;
  Tensor* output;  // of the forward

  // Of the backward. A gradient that is not wanted is empty.
  const Tensor* grad_output;
  Tensor *grad_input, *grad_offset, *grad_mask, *grad_weight;
  bool needs_input, needs_offset, needs_weight;

  // Calls part(convolution, first, count) for each part of the batch, then finish(convolution).
  template <typename Part, typename Finish>
  void for_parts(const Part& part, const Finish& finish) const {
    dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      Convolution<decltype(value_tag), decltype(accumulate_tag)> run(op, problem, scope, input, offset, mask, weight);
      const int64_t step = run.images_at_once();
      for (int64_t first = 0; first < problem.B; first += step) part(run, first, std::min(step, problem.B - first));
      finish(run);
    });
  }
};

const char* packs_decline(const Call& call, int64_t channels) {
  if (call.input.element_size() == 8) return "the values are float64";
  return slice_of(call.problem) % channels == 0 ? nullptr
                                                : "channels that share a weight and an offset do not fill packs";
}
const char* column_packs_decline(const Call& call) { return packs_decline(call, vector_values(call.input)); }
const char* gradient_packs_decline(const Call& call) { return packs_decline(call, kSums<float>); }

template <bool BY_PACKS>
void convolve(const Call& call) {
  call.for_parts(
      [&](auto& run, int64_t first, int64_t count) {
        run.multiply(run.columns(run.images(first, count), first, count, BY_PACKS), *call.output, first, count);
      },
      [](auto&) {});
}

template <bool BY_PACKS>
void differentiate(const Call& call) {
  const DeformConvProblem& p = call.problem;
  std::optional<Tensor> sums;
  call.for_parts(
      [&](auto& run, int64_t first, int64_t count) {
        const Tensor images = run.images(first, count), products = run.grad_products(*call.grad_output, first, count);
        const Tensor grad_columns = run.grad_columns(products, count);
        std::optional<Tensor> pixels, columns;
        if (call.needs_weight) columns = run.columns_beside(grad_columns, count);
        if (call.needs_input) {
          pixels = new_empty(call.input, {count, p.H, p.W, p.C}, accumulate_dtype(call.input.scalar_type()));
          zero_(*pixels);
        }
        run.gradients(images, grad_columns, first, count, pixels ? &*pixels : nullptr,
                      call.needs_offset ? call.grad_offset : nullptr,
                      call.needs_offset && call.mask ? call.grad_mask : nullptr, columns ? &*columns : nullptr,
                      BY_PACKS);
        if (call.needs_input) run.grad_input(*pixels, *call.grad_input, first, count);
        if (call.needs_weight) run.add_grad_weight(products, *columns, sums);
      },
      [&](auto& run) {
        if (call.needs_weight) run.grad_weight(*sums, *call.grad_weight);
      });
}

constexpr Path<Call> kForwardPaths[] = {
    {"packs", column_packs_decline, convolve<true>},
    {"values", nullptr, convolve<false>},
};
constexpr Path<Call> kBackwardPaths[] = {
    {"packs", gradient_packs_decline, differentiate<true>},
    {"values", nullptr, differentiate<false>},
};

using Ints = std::vector<int64_t>;

Tensor forward(const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask, const Tensor& weight,
               const Ints& stride, const Ints& padding, const Ints& dilation, int64_t deform_groups,
               int64_t im2col_step) {
  constexpr const char* op = "deform_conv2d";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  check_sizes(op, p);
  const DeviceScope scope(input);
  Tensor output = new_empty(input, {p.B, p.M, p.height, p.width});
  if (output.numel() == 0 || input.numel() == 0) return zero_(output);
  run_first(op, kForwardPaths, Call{op, p, scope, input, offset, mask, weight, &output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& input,
                                                    const Tensor& offset, const std::optional<Tensor>& mask,
                                                    const Tensor& weight, const Ints& stride, const Ints& padding,
                                                    const Ints& dilation, int64_t deform_groups, int64_t im2col_step,
                                                    bool needs_input, bool needs_offset, bool needs_weight) {
  constexpr const char* op = "deform_conv2d_backward";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  check_like(op, "grad_output", grad_output_in, {p.B, p.M, p.height, p.width}, "input", input);
  check_sizes(op, p);
  const DeviceScope scope(input);
  const auto gradient_of = [&](const Tensor& tensor, bool needs) {
    return needs ? new_like(tensor) : new_empty(tensor, {0});
  };
  Tensor grad_input = gradient_of(input, needs_input), grad_offset = gradient_of(offset, needs_offset);
  Tensor grad_mask = gradient_of(mask ? *mask : offset, needs_offset && mask);
  Tensor grad_weight = gradient_of(weight, needs_weight);
  if (grad_output_in.numel() == 0 || input.numel() == 0) {
    return {zero_(grad_input), zero_(grad_offset), zero_(grad_mask), zero_(grad_weight)};
  }
  const Tensor grad_output = dense(grad_output_in);
  if (needs_input || needs_offset || needs_weight) {
    run_first(op, kBackwardPaths,
              Call{op, p, scope, input, offset, mask, weight, nullptr, &grad_output, &grad_input, &grad_offset,
                   &grad_mask, &grad_weight, needs_input, needs_offset, needs_weight});
  }
  return {grad_input, grad_offset, grad_mask, grad_weight};
}

}  // namespace
}  // namespace visdet::deform_conv2d

VISDET_CUDA_OPERATORS(deform_conv2d, m) {
  m.impl("deform_conv2d", TORCH_BOX(&visdet::deform_conv2d::forward));
  m.impl("deform_conv2d_backward", TORCH_BOX(&visdet::deform_conv2d::backward));
}

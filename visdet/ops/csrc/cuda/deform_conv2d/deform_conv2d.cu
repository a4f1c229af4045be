// deform_conv2d on CUDA. The contract is in csrc/deform_conv2d.h; convolution.cuh has the steps, of which this file
// makes the forward and the backward pass.
#include <algorithm>
#include <optional>

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

// A call of either direction.
struct Call : Arguments {
  const char* op;
  const DeviceScope& scope;
  Tensor* output;             // of the forward
  const Tensor* grad_output;  // of the backward
  GradientTensors gradients;

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
        if (call.gradients.weight) columns = run.columns_beside(grad_columns, count);
        if (call.gradients.input) {
          pixels = new_empty(call.input, {count, p.H, p.W, p.C}, accumulate_dtype(call.input.scalar_type()));
          zero_(*pixels);
        }
        run.gradients(images, grad_columns, first, count, pixels ? &*pixels : nullptr, call.gradients.offset,
                      call.gradients.mask, columns ? &*columns : nullptr, BY_PACKS);
        if (call.gradients.input) run.grad_input(*pixels, *call.gradients.input, first, count);
        if (call.gradients.weight) run.add_grad_weight(products, *columns, sums);
      },
      [&](auto& run) {
        if (call.gradients.weight) run.grad_weight(*sums, *call.gradients.weight);
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

}  // namespace

void compute(const OnDevice& device, const Arguments& given, Tensor& output) {
  check_sizes(device.op, given.problem);
  run_first(device.op, kForwardPaths, Call{given, device.op, device.scope, &output});
}

void compute_gradients(const OnDevice& device, const Arguments& given, const Tensor& grad_output,
                       const GradientTensors& gradients) {
  check_sizes(device.op, given.problem);
  run_first(device.op, kBackwardPaths, Call{given, device.op, device.scope, nullptr, &grad_output, gradients});
}

}  // namespace visdet::deform_conv2d

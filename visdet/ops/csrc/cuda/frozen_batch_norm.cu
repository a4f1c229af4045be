// Batch normalisation by fixed statistics from 16 bits to float32, and its gradient back. The contract is in
// visdet/ops/frozen_batch_norm.py.
#include "common/aten.h"
#include "common/launch.h"
#include "common/values.cuh"

namespace visdet::frozen_batch_norm {
namespace {

constexpr const char* kOp = "frozen_batch_norm";
constexpr int kThreads = 256;
constexpr int kValues = 8;  // of a thread

// A tensor in memory: runs of `inner` values of the same channel, channel after channel, image after image.
struct Layout {
  int64_t count, inner, channels;
};

// bias and mean are null for the gradient, which is only scaled.
struct Statistics {
  const float *weight, *variance, *bias, *mean;
  float eps;
};

// A thread owns kValues neighbouring values. Sums and products are rounded one by one, as torch's are.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    frozen_batch_norm_kernel(const In* __restrict__ input, const Statistics statistics, const Layout layout,
                             Out* __restrict__ output) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kValues;
  if (first >= layout.count) return;
  const int64_t run = first / layout.inner;
  int64_t left = layout.inner - (first - run * layout.inner);
  int channel = static_cast<int>(run % layout.channels);
  float scale, shift;
  const auto read_channel = [&] {
    scale = __fmul_rn(statistics.weight[channel], rsqrtf(__fadd_rn(statistics.variance[channel], statistics.eps)));
    shift = statistics.bias == nullptr
                ? 0.0f
                : __fsub_rn(statistics.bias[channel], __fmul_rn(statistics.mean[channel], scale));
  };
  read_channel();
  const int values = static_cast<int>(min(layout.count - first, int64_t{kValues}));
  Pack<In, kValues> from = {};
  if (values == kValues) {
    from = *reinterpret_cast<const Pack<In, kValues>*>(input + first);
  } else {
    for (int i = 0; i < values; ++i) from.at[i] = input[first + i];
  }
  float given[kValues];
  unpack(from, given);
  Pack<Out, kValues> to;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (left == 0) {
      left = layout.inner;
      channel = channel + 1 == layout.channels ? 0 : channel + 1;
      read_channel();
    }
    --left;
    const float scaled = __fmul_rn(given[i], scale);
    to.at[i] = from_accumulate<Out>(statistics.bias == nullptr ? scaled : __fadd_rn(scaled, shift));
  }
  if (values == kValues) {
    *reinterpret_cast<Pack<Out, kValues>*>(output + first) = to;
  } else {
    for (int i = 0; i < values; ++i) output[first + i] = to.at[i];
  }
}

// Returns how values [B, C, H, W] lie in memory, which is contiguous or channels-last.
Layout layout_of(const Tensor& values, const Tensor& weight) {
  VISDET_CHECK(kOp, values.dim() == 4 && weight.dim() == 1 && weight.size(0) == values.size(1),
               "input must be [B, C, H, W] and weight [C], got ", shape_text(values), " and ", shape_text(weight));
  const int64_t C = values.size(1), area = values.size(2) * values.size(3);
  const bool is_contiguous = values.is_contiguous();
  VISDET_CHECK(kOp, (is_contiguous || is_channels_last(values)) && aligned(values, kVectorBytes),
               "input must be contiguous or channels-last, and aligned to 16 bytes");
  return {values.numel(), is_contiguous ? area : 1, C};
}

// Returns memory of this type that is laid out as `values` are.
Tensor empty_like(const Tensor& values, ScalarType type) {
  const Tensor memory = new_empty(values, {values.numel()}, type);
  return strided(memory, {values.sizes().begin(), values.sizes().end()},
                 {values.strides().begin(), values.strides().end()});
}

const float* floats_of(const Tensor& vector, const Tensor& values) {
  VISDET_CHECK(kOp,
               vector.dim() == 1 && vector.size(0) == values.size(1) && vector.is_contiguous() &&
                   vector.scalar_type() == ScalarType::Float && on_device_of(values, vector),
               "statistics must be contiguous float32 [C] on the device of input, got ", shape_text(vector));
  return data_of<float>(vector);
}

template <typename In, typename Out>
void run(const DeviceScope& scope, const Tensor& from, const Statistics& statistics, const Layout& layout, Tensor& to) {
  launch({kOp, "frozen_batch_norm_kernel", scope, ceil_div(layout.count, kThreads * kValues), kThreads},
         frozen_batch_norm_kernel<In, Out>, data_of<In>(from), statistics, layout, mutable_data_of<Out>(to));
}

// Calls f with a zero of a 16-bit type.
template <typename F>
void dispatch_halves(ScalarType type, const F& f) {
  VISDET_CHECK(kOp, type == ScalarType::Half || type == ScalarType::BFloat16, "the type must be float16 or bfloat16");
  type == ScalarType::Half ? f(__half{}) : f(__nv_bfloat16{});
}

Tensor forward(const Tensor& input, const Tensor& weight, const Tensor& bias, const Tensor& mean,
               const Tensor& variance, double eps) {
  const DeviceScope scope(input);
  const Layout layout = layout_of(input, weight);
  const Statistics statistics{floats_of(weight, input), floats_of(variance, input), floats_of(bias, input),
                              floats_of(mean, input), static_cast<float>(eps)};
  Tensor output = empty_like(input, ScalarType::Float);
  dispatch_halves(input.scalar_type(),
                  [&](auto tag) { run<decltype(tag), float>(scope, input, statistics, layout, output); });
  return output;
}

Tensor backward(const Tensor& grad_output, const Tensor& weight, const Tensor& variance, double eps, ScalarType type) {
  const DeviceScope scope(grad_output);
  const Layout layout = layout_of(grad_output, weight);
  VISDET_CHECK(kOp, grad_output.scalar_type() == ScalarType::Float, "grad_output must be float32");
  const Statistics statistics{floats_of(weight, grad_output), floats_of(variance, grad_output), nullptr, nullptr,
                              static_cast<float>(eps)};
  Tensor grad_input = empty_like(grad_output, type);
  dispatch_halves(type,
                  [&](auto tag) { run<float, decltype(tag)>(scope, grad_output, statistics, layout, grad_input); });
  return grad_input;
}

}  // namespace
}  // namespace visdet::frozen_batch_norm

VISDET_CUDA_OPERATORS(frozen_batch_norm, m) {
  using namespace visdet::frozen_batch_norm;
  m.impl("frozen_batch_norm", TORCH_BOX(&forward));
  m.impl("frozen_batch_norm_backward", TORCH_BOX(&backward));
}

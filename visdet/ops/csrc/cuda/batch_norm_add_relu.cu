// batch_norm_add_relu on CUDA. The contract is in visdet/ops/fused/batch_norm_add_relu.py.
//
// The input is rows of C values, the channels of a pixel. Each pass has three kernels: blocks add up what their rows
// give for each channel, one kernel adds up the blocks, and the last one computes the result. No sum depends on the
// order in which blocks run.
#include <optional>
#include <tuple>

#include "common/constants.h"
#include "common/launch.h"
#include "common/values.cuh"

namespace visdet::batch_norm_add_relu {
namespace {

constexpr const char* kOp = "batch_norm_add_relu";
constexpr const char* kBackward = "batch_norm_add_relu_backward";
constexpr int kValues = kNormPack;  // the neighbouring channels of a thread
constexpr int kThreads = 256;
constexpr int kMaxLanes = 32;      // threads side by side on a row
constexpr int kRows = 4;           // that a thread loads before it uses them
constexpr int kSumThreads = 1024;  // of a block that adds up blocks
constexpr int kSumChannels = 32;   // of such a block, one for each lane of a warp

struct Rows {
  int64_t count;
  int C, lanes;
};

// A thread's channels, and its rows: the first one and every `step`-th after it.
struct Slice {
  int64_t row, step;
  int group, lane, channel;
  bool is_active;

  __device__ __forceinline__ explicit Slice(const Rows& rows) {
    const int groups = kThreads / rows.lanes;
    group = threadIdx.x / rows.lanes, lane = threadIdx.x % rows.lanes;
    channel = (blockIdx.y * rows.lanes + lane) * kValues;
    row = static_cast<int64_t>(blockIdx.x) * groups + group;
    step = static_cast<int64_t>(gridDim.x) * groups;
    is_active = group < groups && channel < rows.C;
  }
};

// The normalisation of a thread's channels: (x - mean) * scale + offset.
struct Channels {
  float mean[kValues], scale[kValues], offset[kValues];

  // statistics: [2, C], the means and the reciprocal standard deviations.
  __device__ __forceinline__ Channels(const float* statistics, const float* weight, const float* bias, int C, int c) {
    load_pack<float>(statistics + c, mean);
    load_pack<float>(statistics + C + c, scale);
    load_pack<float>(bias + c, offset);
    float factors[kValues];
    load_pack<float>(weight + c, factors);
#pragma unroll
    for (int i = 0; i < kValues; ++i) scale[i] *= factors[i];
  }

  __device__ __forceinline__ float of(float x, int i) const { return fmaf(x - mean[i], scale[i], offset[i]); }
};

// Calls f(i, at) for up to kRows rows of the thread at a time, where `at` is the index of its channels in row i, and
// then g(i, at) for the same rows. The loads of f are under way together.
template <typename F, typename G>
__device__ __forceinline__ void for_rows(const Rows& rows, const Slice& slice, const F& f, const G& g) {
  for (int64_t row = slice.row; row < rows.count; row += kRows * slice.step) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i * slice.step < rows.count) f(i, (row + i * slice.step) * rows.C + slice.channel);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row + i * slice.step < rows.count) g(i, (row + i * slice.step) * rows.C + slice.channel);
    }
  }
}

// Writes the sums of the block's threads over their rows to block_sums [blocks, 2, C].
__device__ __forceinline__ void add_up_block(const Rows& rows, const Slice& slice, const float (&first)[kValues],
                                             const float (&second)[kValues], float* __restrict__ block_sums) {
  __shared__ float shared[2][kThreads * kValues];
  const int width = rows.lanes * kValues, groups = kThreads / rows.lanes;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    shared[0][threadIdx.x * kValues + i] = first[i];
    shared[1][threadIdx.x * kValues + i] = second[i];
  }
  __syncthreads();
  for (int at = threadIdx.x; at < 2 * width; at += kThreads) {
    const int which = at / width, column = at % width, c = blockIdx.y * width + column;
    if (c >= rows.C) continue;
    float sum = 0;
    for (int group = 0; group < groups; ++group) sum += shared[which][group * width + column];
    block_sums[(static_cast<int64_t>(blockIdx.x) * 2 + which) * rows.C + c] = sum;
  }
}

// The sums of the differences from the first row, and of their squares. Differences keep the variance exact where the
// mean is large.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const Rows rows, const T* __restrict__ input, float* __restrict__ block_sums) {
  const Slice slice(rows);
  float sums[kValues] = {}, squares[kValues] = {};
  if (slice.is_active) {
    float pivot[kValues];
    load_pack<T>(input + slice.channel, pivot);
    Pack<T, kValues> packs[kRows];
    for_rows(
        rows, slice, [&](int i, int64_t at) { packs[i] = *reinterpret_cast<const Pack<T, kValues>*>(input + at); },
        [&](int i, int64_t) {
          float x[kValues];
          unpack(packs[i], x);
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            x[v] -= pivot[v];
            sums[v] += x[v];
            squares[v] = fmaf(x[v], x[v], squares[v]);
          }
        });
  }
  add_up_block(rows, slice, sums, squares, block_sums);
}

// The sums of the blocks for a channel, in the first warp. A lane of each warp adds up some of the blocks for it.
__device__ __forceinline__ double2 add_up_blocks(const float* __restrict__ block_sums, int blocks, int C, int c) {
  constexpr int kWarps = kSumThreads / kSumChannels;
  __shared__ double2 shared[kSumThreads];
  double2 sums{0, 0};
  if (c < C) {
#pragma unroll 4
    for (int64_t block = threadIdx.x / kSumChannels; block < blocks; block += kWarps) {
      sums.x += block_sums[block * 2 * C + c], sums.y += block_sums[(block * 2 + 1) * C + c];
    }
  }
  shared[threadIdx.x] = sums;
  __syncthreads();
  if (threadIdx.x < kSumChannels) {
    for (int at = threadIdx.x + kSumChannels; at < kSumThreads; at += kSumChannels) {
      sums.x += shared[at].x, sums.y += shared[at].y;
    }
  }
  return sums;
}

struct RunningStatistics {
  float *mean, *var;  // [C], or nullptr
  int64_t* num_batches_tracked;
  float momentum;
};

// A thread of the first warp owns a channel.
template <typename T>
__global__ void __launch_bounds__(kSumThreads)
    statistics_kernel(const Rows rows, const T* __restrict__ input, const float* __restrict__ block_sums, int blocks,
                      float eps, const RunningStatistics running, float* __restrict__ statistics) {
  const int c = blockIdx.x * kSumChannels + threadIdx.x % kSumChannels;
  const double2 sums = add_up_blocks(block_sums, blocks, rows.C, c);
  if (threadIdx.x >= kSumChannels || c >= rows.C) return;
  const double count = static_cast<double>(rows.count), shift = sums.x / count;
  const double mean = to_accumulate(input[c]) + shift;
  const double difference = sums.y / count - shift * shift;
  const double var = difference < 0 ? 0 : difference;  // NaN stays
  statistics[c] = static_cast<float>(mean);
  statistics[rows.C + c] = static_cast<float>(1 / sqrt(var + eps));
  if (running.mean != nullptr) {
    const float momentum = running.momentum;
    running.mean[c] += momentum * (static_cast<float>(mean) - running.mean[c]);
    running.var[c] += momentum * (static_cast<float>(var * count / (count - 1)) - running.var[c]);
  }
  if (running.num_batches_tracked != nullptr && c == 0) ++*running.num_batches_tracked;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    normalise_kernel(const Rows rows, const T* __restrict__ input, const T* __restrict__ residual,
                     const float* __restrict__ statistics, const float* __restrict__ weight,
                     const float* __restrict__ bias, bool relu, T* __restrict__ output) {
  const Slice slice(rows);
  if (!slice.is_active) return;
  const Channels channels(statistics, weight, bias, rows.C, slice.channel);
  Pack<T, kValues> packs[kRows], residuals[kRows] = {};
  for_rows(
      rows, slice,
      [&](int i, int64_t at) {
        packs[i] = *reinterpret_cast<const Pack<T, kValues>*>(input + at);
        if (residual != nullptr) residuals[i] = *reinterpret_cast<const Pack<T, kValues>*>(residual + at);
      },
      [&](int i, int64_t at) {
        float x[kValues], other[kValues];
        unpack(packs[i], x);
        unpack(residuals[i], other);
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          x[v] = channels.of(x[v], v);
          if (residual != nullptr) x[v] += other[v];
          if (relu && x[v] <= 0) x[v] = 0;  // NaN stays
        }
        store_pack(output + at, x);
      });
}

// What the backward pass reads. The ReLU's mask is in `output`, or follows from the input if it is nullptr.
template <typename T>
struct Gradients {
  const T *grad_output, *input, *output;
  bool relu;
};

// The sums of the gradient behind the ReLU, and of its products with the differences from the mean. This gradient,
// which is also the residual's, is written to grad_residual unless this is nullptr.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_sums_kernel(const Rows rows, const Gradients<T> from, const float* __restrict__ statistics,
                         const float* __restrict__ weight, const float* __restrict__ bias,
                         T* __restrict__ grad_residual, float* __restrict__ block_sums) {
  const Slice slice(rows);
  float sums[kValues] = {}, products[kValues] = {};
  if (slice.is_active) {
    const Channels channels(statistics, weight, bias, rows.C, slice.channel);
    Pack<T, kValues> grads[kRows], inputs[kRows], outputs[kRows] = {};
    for_rows(
        rows, slice,
        [&](int i, int64_t at) {
          grads[i] = *reinterpret_cast<const Pack<T, kValues>*>(from.grad_output + at);
          inputs[i] = *reinterpret_cast<const Pack<T, kValues>*>(from.input + at);
          if (from.output != nullptr) outputs[i] = *reinterpret_cast<const Pack<T, kValues>*>(from.output + at);
        },
        [&](int i, int64_t at) {
          float grad[kValues], x[kValues], y[kValues];
          unpack(grads[i], grad);
          unpack(inputs[i], x);
          unpack(outputs[i], y);
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            const float value = from.output != nullptr ? y[v] : channels.of(x[v], v);
            if (from.relu && value <= 0) grad[v] = 0;
            sums[v] += grad[v];
            products[v] = fmaf(grad[v], x[v] - channels.mean[v], products[v]);
          }
          if (grad_residual != nullptr) store_pack(grad_residual + at, grad);
        });
  }
  add_up_block(rows, slice, sums, products, block_sums);
}

// Writes the gradients of weight and bias, [2, C].
__global__ void __launch_bounds__(kSumThreads)
    backward_statistics_kernel(int C, const float* __restrict__ block_sums, int blocks,
                               const float* __restrict__ statistics, float* __restrict__ sums) {
  const int c = blockIdx.x * kSumChannels + threadIdx.x % kSumChannels;
  const double2 both = add_up_blocks(block_sums, blocks, C, c);
  if (threadIdx.x >= kSumChannels || c >= C) return;
  sums[c] = static_cast<float>(both.y * statistics[C + c]);
  sums[C + c] = static_cast<float>(both.x);
}

// from.grad_output is the gradient behind the ReLU if from.relu is not set.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Rows rows, const Gradients<T> from, const float* __restrict__ statistics,
                    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ sums,
                    T* __restrict__ grad_input) {
  const Slice slice(rows);
  if (!slice.is_active) return;
  const int c = slice.channel;
  const Channels channels(statistics, weight, bias, rows.C, c);
  float mean_grad[kValues], mean_product[kValues], reciprocal[kValues];
  load_pack<float>(sums + c, mean_product);
  load_pack<float>(sums + rows.C + c, mean_grad);
  load_pack<float>(statistics + rows.C + c, reciprocal);
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    mean_grad[v] /= rows.count;
    mean_product[v] *= reciprocal[v] / rows.count;
  }
  Pack<T, kValues> grads[kRows], inputs[kRows];
  for_rows(
      rows, slice,
      [&](int i, int64_t at) {
        grads[i] = *reinterpret_cast<const Pack<T, kValues>*>(from.grad_output + at);
        inputs[i] = *reinterpret_cast<const Pack<T, kValues>*>(from.input + at);
      },
      [&](int i, int64_t at) {
        float grad[kValues], x[kValues];
        unpack(grads[i], grad);
        unpack(inputs[i], x);
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          if (from.relu && channels.of(x[v], v) <= 0) grad[v] = 0;
          grad[v] = channels.scale[v] * (grad[v] - mean_grad[v] - (x[v] - channels.mean[v]) * mean_product[v]);
        }
        store_pack(grad_input + at, grad);
      });
}

void check_packed(const Tensor& tensor, const Tensor& input) {
  VISDET_CHECK(kOp,
               tensor.is_contiguous() && aligned(tensor, kVectorBytes) && on_device_of(input, tensor) &&
                   tensor.numel() == input.numel() && tensor.scalar_type() == input.scalar_type(),
               "tensors must be contiguous, aligned to 16 bytes, on one device, and of one type and size");
}

void check_channels(const Tensor& tensor, const Tensor& input, int64_t count) {
  VISDET_CHECK(
      kOp,
      tensor.is_contiguous() && aligned(tensor, kVectorBytes) && on_device_of(input, tensor) &&
          tensor.numel() == count && tensor.scalar_type() == ScalarType::Float,
      "weight, bias and statistics must be contiguous float32, aligned to 16 bytes, with the channels of input");
}

// The rows of a call; the Python function has seen to types and sizes.
Rows rows_of(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const int64_t C = weight.numel();
  VISDET_CHECK(kOp, C > 0 && C % kValues == 0 && input.dim() > 0 && input.size(-1) == C && input.numel() > C,
               "input must have more than one row of the channels of weight, a multiple of 8, got ", shape_text(input),
               " for ", shape_text(weight));
  check_packed(input, input);
  check_channels(weight, input, C);
  check_channels(bias, input, C);
  return {input.numel() / C, static_cast<int>(C), static_cast<int>(std::min<int64_t>(C / kValues, kMaxLanes))};
}

// As many blocks as keep the GPU busy, but none whose threads have less than kRows rows.
Grid grid_of(const Rows& rows, const DeviceScope& scope) {
  const int64_t columns = ceil_div(rows.C, rows.lanes * kValues);
  const int64_t all = ceil_div(rows.count, kRows * (kThreads / rows.lanes));
  const int64_t bound = ceil_div(4 * scope.device().multiprocessors, columns);
  return {std::min(all, bound), columns};
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, const std::optional<Tensor>& residual, const Tensor& weight,
                                   const Tensor& bias, const std::optional<Tensor>& running_mean,
                                   const std::optional<Tensor>& running_var,
                                   const std::optional<Tensor>& num_batches_tracked, double momentum, double eps,
                                   bool relu) {
  const Rows rows = rows_of(input, weight, bias);
  if (residual) check_packed(*residual, input);
  RunningStatistics running{nullptr, nullptr, nullptr, static_cast<float>(momentum)};
  if (running_mean && running_var) {
    check_channels(*running_mean, input, rows.C);
    check_channels(*running_var, input, rows.C);
    running.mean = mutable_data_of<float>(*running_mean), running.var = mutable_data_of<float>(*running_var);
  }
  if (num_batches_tracked) {
    check_int64(kOp, "num_batches_tracked", *num_batches_tracked);
    check_device(kOp, "num_batches_tracked", *num_batches_tracked, "input", input);
    running.num_batches_tracked = mutable_data_of<int64_t>(*num_batches_tracked);
  }
  const DeviceScope scope(input);
  const Grid grid = grid_of(rows, scope);
  Tensor output = new_like(input);
  Tensor statistics = new_empty(input, {2, rows.C}, ScalarType::Float);
  Tensor block_sums = new_empty(input, {grid.x, 2, rows.C}, ScalarType::Float);
  dispatch_all_but_double(kOp, input.scalar_type(), [&]<typename T>(T) {
    launch({kOp, "sums_kernel", scope, grid, kThreads}, sums_kernel<T>, rows, data_of<T>(input),
           mutable_data_of<float>(block_sums));
    launch({kOp, "statistics_kernel", scope, ceil_div(rows.C, kSumChannels), kSumThreads}, statistics_kernel<T>, rows,
           data_of<T>(input), data_of<float>(block_sums), static_cast<int>(grid.x), static_cast<float>(eps), running,
           mutable_data_of<float>(statistics));
    launch({kOp, "normalise_kernel", scope, grid, kThreads}, normalise_kernel<T>, rows, data_of<T>(input),
           residual ? data_of<T>(*residual) : nullptr, data_of<float>(statistics), data_of<float>(weight),
           data_of<float>(bias), relu, mutable_data_of<T>(output));
  });
  return {output, statistics};
}

// output: what the forward pass returned, if there was a residual and a ReLU behind it. Its gradient is then
// grad_residual, which is grad_output otherwise.
std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                            const std::optional<Tensor>& output, const Tensor& weight,
                                            const Tensor& bias, const Tensor& statistics, bool relu) {
  const Rows rows = rows_of(input, weight, bias);
  check_packed(grad_output, input);
  if (output) check_packed(*output, input);
  check_channels(statistics, input, 2 * rows.C);
  const DeviceScope scope(input);
  const Grid grid = grid_of(rows, scope);
  Tensor grad_input = new_like(input);
  Tensor grad_residual = output ? new_like(input) : grad_input;
  Tensor sums = new_empty(input, {2, rows.C}, ScalarType::Float);
  Tensor block_sums = new_empty(input, {grid.x, 2, rows.C}, ScalarType::Float);
  dispatch_all_but_double(kOp, input.scalar_type(), [&]<typename T>(T) {
    Gradients<T> from{data_of<T>(grad_output), data_of<T>(input), output ? data_of<T>(*output) : nullptr, relu};
    launch({kBackward, "backward_sums_kernel", scope, grid, kThreads}, backward_sums_kernel<T>, rows, from,
           data_of<float>(statistics), data_of<float>(weight), data_of<float>(bias),
           output ? mutable_data_of<T>(grad_residual) : nullptr, mutable_data_of<float>(block_sums));
    launch({kBackward, "backward_statistics_kernel", scope, ceil_div(rows.C, kSumChannels), kSumThreads},
           backward_statistics_kernel, rows.C, data_of<float>(block_sums), static_cast<int>(grid.x),
           data_of<float>(statistics), mutable_data_of<float>(sums));
    if (output) from = {data_of<T>(grad_residual), data_of<T>(input), nullptr, false};
    launch({kBackward, "backward_kernel", scope, grid, kThreads}, backward_kernel<T>, rows, from,
           data_of<float>(statistics), data_of<float>(weight), data_of<float>(bias), data_of<float>(sums),
           mutable_data_of<T>(grad_input));
  });
  return {grad_input, grad_residual, sums};
}

}  // namespace
}  // namespace visdet::batch_norm_add_relu

VISDET_CUDA_OPERATORS(batch_norm_add_relu, m) {
  using namespace visdet::batch_norm_add_relu;
  m.impl("batch_norm_add_relu", TORCH_BOX(&forward));
  m.impl("batch_norm_add_relu_backward", TORCH_BOX(&backward));
}

// dropout_add_layer_norm on CUDA. The contract is in visdet/ops/fused/dropout_add_layer_norm.py.
//
// A group of lanes, as many as a power of two, owns a row of C values. A lane holds PACKS packs of eight neighbouring
// values, each `lanes` packs behind the one before it, so that a row is read once and stays in registers.
#include <optional>
#include <tuple>

#include "common/constants.h"
#include "common/launch.h"
#include "common/values.cuh"
#include "common/warp.cuh"
#include "cuda/dropout.cuh"

namespace visdet::dropout_add_layer_norm {
namespace {

constexpr int kValues = kNormPack;
constexpr int kThreads = 256;
constexpr int kBackwardBlocks = 3;  // on a multiprocessor: more would not have the registers, fewer read too little

struct Rows {
  int64_t count;
  int C, lanes;
  const void *input, *residual;  // [count, C]; residual may be nullptr
  const float* weight;           // [C]
  bool relu;                     // whether the input goes through ReLU before it is dropped
  Dropout dropout;
};

// What a kernel writes beside its output, in the type of the input; each may be nullptr.
template <typename T>
struct Copies {
  T* copy;             // of the output
  T* sum;              // of the output and `added`
  const float* added;  // [added_count, C], where the rows of the output are several times as many
  int64_t added_count;
};

// Where a lane stands: its group's first row, the distance to the group's next row, and the lane within the group.
struct Position {
  int64_t row, step;
  int lane;

  __device__ __forceinline__ explicit Position(int lanes) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    row = thread / lanes, step = static_cast<int64_t>(gridDim.x) * kThreads / lanes;
    lane = threadIdx.x % lanes;
  }
};

// The lane's part of residual + dropout(input), and the factors of dropout and ReLU. Values behind the row are zero.
template <typename T, typename R, int PACKS>
__device__ __forceinline__ void load_sum(const Rows& rows, int64_t row, int lane, float (&sum)[PACKS][kValues],
                                         float (&factors)[PACKS][kValues]) {
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int c = (p * rows.lanes + lane) * kValues;
    const int64_t at = row * rows.C + c;
    float residual[kValues] = {};
    if (c < rows.C) {
      load_pack<T>(static_cast<const T*>(rows.input) + at, sum[p]);
      if (rows.residual != nullptr) load_pack<R>(static_cast<const R*>(rows.residual) + at, residual);
      rows.dropout.factors(at, factors[p]);
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (rows.relu && sum[p][i] <= 0) factors[p][i] = 0;
      // A dropped value counts as zero even if it is infinite or NaN.
      sum[p][i] = c < rows.C && factors[p][i] != 0 ? sum[p][i] * factors[p][i] : 0.f;
      sum[p][i] += residual[i];
    }
  }
}

template <typename T, typename R, int PACKS>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Rows rows, const float* __restrict__ bias, float eps, float* __restrict__ output,
                   const Copies<T> copies, float2* __restrict__ statistics) {
  const Position position(rows.lanes);
  if (position.row / (32 / rows.lanes) * (32 / rows.lanes) >= rows.count) return;  // no row for the whole warp
  const int64_t row = min(position.row, rows.count - 1);
  float x[PACKS][kValues], factors[PACKS][kValues];
  load_sum<T, R>(rows, row, position.lane, x, factors);
  float sum = 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum += x[p][i];
  }
  const float mean = sum_lanes(sum, 1, rows.lanes) / rows.C;
  float squares = 0;
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const bool is_inside = (p * rows.lanes + position.lane) * kValues < rows.C;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[p][i] -= mean;
      squares += is_inside ? x[p][i] * x[p][i] : 0.f;
    }
  }
  const float scale = rsqrtf(sum_lanes(squares, 1, rows.lanes) / rows.C + eps);
  if (position.row >= rows.count) return;
  if (position.lane == 0) statistics[row] = {mean, scale};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int c = (p * rows.lanes + position.lane) * kValues;
    if (c >= rows.C) continue;
    float weight[kValues], offset[kValues];
    load_pack<float>(rows.weight + c, weight);
    load_pack<float>(bias + c, offset);
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[p][i] = x[p][i] * scale * weight[i] + offset[i];
    store_pack(output + row * rows.C + c, x[p]);
    if (copies.copy != nullptr) store_pack(copies.copy + row * rows.C + c, x[p]);
    if (copies.sum == nullptr) continue;
    float added[kValues];
    load_pack<float>(copies.added + row % copies.added_count * rows.C + c, added);
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[p][i] += added[i];
    store_pack(copies.sum + row * rows.C + c, x[p]);
  }
}

// Groups take rows in turns. Each block then adds up what its rows give for weight and bias, [blocks, 2, C].
template <typename T, typename R, int PACKS>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    backward_kernel(const Rows rows, const float* __restrict__ grad_output, const T* __restrict__ grad_copy,
                    const T* __restrict__ grad_sum, const float2* __restrict__ statistics, T* __restrict__ grad_input,
                    R* __restrict__ grad_residual, float* __restrict__ block_sums) {
  __shared__ float shared[kThreads / 32][32 * kValues];
  const Position position(rows.lanes);
  float of_weight[PACKS][kValues] = {}, of_bias[PACKS][kValues] = {}, weight[PACKS][kValues] = {};
#pragma unroll
  for (int p = 0; p < PACKS; ++p) {
    const int c = (p * rows.lanes + position.lane) * kValues;
    if (c < rows.C) load_pack<float>(rows.weight + c, weight[p]);
  }
  // All lanes of a warp go round equally often. A row beyond the last one gives nothing.
  const int64_t first = position.row - position.row % (32 / rows.lanes);
  for (int64_t base = 0; first + base < rows.count; base += position.step) {
    const bool is_row = position.row + base < rows.count;
    const int64_t row = is_row ? position.row + base : rows.count - 1;
    float x[PACKS][kValues], factors[PACKS][kValues], grad[PACKS][kValues] = {};
    load_sum<T, R>(rows, row, position.lane, x, factors);
    const float2 stats = statistics[row];
    float sums[2] = {};  // of the gradient of the normalised values, and of its products with them
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int c = (p * rows.lanes + position.lane) * kValues;
      float of_copy[kValues] = {}, of_sum[kValues] = {};
      if (c < rows.C && is_row) {
        load_pack<float>(grad_output + row * rows.C + c, grad[p]);
        if (grad_copy != nullptr) load_pack<T>(grad_copy + row * rows.C + c, of_copy);
        if (grad_sum != nullptr) load_pack<T>(grad_sum + row * rows.C + c, of_sum);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        grad[p][i] += of_copy[i] + of_sum[i];
        x[p][i] = (x[p][i] - stats.x) * stats.y;
        of_weight[p][i] += is_row && c < rows.C ? grad[p][i] * x[p][i] : 0.f;
        of_bias[p][i] += grad[p][i];
        grad[p][i] *= weight[p][i];
        sums[0] += grad[p][i];
        sums[1] += c < rows.C ? grad[p][i] * x[p][i] : 0.f;
      }
    }
    sum_lanes(sums, 1, rows.lanes);
    if (!is_row) continue;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      const int c = (p * rows.lanes + position.lane) * kValues;
      if (c >= rows.C) continue;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        grad[p][i] = stats.y * (grad[p][i] - (sums[0] + x[p][i] * sums[1]) / rows.C);
        factors[p][i] = factors[p][i] != 0 ? grad[p][i] * factors[p][i] : 0.f;
      }
      store_pack(grad_input + row * rows.C + c, factors[p]);
      if (grad_residual != nullptr) store_pack(grad_residual + row * rows.C + c, grad[p]);
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
      float (&values)[kValues] = which == 0 ? of_weight[p] : of_bias[p];
      sum_lanes(values, rows.lanes, 32);  // the groups of a warp
      __syncthreads();                    // the sums before have been read
#pragma unroll
      for (int i = 0; i < kValues; ++i) shared[warp][lane * kValues + i] = values[i];
      __syncthreads();  // the sums of the warps are complete
      const int channels = min(rows.lanes * kValues, rows.C - p * rows.lanes * kValues);
      for (int c = threadIdx.x; c < channels; c += kThreads) {
        float total = 0;
        for (int w = 0; w < kThreads / 32; ++w) total += shared[w][c];
        block_sums[(static_cast<int64_t>(blockIdx.x) * 2 + which) * rows.C + p * rows.lanes * kValues + c] = total;
      }
    }
  }
}

constexpr const char* kOp = "dropout_add_layer_norm";

// Calls f(T{}, R{}, PACKS) for the types of input and residual, of which the second is the first or float32.
template <typename F>
void dispatch(const Tensor& input, const std::optional<Tensor>& residual, int packs, const F& f) {
  dispatch_all_but_double(kOp, input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const auto with = [&](auto residual_tag) {
      if (packs == 1) return f(tag, residual_tag, std::integral_constant<int, 1>{});
      return f(tag, residual_tag, std::integral_constant<int, 2>{});
    };
    residual && residual->scalar_type() == ScalarType::Float ? with(float{}) : with(T{});
  });
}

const int64_t* seed_of(const std::optional<Tensor>& seed) { return seed ? data_of<int64_t>(*seed) : nullptr; }

// The rows of a call whose tensors are contiguous; the Python function has seen to types and sizes.
Rows rows_of(const Tensor& input, const std::optional<Tensor>& residual, const Tensor& weight,
             const std::optional<Tensor>& seed, double p, bool relu) {
  const int64_t C = weight.numel();
  VISDET_CHECK(kOp, C > 0 && C % kValues == 0 && C <= kMaxNormChannels && input.dim() > 0 && input.size(-1) == C,
               "weight must have the channels of input, a multiple of 8 and at most ", kMaxNormChannels, ", got ",
               shape_text(weight), " for ", shape_text(input));
  for (const Tensor* tensor : {&input, residual ? &*residual : nullptr, &weight}) {
    if (tensor == nullptr) continue;
    VISDET_CHECK(kOp, tensor->is_contiguous() && aligned(*tensor, kVectorBytes) && on_device_of(input, *tensor),
                 "tensors must be contiguous, aligned to 16 bytes, and on one device");
  }
  VISDET_CHECK(kOp, !residual || residual->numel() == input.numel(), "residual must have the shape of input");
  VISDET_CHECK(kOp, weight.scalar_type() == ScalarType::Float, "weight must be float32, got ", dtype_text(weight));
  int lanes = 1;
  while (lanes < 32 && lanes * kValues < C) lanes *= 2;
  return {input.numel() / C,
          static_cast<int>(C),
          lanes,
          input.const_data_ptr(),
          residual ? residual->const_data_ptr() : nullptr,
          data_of<float>(weight),
          relu,
          Dropout::of(seed_of(seed), p)};
}

int packs_of(const Rows& rows) { return static_cast<int>(ceil_div(rows.C, rows.lanes * kValues)); }

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& input, const std::optional<Tensor>& residual,
                                                   const Tensor& weight, const Tensor& bias,
                                                   const std::optional<Tensor>& seed, double p, bool relu, double eps,
                                                   bool copies, const std::optional<Tensor>& added) {
  const Rows rows = rows_of(input, residual, weight, seed, p, relu);
  const int64_t added_count = added ? added->numel() / rows.C : 0;
  VISDET_CHECK(kOp,
               !added || (added->is_contiguous() && added->scalar_type() == ScalarType::Float &&
                          aligned(*added, kVectorBytes) && on_device_of(input, *added) && added_count > 0 &&
                          added->size(-1) == rows.C && rows.count % added_count == 0),
               "added must be contiguous float32 of rows that fit those of input several times");
  const DeviceScope scope(input);
  Tensor output = new_empty(input, input.sizes(), ScalarType::Float);
  Tensor copy = copies ? new_like(input) : new_empty(input, {0});
  Tensor sum = added ? new_like(input) : new_empty(input, {0});
  Tensor statistics = new_empty(input, {rows.count, 2}, ScalarType::Float);
  dispatch(input, residual, packs_of(rows), [&]<typename T, typename R>(T, R, auto packs) {
    launch({kOp, "forward_kernel", scope, ceil_div(rows.count * rows.lanes, kThreads), kThreads},
           forward_kernel<T, R, packs()>, rows, data_of<float>(bias), static_cast<float>(eps),
           mutable_data_of<float>(output),
           Copies<T>{copies ? mutable_data_of<T>(copy) : nullptr, added ? mutable_data_of<T>(sum) : nullptr,
                     added ? data_of<float>(*added) : nullptr, added_count},
           mutable_data_of<float2>(statistics));
  });
  return {output, copy, sum, statistics};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const std::optional<Tensor>& grad_copy,
                                            const std::optional<Tensor>& grad_sum, const Tensor& input,
                                            const std::optional<Tensor>& residual, const Tensor& weight,
                                            const Tensor& statistics, const std::optional<Tensor>& seed, double p,
                                            bool relu) {
  const Rows rows = rows_of(input, residual, weight, seed, p, relu);
  VISDET_CHECK(kOp,
               grad_output.is_contiguous() && grad_output.numel() == input.numel() &&
                   grad_output.scalar_type() == ScalarType::Float && aligned(grad_output, kVectorBytes),
               "the gradient must be contiguous float32 of the shape of input");
  for (const std::optional<Tensor>& grad : {grad_copy, grad_sum}) {
    VISDET_CHECK(kOp,
                 !grad || (grad->is_contiguous() && grad->numel() == input.numel() &&
                           grad->scalar_type() == input.scalar_type() && aligned(*grad, kVectorBytes)),
                 "the gradient of a copy must be contiguous and of the type and shape of input");
  }
  const DeviceScope scope(input);
  Tensor grad_input = new_like(input);
  // Without dropout and ReLU, both gradients are the same numbers.
  const bool is_one = residual && !seed && !relu && residual->scalar_type() == input.scalar_type();
  Tensor grad_residual = !residual || is_one ? grad_input : new_like(*residual);
  const int64_t blocks = bounded_blocks(scope, rows.count * rows.lanes, kThreads, kBackwardBlocks);
  Tensor block_sums = new_empty(input, {blocks, 2, rows.C}, ScalarType::Float);
  dispatch(input, residual, packs_of(rows), [&]<typename T, typename R>(T, R, auto packs) {
    launch({"dropout_add_layer_norm_backward", "backward_kernel", scope, blocks, kThreads},
           backward_kernel<T, R, packs()>, rows, data_of<float>(grad_output),
           grad_copy ? data_of<T>(*grad_copy) : nullptr, grad_sum ? data_of<T>(*grad_sum) : nullptr,
           data_of<float2>(statistics), mutable_data_of<T>(grad_input),
           residual && !is_one ? mutable_data_of<R>(grad_residual) : nullptr, mutable_data_of<float>(block_sums));
  });
  return {grad_input, grad_residual, block_sums};
}

}  // namespace
}  // namespace visdet::dropout_add_layer_norm

VISDET_CUDA_OPERATORS(dropout_add_layer_norm, m) {
  using namespace visdet::dropout_add_layer_norm;
  m.impl("dropout_add_layer_norm", TORCH_BOX(&forward));
  m.impl("dropout_add_layer_norm_backward", TORCH_BOX(&backward));
}

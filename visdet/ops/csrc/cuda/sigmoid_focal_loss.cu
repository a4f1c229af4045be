// sigmoid_focal_loss on CUDA. The contract is in ../sigmoid_focal_loss.h.
#include "common/launch.h"
#include "common/values.cuh"
#include "sigmoid_focal_loss.h"

namespace visdet::sigmoid_focal_loss {
namespace {

constexpr int kThreads = 256;

template <typename A>
struct FocalSettings {
  int64_t packs;  // N * C / VEC
  int64_t C;
  A gamma, alpha;
  bool grad_is_one_number;
};

// __expf is off by 2 + 1.16 |x| units in the last place: losses as small as exp(-87) stay within 2e-5 of themselves.
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

template <typename A, bool GRAD>
__device__ __forceinline__ A focal(A a, A gamma) {
  const A e = exp_of(-fabs(a)), near = 1 / (1 + e), far = e * near;
  const A p = a > 0 ? near : far, q = a > 0 ? far : near;
  const A s = fmax(a, A(0)) + log1p(e), factor = gamma == A(2) ? p * p : pow(p, gamma);
  const A value = GRAD ? factor * (gamma * q * s + p) : factor * s;
  return a == a ? value : a;
}

// A thread takes a pack of VEC elements of one row, then the pack that lies a whole grid further on. Only a row's
// target and its weight are read more than once.
template <typename T, typename A, int VEC, bool GRAD>
__global__ void __launch_bounds__(kThreads)
    focal_kernel(const T* __restrict__ input, const int64_t* __restrict__ target, const A* __restrict__ weight,
                 const T* __restrict__ grad_output, T* __restrict__ output, const FocalSettings<A> settings) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pack < settings.packs;
       pack += stride) {
    const int64_t first = pack * VEC, n = first / settings.C, column = first - n * settings.C, label = target[n];
    const A factor = weight != nullptr && label >= 0 && label < settings.C ? weight[label] : A(1);
    A x[VEC], grad[VEC];
    load_pack<T, VEC>(input + first, x);
    if constexpr (GRAD) {
      if (settings.grad_is_one_number) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) grad[v] = to_accumulate(*grad_output);
      } else {
        load_pack<T, VEC>(grad_output + first, grad);
      }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      const bool is_target = column + v == label;
      const A loss = focal<A, GRAD>(is_target ? -x[v] : x[v], settings.gamma);
      x[v] = factor * (is_target ? settings.alpha : 1 - settings.alpha) * loss;
      if constexpr (GRAD) x[v] *= is_target ? -grad[v] : grad[v];
    }
    store_pack<T, VEC>(output + first, x);
  }
}

template <bool GRAD>
Tensor run_focal(const char* op, const FocalProblem& problem, const Tensor* grad_output_in, const Tensor& input_in,
                 const Tensor& target_in, const Tensor& weight_in, double gamma, double alpha) {
  const DeviceScope scope(input_in);
  const Tensor input = dense(input_in), target = dense(target_in), weight = dense(weight_in);
  Tensor output = new_empty(input, {problem.N, problem.C});
  if (output.numel() == 0) return output;
  const bool one_number = GRAD && is_one_number(*grad_output_in);
  const Tensor grad_output = GRAD && !one_number ? dense(*grad_output_in) : GRAD ? *grad_output_in : input;
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    constexpr int kPack = sizeof(T) == 8 ? 1 : kVectorValues<T>;
    const bool packed = problem.C % kPack == 0 && aligned(input, kVectorBytes) && aligned(output, kVectorBytes) &&
                        (one_number || aligned(grad_output, kVectorBytes));
    const FocalSettings<A> settings{problem.N * problem.C / (packed ? kPack : 1), problem.C, static_cast<A>(gamma),
                                    static_cast<A>(alpha), one_number};
    const int64_t blocks = bounded_blocks(scope, settings.packs, kThreads, 32);
    launch({op, "focal_kernel", scope, blocks, kThreads},
           packed ? focal_kernel<T, A, kPack, GRAD> : focal_kernel<T, A, 1, GRAD>, data_of<T>(input),
           data_of<int64_t>(target), weight.numel() ? data_of<A>(weight) : nullptr, data_of<T>(grad_output),
           mutable_data_of<T>(output), settings);
  });
  return output;
}

Tensor forward(const Tensor& input, const Tensor& target, const Tensor& weight, double gamma, double alpha) {
  constexpr const char* op = "sigmoid_focal_loss";
  const auto problem = check_sigmoid_focal_loss(op, input, target, weight);
  return run_focal<false>(op, problem, nullptr, input, target, weight, gamma, alpha);
}

Tensor backward(const Tensor& grad_output, const Tensor& input, const Tensor& target, const Tensor& weight,
                double gamma, double alpha) {
  constexpr const char* op = "sigmoid_focal_loss_backward";
  const auto problem = check_sigmoid_focal_loss(op, input, target, weight);
  check_like(op, "grad_output", grad_output, {problem.N, problem.C}, "input", input);
  return run_focal<true>(op, problem, &grad_output, input, target, weight, gamma, alpha);
}

}  // namespace
}  // namespace visdet::sigmoid_focal_loss

VISDET_CUDA_OPERATORS(sigmoid_focal_loss, m) {
  m.impl("sigmoid_focal_loss", TORCH_BOX(&visdet::sigmoid_focal_loss::forward));
  m.impl("sigmoid_focal_loss_backward", TORCH_BOX(&visdet::sigmoid_focal_loss::backward));
}

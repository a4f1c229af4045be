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

}  // namespace
}  // namespace visdet::sigmoid_focal_loss

namespace visdet {

template <bool GRAD, typename T, typename A>
void compute_focal(const OnDevice& device, const FocalArrays<T, A>& a) {
  using namespace sigmoid_focal_loss;
  constexpr int kPack = sizeof(T) == 8 ? 1 : kVectorValues<T>;
  const bool one_number = a.grad_step == 0;
  const bool packed = a.C % kPack == 0 && aligned(a.input, kVectorBytes) && aligned(a.output, kVectorBytes) &&
                      (one_number || aligned(a.grad_output, kVectorBytes));
  const FocalSettings<A> settings{a.N * a.C / (packed ? kPack : 1), a.C, a.gamma, a.alpha, one_number};
  launch(
      {device.op, "focal_kernel", device.scope, bounded_blocks(device.scope, settings.packs, kThreads, 32), kThreads},
      packed ? focal_kernel<T, A, kPack, GRAD> : focal_kernel<T, A, 1, GRAD>, a.input, a.target, a.weight,
      a.grad_output, a.output, settings);
}

}  // namespace visdet

// Operators whose results are computed one by one, each by itself, written once for CPU and CUDA:
//
//   template <typename A>
//   struct Half {  // numbers and pointers
//     const A* values;
//     A* halves;
//     VISDET_HOST_DEVICE void operator()(int64_t i) const { halves[i] = values[i] / 2; }
//   };
//
//   inline Tensor half(const Tensor& values_in) {
//     const Tensor halves = check_half(values_in);
//     const OnDevice device("half", values_in);
//     const Tensor values = dense(values_in);
//     dispatch_sum_type(values.scalar_type(), [&]<typename A>(A) {
//       device.each(halves.numel(), 1, Half<A>{data_of(values), data_of(halves)});
//     });
//     return halves;
//   }
//
//   VISDET_OPERATORS(half, m) { m.impl("half", TORCH_BOX(&half)); }
//
// All of it stands in <op>.h. VISDET_OPERATORS registers the functions for tensors of the CPU where <op>.cpp includes
// the header, and for those of CUDA where cuda/<op>.cu does; OnDevice is the kind of device. No two results share
// memory, so that the number of threads changes nothing.
//
// Other operators check their arguments and make their tensors in such functions, too (roi_pool.h). What they compute
// is then a function that the header declares, and that <op>.cpp and cuda/<op>.cu define.
#pragma once

#include "common/box_overlap.h"  // VISDET_HOST_DEVICE
#include "common/checks.h"
#if defined(__CUDACC__)
#include "common/launch.h"
#include "common/values.cuh"
#else
#include "cpu/dispatch.h"
#endif

namespace visdet {

#if defined(__CUDACC__)

// A thread owns a result.
template <typename F>
__global__ void __launch_bounds__(128) each_kernel(int64_t count, const F compute) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (i < count) compute(i);
}

struct OnDevice {
  const char* op;
  DeviceScope scope;

  OnDevice(const char* op, const Tensor& tensor) : op(op), scope(tensor) {}

  template <typename F>
  void each(int64_t count, int64_t, const F& compute) const {
    launch({op, "each_kernel", scope, ceil_div(count, 128), 128}, each_kernel<F>, count, compute);
  }
};
#define VISDET_OPERATORS VISDET_CUDA_OPERATORS

#else

struct OnDevice {
  const char* op;

  OnDevice(const char* op, const Tensor&) : op(op) {}

  // Calls compute(i) for every i below `count`. cost: of one call, in additions or so.
  template <typename F>
  void each(int64_t count, int64_t cost, const F& compute) const {
    constexpr int64_t kCostOfThread = 1 << 16;  // less does not repay a thread
    parallel_each(count, std::max<int64_t>(kCostOfThread / cost, 1), compute);
  }
};
#define VISDET_OPERATORS(op, m) STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m)

#endif

}  // namespace visdet

// Operators whose results are computed one by one, each by itself, written once for CPU and CUDA:
//
//   template <typename A>
//   struct Half {  // numbers and pointers
//     const A* values;
//     A* halves;
//     VISDET_HOST_DEVICE void operator()(int64_t i) const { halves[i] = values[i] / 2; }
//   };
//
//   template <typename Device>
//   Tensor half(const Tensor& values_in) {
//     const Tensor halves = check_half(values_in);
//     const Device device("half", values_in);
//     const Tensor values = dense(values_in);
//     dispatch_sum_type(values.scalar_type(), [&]<typename A>(A) {
//       device.each(halves.numel(), 1, Half<A>{data_of(values), data_of(halves)});
//     });
//     return halves;
//   }
//
// Both stand in <op>.h. <op>.cpp registers half<OnCpu>, and cuda/<op>.cu half<OnGpu>. No two results share memory, so
// that the number of threads changes nothing.
//
// Other operators check their arguments and make their tensors in such functions, too (roi_pool.h). What they compute
// is then a function with an overload for OnCpu in <op>.cpp and one for OnGpu in cuda/<op>.cu, which the compiler finds
// in the namespace of its arguments.
#pragma once

#include "common/box_overlap.h"  // VISDET_HOST_DEVICE
#include "common/checks.h"
#if defined(__CUDACC__)
#include "common/launch.h"
#else
#include <algorithm>
#endif

namespace visdet {

#if defined(__CUDACC__)

// A thread owns a result.
template <typename F>
__global__ void __launch_bounds__(128) each_kernel(int64_t count, const F compute) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  if (i < count) compute(i);
}

struct OnGpu {
  const char* op;
  DeviceScope scope;

  OnGpu(const char* op, const Tensor& tensor) : op(op), scope(tensor) {}

  template <typename F>
  void each(int64_t count, int64_t, const F& compute) const {
    launch({op, "each_kernel", scope, ceil_div(count, 128), 128}, each_kernel<F>, count, compute);
  }
};

#else

struct OnCpu {
  const char* op;

  OnCpu(const char* op, const Tensor&) : op(op) {}

  // Calls compute(i) for every i below `count`. cost: of one call, in additions or so.
  template <typename F>
  void each(int64_t count, int64_t cost, const F& compute) const {
    constexpr int64_t kCostOfThread = 1 << 16;  // less does not repay a thread
    torch::stable::parallel_for(0, count, std::max<int64_t>(kCostOfThread / cost, 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) compute(i);
    });
  }
};

#endif

}  // namespace visdet

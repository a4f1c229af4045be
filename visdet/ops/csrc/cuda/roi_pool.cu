// roi_pool on CUDA. The contract is in ../roi_pool.h.
#include "common/launch.h"
#include "common/values.cuh"
#include "roi_pool.h"

namespace visdet::roi_pool {
namespace {

constexpr int kThreads = 256;

// A thread computes an element of the output. Pixels that lie in two neighbouring bins are read twice.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const T* __restrict__ input, const A* __restrict__ rois, T* __restrict__ output,
                int32_t* __restrict__ argmax, const RoIPoolProblem size, const A scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size.N * size.C * size.PH * size.PW) return;
  const int q = static_cast<int>(i % size.PW), p = static_cast<int>(i / size.PW % size.PH);
  const int64_t map = i / (size.PW * size.PH), c = map % size.C, n = map / size.C;
  const A* roi = rois + 5 * n;
  const A x1 = product(roi[1], scale), y1 = product(roi[2], scale);
  const A x2 = product(sum(roi[3], A(1)), scale), y2 = product(sum(roi[4], A(1)), scale);
  int32_t index = -1;
  T greatest = from_accumulate<T>(A(0));
  if (is_image(roi[0], size.B) && x2 > x1 && y2 > y1) {
    const T* values = input + (static_cast<int64_t>(roi[0]) * size.C + c) * size.H * size.W;
    int top, bottom, left, right;
    bin_of(y1, y2, p, size.PH, size.H, top, bottom);
    bin_of(x1, x2, q, size.PW, size.W, left, right);
    if (top < bottom && left < right) {
      const int W = static_cast<int>(size.W);
      A best = -static_cast<A>(INFINITY);
      index = top * W + left;
      for (int h = top; h < bottom; ++h) {
        for (int w = left; w < right; ++w) {
          const A value = to_accumulate(values[h * W + w]);
          if (value > best) best = value, index = h * W + w;
        }
      }
      greatest = values[index];
    }
  }
  output[i] = greatest;
  argmax[i] = index;
}

// A thread owns an element of grad_output and adds it to its pixel, atomically: regions may overlap, so the order in
// which a pixel's terms are added differs from run to run.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const T* __restrict__ grad_output, const A* __restrict__ rois, const int32_t* __restrict__ argmax,
                   A* __restrict__ grad_input, const RoIPoolProblem size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size.N * size.C * size.PH * size.PW) return;
  const int64_t map = i / (size.PW * size.PH), c = map % size.C, n = map / size.C, pixels = size.H * size.W;
  const A b = rois[5 * n];
  const int32_t index = argmax[i];
  if (index < 0 || index >= pixels || !is_image(b, size.B)) return;
  atomicAdd(grad_input + (static_cast<int64_t>(b) * size.C + c) * pixels + index, to_accumulate(grad_output[i]));
}

}  // namespace
}  // namespace visdet::roi_pool

namespace visdet {

template <typename T, typename A>
void pool_to_maxima(const OnDevice& device, const RoIPoolArrays<T>& a, const A* rois, A scale) {
  using namespace roi_pool;
  launch({device.op, "pool_kernel", device.scope, ceil_div(a.N * a.C * a.PH * a.PW, kThreads), kThreads},
         pool_kernel<T, A>, a.input, rois, a.output, a.argmax, a, scale);
}

template <typename T, typename A>
void scatter_to_maxima(const OnDevice& device, const RoIPoolProblem& p, const T* grad_output, const A* rois,
                       const int32_t* argmax, A* sums) {
  using namespace roi_pool;
  launch({device.op, "scatter_kernel", device.scope, ceil_div(p.N * p.C * p.PH * p.PW, kThreads), kThreads},
         scatter_kernel<T, A>, grad_output, rois, argmax, sums, p);
}

}  // namespace visdet

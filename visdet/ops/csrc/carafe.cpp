// carafe: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.

#include "carafe.h"

#include "cpu/dispatch.h"

namespace visdet {
namespace {

// Calls run(b, g, h, scratch) for every row of every group; each thread has a scratch of `numbers`.
template <typename A, typename Arrays, typename F>
void for_rows(const Arrays& a, int64_t numbers, const F& run) {
  parallel_each<A>(a.B * a.G * a.H, 1, numbers,
                   [&](A* scratch, int64_t task) { run(task / (a.G * a.H), task / a.H % a.G, task % a.H, scratch); });
}

// Returns the memory of the masks by phase, which it fills.
template <typename T, typename A>
Scratch<A> prepare(CarafeArrays<T, A>& a) {
  Scratch<A> phases(a.B * a.G * a.H * a.s * a.s * a.K * a.K * a.W);
  a.phases = phases.data();
  const auto arrange = best_kernels<CarafeKernels<T, A>>().masks_to_phases;
  for_rows<A>(a, 0, [&](int64_t b, int64_t g, int64_t h, A*) { arrange(a, b, g, h); });
  return phases;
}

}  // namespace

template <typename T, typename A>
void carafe_upsample(const OnDevice&, CarafeArrays<T, A>& a) {
  const auto phases = prepare(a);
  const auto run = best_kernels<CarafeKernels<T, A>>().upsample_row;
  for_rows<A>(a, a.K * (a.W + a.K - 1) + a.W,
              [&](int64_t b, int64_t g, int64_t h, A* scratch) { run(a, scratch, b, g, h); });
}

template <typename T, typename A>
void carafe_gradients(const OnDevice&, CarafeArrays<T, A>& a) {
  const auto phases = prepare(a);
  const auto& kernels = best_kernels<CarafeKernels<T, A>>();
  const int64_t taps = a.K * a.K, stride = a.W + a.K - 1;
  parallel_each<A>(a.B * a.C, 1, (a.H + a.K - 1) * stride + a.W,
                   [&](A* scratch, int64_t map) { kernels.grad_features_map(a, scratch, map / a.C, map % a.C); });
  for_rows<A>(a, a.K * stride + a.W, [&](int64_t b, int64_t g, int64_t h, A* scratch) {
    kernels.grad_masks_row(a, a.phases + ((b * a.G + g) * a.H + h) * a.s * a.s * taps * a.W, scratch, b, g, h);
    kernels.phases_to_masks(a, b, g, h);
  });
}

}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("carafe(Tensor features, Tensor masks, int kernel_size, int group_size, int scale_factor) -> Tensor");
  m.def(
      "carafe_backward(Tensor grad_output, Tensor features, Tensor masks, int kernel_size, int group_size,"
      " int scale_factor) -> (Tensor grad_features, Tensor grad_masks)");
}

// sigmoid_focal_loss: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "sigmoid_focal_loss.h"

#include "cpu/dispatch.h"

namespace visdet {

template <bool GRAD, typename T, typename A>
void compute_focal(const OnDevice&, const FocalArrays<T, A>& a) {
  constexpr int64_t kElements = 1 << 13;  // of one piece of work
  const auto& kernels = best_kernels<FocalKernels<T, A>>();
  const auto run = GRAD ? kernels.gradients : kernels.losses;
  const int64_t grain = std::max<int64_t>(1, kElements / a.C);
  torch::stable::parallel_for(0, a.N, grain, [&](int64_t begin, int64_t end) { run(a, begin, end); });
}

}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("sigmoid_focal_loss(Tensor input, Tensor target, Tensor weight, float gamma, float alpha) -> Tensor");
  m.def(
      "sigmoid_focal_loss_backward(Tensor grad_output, Tensor input, Tensor target, Tensor weight, float gamma,"
      " float alpha) -> Tensor grad_input");
}

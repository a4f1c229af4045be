// batch_norm_add_relu: schemas. The kernels are for CUDA alone; visdet/ops/fused/batch_norm_add_relu.py calls torch's
// operators elsewhere.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "batch_norm_add_relu(Tensor input, Tensor? residual, Tensor weight, Tensor bias, Tensor(a!)? running_mean,"
      " Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float momentum, float eps, bool relu)"
      " -> (Tensor output, Tensor statistics)");
  m.def(
      "batch_norm_add_relu_backward(Tensor grad_output, Tensor input, Tensor? output, Tensor weight, Tensor bias,"
      " Tensor statistics, bool relu) -> (Tensor grad_input, Tensor grad_residual, Tensor sums)");
}

// dropout_add_layer_norm: schemas. The kernels are for CUDA alone;
// visdet/ops/fused/dropout_add_layer_norm.py calls torch's operators elsewhere.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "dropout_add_layer_norm(Tensor input, Tensor? residual, Tensor weight, Tensor bias, Tensor? seed, float p,"
      " bool relu, float eps, bool copies, Tensor? added)"
      " -> (Tensor output, Tensor copy, Tensor sum, Tensor statistics)");
  m.def(
      "dropout_add_layer_norm_backward(Tensor grad_output, Tensor? grad_copy, Tensor? grad_sum, Tensor input,"
      " Tensor? residual, Tensor weight, Tensor statistics, Tensor? seed, float p, bool relu)"
      " -> (Tensor grad_input, Tensor grad_residual, Tensor block_sums)");
}

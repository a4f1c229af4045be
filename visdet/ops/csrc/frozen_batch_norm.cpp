// frozen_batch_norm: schemas. The kernels are for CUDA alone; visdet/ops/frozen_batch_norm.py calls torch's operators
// elsewhere.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "frozen_batch_norm(Tensor input, Tensor weight, Tensor bias, Tensor running_mean, Tensor running_var, float eps)"
      " -> Tensor");
  m.def(
      "frozen_batch_norm_backward(Tensor grad_output, Tensor weight, Tensor running_var, float eps, ScalarType dtype)"
      " -> Tensor");
}

// perceptrons: schemas. The kernels are for CUDA alone; visdet/ops/perceptrons.py calls torch's operators elsewhere.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "perceptrons(Tensor input, Tensor[] parameters, int[] first_columns, int[] kinds, float eps, bool saves)"
      " -> (Tensor output, Tensor saved)");
  m.def(
      "perceptrons_backward(Tensor grad_output, Tensor input, Tensor saved, Tensor[] parameters, int[] first_columns,"
      " int[] kinds, bool wants_input) -> (Tensor grad_input, Tensor grad_parameters)");
}

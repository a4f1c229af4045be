// The schemas of local_aggregate.h, and its functions for CPU tensors.
#include "local_aggregate.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "local_aggregate(Tensor points, Tensor gaussians, Tensor point_boxes, Tensor boxes, bool superquadrics)"
      " -> Tensor");
  m.def(
      "local_aggregate_backward(Tensor grad_output, Tensor points, Tensor gaussians, Tensor point_boxes, Tensor boxes,"
      " bool superquadrics) -> Tensor grad_gaussians");
}

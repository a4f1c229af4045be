// Schemas of mahalanobis_distance and gaussian_field. Fake tensors, autograd and the plain-torch definitions are in
// visdet/ops/mahalanobis_distance.py and visdet/ops/gaussian_field.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("mahalanobis_distance(Tensor points, Tensor means, Tensor cholesky) -> Tensor");
  m.def(
      "mahalanobis_distance_backward(Tensor grad_output, Tensor points, Tensor means, Tensor cholesky)"
      " -> (Tensor grad_points, Tensor grad_means, Tensor grad_cholesky)");
  m.def(
      "gaussian_field(Tensor points, Tensor means, Tensor cholesky, Tensor weights, Tensor point_order,"
      " Tensor gaussian_order, float tolerance) -> Tensor");
  m.def(
      "gaussian_field_backward(Tensor grad_output, Tensor points, Tensor means, Tensor cholesky, Tensor weights,"
      " Tensor point_order, Tensor gaussian_order, float tolerance)"
      " -> (Tensor grad_points, Tensor grad_means, Tensor grad_cholesky, Tensor grad_weights)");
}

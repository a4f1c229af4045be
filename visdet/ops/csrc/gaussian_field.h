// Squared Mahalanobis distances and weighted fields of 3-D Gaussians: the contract.
//
//   v[b, n] = L_n^-1 (points[b] - means[n]),  distance[b, n] = |v[b, n]|^2
//   field[b] = sum over n of weights[n] * exp(-distance[b, n] / 2)
//
// points [B, 3], means [N, 3], cholesky [N, 3, 3] (the lower triangle L_n is read, its diagonal must be positive),
// weights [N]: all float64 or all float32.
//
// With u = L_n^-T v and s = d loss / d distance:
//   d point += 2 s u,  d mean -= 2 s u,  d L -= 2 s tril(u v^T)
// so that sums over b of s u and s u v^T are L_n^-T times those of s v and s v v^T, ten numbers a Gaussian with s.
//
// tolerance > 0 lets gaussian_field leave out pairs so that no field[b] is off by more than tolerance: Gaussian n is
// left out where its term is below tolerance / N. point_order and gaussian_order are then permutations that bring
// neighbours together; the results do not depend on them otherwise. On the CPU an order that is no permutation is an
// error. On CUDA, where finding that would synchronise, a number outside is taken as the nearest one inside: the
// results are then undefined, but nothing outside the tensors is read or written.
#pragma once

#include <vector>

#include "common/checks.h"

namespace visdet {

struct GaussianProblem {
  int64_t B, N;
};

inline GaussianProblem check_gaussians(const char* op, const Tensor& points, const Tensor& means,
                                       const Tensor& cholesky) {
  VISDET_CHECK(op, points.dim() == 2 && points.size(1) == 3, "points must be [B, 3], got ", shape_text(points));
  VISDET_CHECK(op, points.scalar_type() == ScalarType::Float || points.scalar_type() == ScalarType::Double,
               "points must be float64 or float32, got ", dtype_text(points));
  VISDET_CHECK(op, means.dim() == 2 && means.size(1) == 3, "means must be [N, 3], got ", shape_text(means));
  const int64_t N = means.size(0);
  VISDET_CHECK(op, cholesky.dim() == 3 && cholesky.size(0) == N && cholesky.size(1) == 3 && cholesky.size(2) == 3,
               "cholesky must be [N, 3, 3] = [", N, ", 3, 3], got ", shape_text(cholesky));
  for (const Tensor* other : {&means, &cholesky}) {
    const char* name = other == &means ? "means" : "cholesky";
    VISDET_CHECK(op, other->scalar_type() == points.scalar_type(), name, " must have points' type ", dtype_text(points),
                 ", got ", dtype_text(*other));
    VISDET_CHECK(op, on_device_of(points, *other), name, " must be on the device of points");
  }
  return {points.size(0), N};
}

inline void check_vector(const char* op, const char* name, const Tensor& vector, int64_t size, const Tensor& points) {
  VISDET_CHECK(op, vector.dim() == 1 && vector.size(0) == size, name, " must be [", size, "], got ",
               shape_text(vector));
  VISDET_CHECK(op, vector.scalar_type() == points.scalar_type(), name, " must have points' type ", dtype_text(points),
               ", got ", dtype_text(vector));
  VISDET_CHECK(op, on_device_of(points, vector), name, " must be on the device of points");
}

inline void check_distance_gradient(const char* op, const Tensor& grad_output, const GaussianProblem& problem,
                                    const Tensor& points) {
  VISDET_CHECK(op, grad_output.dim() == 2 && grad_output.size(0) == problem.B && grad_output.size(1) == problem.N,
               "grad_output must be [B, N] = [", problem.B, ", ", problem.N, "], got ", shape_text(grad_output));
  VISDET_CHECK(op, grad_output.scalar_type() == points.scalar_type(), "grad_output must have points' type ",
               dtype_text(points), ", got ", dtype_text(grad_output));
  VISDET_CHECK(op, on_device_of(points, grad_output), "grad_output must be on the device of points");
}

inline void check_order(const char* op, const char* name, const Tensor& order, int64_t size, const Tensor& points) {
  VISDET_CHECK(op, order.dim() == 1 && (order.size(0) == size || order.size(0) == 0), name, " must be [", size,
               "] or empty, got ", shape_text(order));
  VISDET_CHECK(op, order.scalar_type() == ScalarType::Long, name, " must be int64, got ", dtype_text(order));
  VISDET_CHECK(op, on_device_of(points, order), name, " must be on the device of points");
  if (!order.is_cpu()) return;
  const Tensor numbers = dense(order);
  const auto* first = numbers.const_data_ptr<int64_t>();
  std::vector<bool> is_named(static_cast<size_t>(order.size(0)));
  for (int64_t i = 0; i < order.size(0); ++i) {
    const int64_t n = first[i];
    VISDET_CHECK(op, n >= 0 && n < size && !is_named[static_cast<size_t>(n)], name, " must be a permutation of 0 to ",
                 size - 1, ", got ", n, " at ", i);
    is_named[static_cast<size_t>(n)] = true;
  }
}

}  // namespace visdet

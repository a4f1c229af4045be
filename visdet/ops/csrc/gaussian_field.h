// Squared Mahalanobis distances and weighted fields of 3-D Gaussians: the contract.
//
//   v[b, n] = L_n^-1 (points[b] - means[n]),  distance[b, n] = |v[b, n]|^2
//   field[b] = sum over n of weights[n] * exp(-distance[b, n] / 2)
//
// points [B, 3], means [N, 3], cholesky [N, 3, 3] (the lower triangle L_n is read, its diagonal must be positive),
// weights [N]: all float64 or all float32.
//
// A distance is infinite where a sum overflows, or where the point, the mean or a number below the diagonal of L_n is
// infinite. Such a pair adds nothing and has no gradient. A NaN makes distances NaN. Rows of L_n are divided by their
// diagonal first, so that large factors do not overflow.
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

#include <cstdint>

namespace visdet {

struct GaussianProblem {
  int64_t B, N;
};

template <typename A>
struct GaussianArrays : GaussianProblem {
  const A* points;                // [B, 3]
  const A* means;                 // [N, 3]
  const A* cholesky;              // [N, 3, 3]
  const A* weights;               // [N], or null
  const int64_t* gaussian_order;  // [N], or null
  A cutoff;                       // tolerance / N, or 0: all pairs count
  A* blocks;                      // [ceil(N / lanes), kRows, lanes]
  const A* grad_output;           // [B, N] or [B]
  A* output;                      // [B, N] or [B]
  A* grad_points;                 // [B, 3]
  A* grad_means;                  // [N, 3]
  A* grad_cholesky;               // [N, 3, 3]
  A* grad_weights;                // [N], or null
};

template <typename A>
struct GaussianKernels {
  int64_t lanes, block;  // Gaussians and numbers of a block
  // Writes blocks [begin, end). Returns the first Gaussian whose factor has a diagonal that is not positive, or -1.
  int64_t (*prepare_blocks)(const GaussianArrays<A>& a, int64_t begin, int64_t end);
  // These write the results of one point, or of the Gaussians of one block.
  void (*distances_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*distance_grad_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*distance_grad_of_block)(const GaussianArrays<A>& a, int64_t block);
  void (*field_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*field_grad_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*field_grad_of_block)(const GaussianArrays<A>& a, int64_t block);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include <tuple>
#include <vector>

#include "common/each.h"

namespace visdet {

// The order is dense.
inline void check_order(const char* op, const char* name, const Tensor& order, int64_t size, const Tensor& points) {
  VISDET_CHECK(op, order.dim() == 1 && (order.size(0) == size || order.size(0) == 0), name, " must be [", size,
               "] or empty, got ", shape_text(order));
  check_int64(op, name, order);
  check_device(op, name, order, "points", points);
  if (!order.is_cpu()) return;
  const int64_t* first = data_of(order);
  std::vector<bool> is_named(static_cast<size_t>(order.size(0)));
  for (int64_t i = 0; i < order.size(0); ++i) {
    const int64_t n = first[i];
    VISDET_CHECK(op, n >= 0 && n < size && !is_named[static_cast<size_t>(n)], name, " must be a permutation of 0 to ",
                 size - 1, ", got ", n, " at ", i);
    is_named[static_cast<size_t>(n)] = true;
  }
}

namespace gaussian_field {

// The arguments of a call, checked and dense.
struct GaussianTensors {
  Tensor points, means, cholesky;
  GaussianProblem problem;

  GaussianTensors(const char* op, const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in)
      : points(dense(points_in)), means(dense(means_in)), cholesky(dense(cholesky_in)) {
    check_sums(op, "points", points, {"B", 3});
    check_like(op, "means", means, {"N", 3}, "points", points);
    problem = {points.size(0), means.size(0)};
    check_like(op, "cholesky", cholesky, {{"N", problem.N}, 3, 3}, "points", points);
  }
};
struct FieldTensors : GaussianTensors {
  Tensor weights, point_order, gaussian_order;
  double tolerance;

  FieldTensors(const char* op, const Tensor& points, const Tensor& means, const Tensor& cholesky,
               const Tensor& weights_in, const Tensor& point_order_in, const Tensor& gaussian_order_in,
               double tolerance)
      : GaussianTensors(op, points, means, cholesky),
        weights(dense(weights_in)),
        point_order(dense(point_order_in)),
        gaussian_order(dense(gaussian_order_in)),
        tolerance(tolerance) {
    check_like(op, "weights", weights, {problem.N}, "points", points);
    check_order(op, "point_order", point_order, problem.B, points);
    check_order(op, "gaussian_order", gaussian_order, problem.N, points);
  }
};

// What a backward reads and writes. Distances have no weights.
struct GaussianGradients {
  Tensor grad_output, points, means, cholesky, weights;

  explicit GaussianGradients(const Tensor& grad_output, const GaussianTensors& of)
      : grad_output(dense(grad_output)),
        points(new_like(of.points)),
        means(new_like(of.means)),
        cholesky(new_like(of.cholesky)) {}

  // A gradient summed over no Gaussians, or over no points, is zero even where an input is infinite or NaN.
  void zero_empty_sums(const GaussianProblem& problem) {
    if (problem.N == 0) zero_(points);
    if (problem.B == 0) zero_(means), zero_(cholesky);
  }
};

// These write results.
void compute_distances(const OnDevice& device, const GaussianTensors& tensors, Tensor& output);
void compute_distance_gradients(const OnDevice& device, const GaussianTensors& tensors, GaussianGradients& gradients);
void compute_field(const OnDevice& device, const FieldTensors& tensors, Tensor& output);
void compute_field_gradients(const OnDevice& device, const FieldTensors& tensors, GaussianGradients& gradients);

inline Tensor distances(const Tensor& points, const Tensor& means, const Tensor& cholesky) {
  const GaussianTensors tensors("mahalanobis_distance", points, means, cholesky);
  const OnDevice device("mahalanobis_distance", points);
  Tensor output = new_empty(points, {tensors.problem.B, tensors.problem.N});
  compute_distances(device, tensors, output);
  return output;
}

inline std::tuple<Tensor, Tensor, Tensor> distances_backward(const Tensor& grad_output, const Tensor& points,
                                                             const Tensor& means, const Tensor& cholesky) {
  constexpr const char* op = "mahalanobis_distance_backward";
  const GaussianTensors tensors(op, points, means, cholesky);
  const GaussianProblem problem = tensors.problem;
  check_like(op, "grad_output", grad_output, {{"B", problem.B}, {"N", problem.N}}, "points", points);
  const OnDevice device(op, points);
  GaussianGradients gradients(grad_output, tensors);
  compute_distance_gradients(device, tensors, gradients);
  gradients.zero_empty_sums(problem);
  return {gradients.points, gradients.means, gradients.cholesky};
}

inline Tensor field(const Tensor& points, const Tensor& means, const Tensor& cholesky, const Tensor& weights,
                    const Tensor& point_order, const Tensor& gaussian_order, double tolerance) {
  constexpr const char* op = "gaussian_field";
  const FieldTensors tensors(op, points, means, cholesky, weights, point_order, gaussian_order, tolerance);
  const OnDevice device(op, points);
  Tensor output = new_empty(points, {tensors.problem.B});
  compute_field(device, tensors, output);
  return output;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> field_backward(const Tensor& grad_output, const Tensor& points,
                                                                 const Tensor& means, const Tensor& cholesky,
                                                                 const Tensor& weights, const Tensor& point_order,
                                                                 const Tensor& gaussian_order, double tolerance) {
  constexpr const char* op = "gaussian_field_backward";
  const FieldTensors tensors(op, points, means, cholesky, weights, point_order, gaussian_order, tolerance);
  check_like(op, "grad_output", grad_output, {tensors.problem.B}, "points", points);
  const OnDevice device(op, points);
  GaussianGradients gradients(grad_output, tensors);
  gradients.weights = new_like(weights);
  compute_field_gradients(device, tensors, gradients);
  gradients.zero_empty_sums(tensors.problem);
  if (tensors.problem.B == 0) zero_(gradients.weights);
  return {gradients.points, gradients.means, gradients.cholesky, gradients.weights};
}

VISDET_OPERATORS(gaussian_field, m) {
  m.impl("mahalanobis_distance", TORCH_BOX(&distances));
  m.impl("mahalanobis_distance_backward", TORCH_BOX(&distances_backward));
  m.impl("gaussian_field", TORCH_BOX(&field));
  m.impl("gaussian_field_backward", TORCH_BOX(&field_backward));
}

}  // namespace gaussian_field

}  // namespace visdet
#endif

// mahalanobis_distance and gaussian_field: schemas, and the functions for CPU tensors. cpu/kernels.h names the other
// parts.
#include "gaussian_field.h"

#include <atomic>
#include <initializer_list>

#include "cpu/dispatch.h"

namespace visdet {
namespace {

// Pairs of one piece of work.
constexpr int64_t kGrain = 1 << 15;

// Returns the blocks of one call, and checks the factors.
template <typename A>
Scratch<A> prepare(const char* op, GaussianArrays<A>& a) {
  const auto& kernels = best_kernels<GaussianKernels<A>>();
  const int64_t count = (a.N + kernels.lanes - 1) / kernels.lanes;
  Scratch<A> blocks(count * kernels.block);
  a.blocks = blocks.data();
  std::atomic<int64_t> bad{-1};
  torch::stable::parallel_for(0, count, kGrain / 16, [&](int64_t begin, int64_t end) {
    const int64_t found = kernels.prepare_blocks(a, begin, end);
    if (found >= 0) bad.store(found);
  });
  const int64_t n = bad.load();
  if (n >= 0) {
    const A* l = a.cholesky + 9 * n;
    fail(op, ": cholesky must have positive diagonals, got (", l[0], ", ", l[4], ", ", l[8], ") for Gaussian ", n);
  }
  return blocks;
}

template <typename A>
GaussianArrays<A> arrays_of(const GaussianProblem& problem, const Tensor& points, const Tensor& means,
                            const Tensor& cholesky) {
  GaussianArrays<A> a{problem};
  a.points = data_of<A>(points);
  a.means = data_of<A>(means);
  a.cholesky = data_of<A>(cholesky);
  return a;
}

template <typename A, typename F>
void for_points(const GaussianArrays<A>& a, const F& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.N));
  torch::stable::parallel_for(0, a.B, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) run(a, b);
  });
}

template <typename A, typename F>
void for_blocks(const GaussianArrays<A>& a, const F& run) {
  const int64_t lanes = best_kernels<GaussianKernels<A>>().lanes;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.B * lanes));
  torch::stable::parallel_for(0, (a.N + lanes - 1) / lanes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) run(a, block);
  });
}

Tensor mahalanobis_distance(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in);
  Tensor output = new_empty(points, {problem.B, problem.N});
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    auto a = arrays_of<A>(problem, points, means, cholesky);
    a.output = mutable_data_of<A>(output);
    const auto blocks = prepare(op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().distances_of_point);
  });
  return output;
}

// A gradient summed over no Gaussians, or over no points, is zero even where an input is infinite or NaN.
void zero_empty_sums(const GaussianProblem& problem, std::initializer_list<Tensor*> over_gaussians,
                     std::initializer_list<Tensor*> over_points) {
  for (Tensor* sum : over_gaussians) {
    if (problem.N == 0) zero_(*sum);
  }
  for (Tensor* sum : over_points) {
    if (problem.B == 0) zero_(*sum);
  }
}

std::tuple<Tensor, Tensor, Tensor> mahalanobis_distance_backward(const Tensor& grad_output_in, const Tensor& points_in,
                                                                 const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance_backward";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_like(op, "grad_output", grad_output_in, {{"B", problem.B}, {"N", problem.N}}, "points", points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in);
  Tensor grad_points = new_like(points), grad_means = new_like(means), grad_cholesky = new_like(cholesky);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    auto a = arrays_of<A>(problem, points, means, cholesky);
    a.grad_output = data_of<A>(grad_output);
    a.grad_points = mutable_data_of<A>(grad_points);
    a.grad_means = mutable_data_of<A>(grad_means);
    a.grad_cholesky = mutable_data_of<A>(grad_cholesky);
    const auto blocks = prepare(op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().distance_grad_of_point);
    for_blocks(a, best_kernels<GaussianKernels<A>>().distance_grad_of_block);
  });
  zero_empty_sums(problem, {&grad_points}, {&grad_means, &grad_cholesky});
  return {grad_points, grad_means, grad_cholesky};
}

// The arguments that both directions of the field have.
template <typename A>
GaussianArrays<A> field_arrays(const GaussianProblem& problem, const Tensor& points, const Tensor& means,
                               const Tensor& cholesky, const Tensor& weights, const Tensor& gaussian_order,
                               double tolerance) {
  auto a = arrays_of<A>(problem, points, means, cholesky);
  a.weights = data_of<A>(weights);
  if (gaussian_order.numel() > 0) a.gaussian_order = data_of<int64_t>(gaussian_order);
  a.cutoff = tolerance > 0 && problem.N > 0 ? static_cast<A>(tolerance / static_cast<double>(problem.N)) : A(0);
  return a;
}

Tensor gaussian_field(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in,
                      const Tensor& weights_in, const Tensor& point_order, const Tensor& gaussian_order_in,
                      double tolerance) {
  constexpr const char* op = "gaussian_field";
  const auto problem =
      check_gaussian_field(op, points_in, means_in, cholesky_in, weights_in, point_order, gaussian_order_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in),
               weights = dense(weights_in), gaussian_order = dense(gaussian_order_in);
  Tensor output = new_empty(points, {problem.B});
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    auto a = field_arrays<A>(problem, points, means, cholesky, weights, gaussian_order, tolerance);
    a.output = mutable_data_of<A>(output);
    const auto blocks = prepare(op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().field_of_point);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_field_backward(const Tensor& grad_output_in,
                                                                   const Tensor& points_in, const Tensor& means_in,
                                                                   const Tensor& cholesky_in, const Tensor& weights_in,
                                                                   const Tensor& point_order,
                                                                   const Tensor& gaussian_order_in, double tolerance) {
  constexpr const char* op = "gaussian_field_backward";
  const auto problem =
      check_gaussian_field(op, points_in, means_in, cholesky_in, weights_in, point_order, gaussian_order_in);
  check_like(op, "grad_output", grad_output_in, {problem.B}, "points", points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in), weights = dense(weights_in), gaussian_order = dense(gaussian_order_in);
  Tensor grad_points = new_like(points), grad_means = new_like(means), grad_cholesky = new_like(cholesky),
         grad_weights = new_like(weights);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    auto a = field_arrays<A>(problem, points, means, cholesky, weights, gaussian_order, tolerance);
    a.grad_output = data_of<A>(grad_output);
    a.grad_points = mutable_data_of<A>(grad_points);
    a.grad_means = mutable_data_of<A>(grad_means);
    a.grad_cholesky = mutable_data_of<A>(grad_cholesky);
    a.grad_weights = mutable_data_of<A>(grad_weights);
    const auto blocks = prepare(op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().field_grad_of_point);
    for_blocks(a, best_kernels<GaussianKernels<A>>().field_grad_of_block);
  });
  zero_empty_sums(problem, {&grad_points}, {&grad_means, &grad_cholesky, &grad_weights});
  return {grad_points, grad_means, grad_cholesky, grad_weights};
}

}  // namespace
}  // namespace visdet

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

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("mahalanobis_distance", TORCH_BOX(&visdet::mahalanobis_distance));
  m.impl("mahalanobis_distance_backward", TORCH_BOX(&visdet::mahalanobis_distance_backward));
  m.impl("gaussian_field", TORCH_BOX(&visdet::gaussian_field));
  m.impl("gaussian_field_backward", TORCH_BOX(&visdet::gaussian_field_backward));
}

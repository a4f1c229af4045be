// mahalanobis_distance and gaussian_field: schemas, and the functions for CPU tensors. cpu/kernels.h names the other
// parts.
#include "gaussian_field.h"

#include <atomic>

#include "cpu/dispatch.h"

namespace visdet::gaussian_field {
namespace {

// Pairs of one piece of work.
constexpr int64_t kGrain = 1 << 15;

// Returns the blocks of one call, and checks the factors.
template <typename A>
Scratch<A> prepare(const char* op, GaussianArrays<A>& a) {
  const auto& kernels = best_kernels<GaussianKernels<A>>();
  const int64_t count = ceil_of(a.N, kernels.lanes);
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
GaussianArrays<A> arrays_of(const GaussianTensors& tensors) {
  GaussianArrays<A> a{tensors.problem};
  a.points = data_of(tensors.points);
  a.means = data_of(tensors.means);
  a.cholesky = data_of(tensors.cholesky);
  return a;
}

// Adds what a backward reads and writes.
template <typename A>
void add_gradients(GaussianArrays<A>& a, GaussianGradients& gradients) {
  a.grad_output = data_of(gradients.grad_output);
  a.grad_points = data_of(gradients.points);
  a.grad_means = data_of(gradients.means);
  a.grad_cholesky = data_of(gradients.cholesky);
}

// The arguments that both directions of the field have.
template <typename A>
GaussianArrays<A> field_arrays(const FieldTensors& tensors) {
  auto a = arrays_of<A>(tensors);
  a.weights = data_of(tensors.weights);
  if (tensors.gaussian_order.numel() > 0) a.gaussian_order = data_of(tensors.gaussian_order);
  a.cutoff = tensors.tolerance > 0 && a.N > 0 ? static_cast<A>(tensors.tolerance / static_cast<double>(a.N)) : A(0);
  return a;
}

template <typename A, typename F>
void for_points(const GaussianArrays<A>& a, const F& run) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.N));
  parallel_each(a.B, grain, [&](int64_t b) { run(a, b); });
}

template <typename A, typename F>
void for_blocks(const GaussianArrays<A>& a, const F& run) {
  const int64_t lanes = best_kernels<GaussianKernels<A>>().lanes;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, a.B * lanes));
  parallel_each(ceil_of(a.N, lanes), grain, [&](int64_t block) { run(a, block); });
}

}  // namespace

void compute_distances(const OnDevice& device, const GaussianTensors& tensors, Tensor& output) {
  dispatch_sum_type(output.scalar_type(), [&]<typename A>(A) {
    auto a = arrays_of<A>(tensors);
    a.output = data_of(output);
    const auto blocks = prepare(device.op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().distances_of_point);
  });
}

void compute_distance_gradients(const OnDevice& device, const GaussianTensors& tensors, GaussianGradients& gradients) {
  dispatch_sum_type(tensors.points.scalar_type(), [&]<typename A>(A) {
    auto a = arrays_of<A>(tensors);
    add_gradients(a, gradients);
    const auto blocks = prepare(device.op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().distance_grad_of_point);
    for_blocks(a, best_kernels<GaussianKernels<A>>().distance_grad_of_block);
  });
}

void compute_field(const OnDevice& device, const FieldTensors& tensors, Tensor& output) {
  dispatch_sum_type(output.scalar_type(), [&]<typename A>(A) {
    auto a = field_arrays<A>(tensors);
    a.output = data_of(output);
    const auto blocks = prepare(device.op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().field_of_point);
  });
}

void compute_field_gradients(const OnDevice& device, const FieldTensors& tensors, GaussianGradients& gradients) {
  dispatch_sum_type(tensors.points.scalar_type(), [&]<typename A>(A) {
    auto a = field_arrays<A>(tensors);
    add_gradients(a, gradients);
    a.grad_weights = data_of(gradients.weights);
    const auto blocks = prepare(device.op, a);
    for_points(a, best_kernels<GaussianKernels<A>>().field_grad_of_point);
    for_blocks(a, best_kernels<GaussianKernels<A>>().field_grad_of_block);
  });
}

}  // namespace visdet::gaussian_field

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

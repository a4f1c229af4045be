// What the two directions of gaussian_field are given.
#pragma once

#include "cuda/gaussian_field/gaussians.cuh"
#include "cuda/gaussian_field/pairs.cuh"

namespace visdet::gaussian_field {
namespace {

// The tensors and sizes of a field of at least one point and one Gaussian.
struct FieldCall {
  const char* op;
  const DeviceScope& scope;
  const GaussianProblem& problem;
  const Tensor &points, &means, &cholesky, &weights, &point_order, &gaussian_order;
  double tolerance;
};
struct ForwardCall : FieldCall {
  const Tensor& field;

  template <typename A>
  Outputs<A> outputs() const {
    return {nullptr, field.mutable_data_ptr<A>(), nullptr, nullptr, nullptr, nullptr};
  }
};
struct BackwardCall : FieldCall {
  const Tensor &grad_output, &grad_points, &grad_means, &grad_cholesky, &grad_weights;

  template <typename A>
  Outputs<A> outputs() const {
    return {grad_output.const_data_ptr<A>(),     nullptr,
            grad_points.mutable_data_ptr<A>(),   grad_means.mutable_data_ptr<A>(),
            grad_cholesky.mutable_data_ptr<A>(), grad_weights.mutable_data_ptr<A>()};
  }
};

template <typename A>
Inputs<A> inputs_of_field(const FieldCall& call) {
  auto in = inputs_of<A>(call.problem, call.points, call.means, call.cholesky);
  in.weights = call.weights.const_data_ptr<A>();
  return in;
}

}  // namespace
}  // namespace visdet::gaussian_field

// mahalanobis_distance and gaussian_field on CUDA. The contract is in ../gaussian_field.h.
//
// A pair costs some fifteen instructions and no memory traffic: what one side of it needs is in registers, the other
// side's is read from shared memory, a tile at a time. The forward and the gradient of points keep points in registers,
// the gradients of Gaussians keep a Gaussian and its ten sums; so each output has one owner and nothing is added
// atomically. Where the owners are too few to fill the GPU, the other side is split over blocks, whose sums a second
// kernel adds in order.
//
// With a cutoff both sides come in an order that brings neighbours together. box_kernel works out the boxes of
// Gaussians and those of kThreads neighbours; a block passes over groups outside its own box, then over what is outside
// of the groups that are left.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <type_traits>

#include "common/launch.h"
#include "common/paths.h"
#include "cuda/gaussian_field/boxes.cuh"
#include "cuda/gaussian_field/calls.cuh"
#include "cuda/gaussian_field/field.cuh"
#include "cuda/gaussian_field/pairs.cuh"
#include "gaussian_field.h"

namespace visdet::gaussian_field {
namespace {

template <typename Call>
const char* culled_declines(const Call& call) {
  const bool has_orders = call.point_order.numel() > 0 && call.gaussian_order.numel() > 0;
  return call.tolerance > 0 && has_orders ? nullptr : "no pair may be left out";
}

// Only pairs of points and Gaussians near each other.
template <typename Call>
void launch_culled(const Call& call) {
  dispatch_float(call.points, [&](auto tag) {
    using A = decltype(tag);
    auto in = inputs_of_field<A>(call);
    in.point_order = call.point_order.template const_data_ptr<int64_t>();
    in.gaussian_order = call.gaussian_order.template const_data_ptr<int64_t>();
    in.cutoff = static_cast<A>(call.tolerance / static_cast<double>(in.N));
    const int64_t gaussian_groups = ceil_div(in.N, kThreads), point_groups = ceil_div(in.B, kThreads);
    const int64_t bytes = static_cast<int64_t>(sizeof(Box<A>)) * (in.N + gaussian_groups + point_groups);
    const Tensor scratch = new_empty(call.points, {bytes}, ScalarType::Byte);
    auto* boxes = static_cast<Box<A>*>(scratch.mutable_data_ptr());
    auto *of_gaussians = boxes + in.N, *of_points = of_gaussians + gaussian_groups;
    in.boxes = boxes, in.gaussian_groups = of_gaussians, in.point_groups = of_points;
    launch({call.op, "box_kernel", call.scope, gaussian_groups, kThreads}, box_kernel<A, true>, in, boxes,
           of_gaussians);
    launch({call.op, "box_kernel", call.scope, point_groups, kThreads}, box_kernel<A, false>, in, nullptr, of_points);
    // One point a thread: small boxes leave out more.
    run_pairs<A, 1, std::is_same_v<Call, BackwardCall>, true, true>(call.op, call.scope, in, call.points,
                                                                    call.template outputs<A>());
  });
}

const char* several_points_forward_decline(const ForwardCall& call) {
  if (call.points.scalar_type() != ScalarType::Double) return "points are float32, which many_points serves";
  return several_points_decline(call);
}

template <typename Call, typename A, int R>
void launch_points_of(const Call& call) {
  run_pairs<A, R, std::is_same_v<Call, BackwardCall>, true, false>(call.op, call.scope, inputs_of_field<A>(call),
                                                                   call.points, call.template outputs<A>());
}

void launch_several_points_forward(const ForwardCall& call) { launch_points_of<ForwardCall, double, 2>(call); }

void launch_several_points_backward(const BackwardCall& call) {
  if (call.points.scalar_type() == ScalarType::Double) return launch_points_of<BackwardCall, double, 2>(call);
  launch_points_of<BackwardCall, float, 4>(call);
}

template <typename Call>
void launch_one_point(const Call& call) {
  dispatch_float(call.points, [&](auto tag) { launch_points_of<Call, decltype(tag), 1>(call); });
}

constexpr Path<ForwardCall> kForwardPaths[] = {
    {"culled", culled_declines<ForwardCall>, launch_culled<ForwardCall>},
    {"many_points", many_points_decline, launch_many_points},
    {"several_points", several_points_forward_decline, launch_several_points_forward},
    {"one_point", nullptr, launch_one_point<ForwardCall>},
};
constexpr Path<BackwardCall> kBackwardPaths[] = {
    {"culled", culled_declines<BackwardCall>, launch_culled<BackwardCall>},
    {"several_points", several_points_decline<BackwardCall>, launch_several_points_backward},
    {"one_point", nullptr, launch_one_point<BackwardCall>},
};

Tensor forward(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in, const Tensor& weights_in,
               const Tensor& point_order_in, const Tensor& gaussian_order_in, double tolerance) {
  constexpr const char* op = "gaussian_field";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_vector(op, "weights", weights_in, problem.N, points_in);
  check_order(op, "point_order", point_order_in, problem.B, points_in);
  check_order(op, "gaussian_order", gaussian_order_in, problem.N, points_in);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in),
               weights = dense(weights_in), point_order = dense(point_order_in),
               gaussian_order = dense(gaussian_order_in);
  Tensor output = new_empty(points, {problem.B});
  if (problem.B == 0) return output;
  if (problem.N == 0) return zero_(output);
  run_first(op, kForwardPaths,
            ForwardCall{{op, scope, problem, points, means, cholesky, weights, point_order, gaussian_order, tolerance},
                        output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& points_in,
                                                    const Tensor& means_in, const Tensor& cholesky_in,
                                                    const Tensor& weights_in, const Tensor& point_order_in,
                                                    const Tensor& gaussian_order_in, double tolerance) {
  constexpr const char* op = "gaussian_field_backward";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_vector(op, "weights", weights_in, problem.N, points_in);
  check_vector(op, "grad_output", grad_output_in, problem.B, points_in);
  check_order(op, "point_order", point_order_in, problem.B, points_in);
  check_order(op, "gaussian_order", gaussian_order_in, problem.N, points_in);
  const DeviceScope scope(points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in), weights = dense(weights_in), point_order = dense(point_order_in),
               gaussian_order = dense(gaussian_order_in);
  Tensor grad_points = new_empty(points, points.sizes()), grad_means = new_empty(means, means.sizes()),
         grad_cholesky = new_empty(cholesky, cholesky.sizes()), grad_weights = new_empty(weights, weights.sizes());
  if (problem.B == 0 || problem.N == 0) {
    zero_(grad_points), zero_(grad_means), zero_(grad_cholesky), zero_(grad_weights);
    return {grad_points, grad_means, grad_cholesky, grad_weights};
  }
  run_first(op, kBackwardPaths,
            BackwardCall{{op, scope, problem, points, means, cholesky, weights, point_order, gaussian_order, tolerance},
                         grad_output,
                         grad_points,
                         grad_means,
                         grad_cholesky,
                         grad_weights});
  return {grad_points, grad_means, grad_cholesky, grad_weights};
}

}  // namespace
}  // namespace visdet::gaussian_field

VISDET_CUDA_OPERATORS(m) {
  m.impl("gaussian_field", TORCH_BOX(&visdet::gaussian_field::forward));
  m.impl("gaussian_field_backward", TORCH_BOX(&visdet::gaussian_field::backward));
}

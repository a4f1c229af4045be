// gaussian_field and mahalanobis_distance on CUDA. The contract is in gaussian_field.h; pairs.cuh, which serves every
// call, says how the work is laid out.
#include "common/launch.h"
#include "common/paths.h"
#include "cuda/gaussian_field/boxes.cuh"
#include "cuda/gaussian_field/field.cuh"
#include "cuda/gaussian_field/mahalanobis_distance.cuh"
#include "cuda/gaussian_field/pairs.cuh"
#include "gaussian_field.h"

namespace visdet::gaussian_field {
namespace {

// Makes the boxes of a call, in scratch memory that is returned, and adds them to the inputs.
Tensor make_boxes(const FieldCall& call, Inputs<float>& in) {
  in.point_order = data_of(call.point_order);
  in.gaussian_order = data_of(call.gaussian_order);
  in.cutoff = static_cast<float>(call.tolerance / static_cast<double>(in.N));
  const int64_t gaussian_groups = ceil_div(in.N, kThreads), point_groups = ceil_div(in.B, kThreads);
  const int64_t bytes = static_cast<int64_t>(sizeof(Box)) * (in.N + gaussian_groups + point_groups);
  Tensor scratch = new_empty(call.points, {bytes}, ScalarType::Byte);
  Box* boxes = data_of(scratch);
  auto *of_gaussians = boxes + in.N, *of_points = of_gaussians + gaussian_groups;
  launch({call.op, "box_kernel", call.scope, gaussian_groups, kThreads}, box_kernel<true>, in, boxes, of_gaussians);
  launch({call.op, "box_kernel", call.scope, point_groups, kThreads}, box_kernel<false>, in, nullptr, of_points);
  in.boxes = boxes, in.gaussian_groups = of_gaussians, in.point_groups = of_points;
  return scratch;
}

// Only pairs of points and Gaussians that are near each other.
template <typename Call>
const char* culled_declines(const Call& call) {
  if (call.points.scalar_type() == ScalarType::Double) return "points are float64";
  const bool has_orders = call.point_order.numel() > 0 && call.gaussian_order.numel() > 0;
  return call.tolerance > 0 && has_orders ? nullptr : "no pair may be left out";
}
template <typename Call>
void launch_culled(const Call& call) {
  auto in = call.template inputs<float>();
  const Tensor boxes = make_boxes(call, in);
  launch_pairs<float, Call::kTask, true>(call.op, call.scope, in, call.points, call.template outputs<float>());
}

// All pairs, one point a thread.
template <typename Call>
void launch_one_point(const Call& call) {
  dispatch_sum_type(call.points.scalar_type(), [&]<typename A>(A) {
    launch_pairs<A, Call::kTask, false>(call.op, call.scope, call.template inputs<A>(), call.points,
                                        call.template outputs<A>());
  });
}

constexpr Path<ForwardCall> kForwardPaths[] = {
    {"culled", culled_declines<ForwardCall>, launch_culled<ForwardCall>},
    {"many_points", many_points_decline, launch_many_points},
    {"one_point", nullptr, launch_one_point<ForwardCall>},
};
constexpr Path<BackwardCall> kBackwardPaths[] = {
    {"culled", culled_declines<BackwardCall>, launch_culled<BackwardCall>},
    {"one_point", nullptr, launch_one_point<BackwardCall>},
};

}  // namespace

void compute_field(const OnDevice& device, const FieldTensors& tensors, Tensor& output) {
  if (tensors.problem.B == 0) return;
  if (tensors.problem.N == 0) {
    zero_(output);
    return;
  }
  run_first(device.op, kForwardPaths, ForwardCall{{tensors, device.op, device.scope}, output});
}

void compute_field_gradients(const OnDevice& device, const FieldTensors& tensors, GaussianGradients& gradients) {
  if (tensors.problem.B == 0 || tensors.problem.N == 0) return;
  run_first(device.op, kBackwardPaths, BackwardCall{{tensors, device.op, device.scope}, gradients});
}

}  // namespace visdet::gaussian_field

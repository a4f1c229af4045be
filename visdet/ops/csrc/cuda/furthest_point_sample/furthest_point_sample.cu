// furthest_point_sample on CUDA. The contract is in ../../furthest_point_sample.h.
#include "common/launch.h"
#include "cuda/furthest_point_sample/sample.cuh"

namespace visdet::furthest_point_sample {
namespace {

Tensor forward(const Tensor& points_in, int64_t num_points, bool is_table) {
  Tensor samples = check_furthest_point_sample(points_in, num_points, is_table);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in);
  if (samples.numel() == 0) return samples;
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const auto a = furthest_arrays<A>(points, samples, is_table);
    const bool is_held = a.N <= kHeld<A> * kThreads;
    const Tensor nearest = new_empty(points, {is_held ? 0 : points.size(0), a.N});
    launch({"furthest_point_sample", "sample_kernel", scope, points.size(0), kThreads},
           is_table ? sample_kernel<A, true> : sample_kernel<A, false>, a, data_of(nearest));
  });
  return samples;
}

}  // namespace
}  // namespace visdet::furthest_point_sample

VISDET_CUDA_OPERATORS(furthest_point_sample, m) {
  m.impl("furthest_point_sample", TORCH_BOX(&visdet::furthest_point_sample::forward));
}

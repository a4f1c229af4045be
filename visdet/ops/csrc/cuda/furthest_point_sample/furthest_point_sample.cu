// furthest_point_sample on CUDA. The contract is in ../../furthest_point_sample.h.
#include "common/launch.h"
#include "cuda/furthest_point_sample/sample.cuh"

namespace visdet::furthest_point_sample {

template <typename A>
void sample_furthest(const OnDevice& device, const Tensor& points, const FurthestArrays<A>& a) {
  const bool is_held = a.N <= kHeld<A> * kThreads;
  const Tensor nearest = new_empty(points, {is_held ? 0 : points.size(0), a.N});
  launch({device.op, "sample_kernel", device.scope, points.size(0), kThreads},
         a.is_table ? sample_kernel<A, true> : sample_kernel<A, false>, a, data_of(nearest));
}

}  // namespace visdet::furthest_point_sample

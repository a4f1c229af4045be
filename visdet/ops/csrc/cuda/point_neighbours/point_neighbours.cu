// ball_query and knn on CUDA. The contract is in ../../point_neighbours.h.
#include "common/launch.h"
#include "cuda/point_neighbours/search.cuh"

namespace visdet::point_neighbours {

template <typename A>
void search(const OnDevice& device, const BallArrays<A>& a) {
  launch({device.op, "ball_kernel", device.scope, ceil_div(a.B * a.M, kThreads / 32), kThreads}, ball_kernel<A>, a);
}

template <typename A>
void search(const OnDevice& device, const NearestArrays<A>& a) {
  const auto kernel = a.k <= 3    ? nearest_kernel<A, 3>
                      : a.k <= 16 ? nearest_kernel<A, 16>
                                  : nearest_kernel<A, static_cast<int>(kMaxNeighbours)>;
  launch({device.op, "nearest_kernel", device.scope, a.B * ceil_div(a.M, kThreads), kThreads}, kernel, a);
}

}  // namespace visdet::point_neighbours

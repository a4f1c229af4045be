// ball_query and knn on CUDA. The contract is in ../../point_neighbours.h.
#include "common/launch.h"
#include "cuda/point_neighbours/search.cuh"

namespace visdet::point_neighbours {
namespace {

Tensor ball_query(const Tensor& points_in, const Tensor& centers_in, double low, double high, int64_t count,
                  bool is_stacked) {
  const Tensor index = check_ball_query(points_in, centers_in, count);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), centers = dense(centers_in);
  if (index.numel() == 0) return index;
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const auto a = ball_arrays<A>(points, centers, low, high, is_stacked, index);
    launch({"ball_query", "ball_kernel", scope, ceil_div(a.B * a.M, kThreads / 32), kThreads}, ball_kernel<A>, a);
  });
  return index;
}

std::tuple<Tensor, Tensor> knn(const Tensor& points_in, const Tensor& centers_in, int64_t k) {
  const auto results = check_knn(points_in, centers_in, k);
  const Tensor &index = std::get<0>(results), &distances = std::get<1>(results);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), centers = dense(centers_in);
  if (index.numel() == 0) return results;
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const auto a = nearest_arrays<A>(points, centers, index, distances);
    const auto kernel = k <= 3    ? nearest_kernel<A, 3>
                        : k <= 16 ? nearest_kernel<A, 16>
                                  : nearest_kernel<A, static_cast<int>(kMaxNeighbours)>;
    launch({"knn", "nearest_kernel", scope, a.B * ceil_div(a.M, kThreads), kThreads}, kernel, a);
  });
  return results;
}

}  // namespace
}  // namespace visdet::point_neighbours

VISDET_CUDA_OPERATORS(point_neighbours, m) {
  m.impl("ball_query", TORCH_BOX(&visdet::point_neighbours::ball_query));
  m.impl("knn", TORCH_BOX(&visdet::point_neighbours::knn));
}

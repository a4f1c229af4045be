// ball_query and knn: their schemas, and their functions for CPU tensors. cpu/kernels.h names the other parts.
#include "point_neighbours.h"

#include <limits>

#include "cpu/dispatch.h"
#include "cpu/points.h"

namespace visdet {
namespace {

constexpr int64_t kPairsOfThread = 1 << 15;  // fewer do not repay a thread

// Calls find(a, c, columns, stride) for each center.
template <typename Arrays, typename A>
void for_each_center(const Arrays& a, void (*find)(const Arrays&, int64_t, const A*, int64_t)) {
  const int64_t stride = ceil_of(a.N, kAnyLanes) * kAnyLanes, grain = ceil_of(kPairsOfThread, stride + 1);
  const Scratch<A> columns(a.B * 3 * stride);
  torch::stable::parallel_for(0, a.B, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      lay_out_points(a.points + b * 3 * a.N, a.N, stride, std::numeric_limits<A>::quiet_NaN(),
                     columns.data() + b * 3 * stride);
    }
  });
  torch::stable::parallel_for(0, a.B * a.M, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) find(a, c, columns.data() + c / a.M * 3 * stride, stride);
  });
}

Tensor ball_query(const Tensor& points_in, const Tensor& centers_in, double low, double high, int64_t count,
                  bool is_stacked) {
  const Tensor index = check_ball_query(points_in, centers_in, count);
  if (index.numel() == 0) return index;
  const Tensor points = dense(points_in), centers = dense(centers_in);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    for_each_center(ball_arrays<A>(points, centers, low, high, is_stacked, index), best_kernels<BallKernels<A>>().find);
  });
  return index;
}

std::tuple<Tensor, Tensor> knn(const Tensor& points_in, const Tensor& centers_in, int64_t k) {
  const auto [index, distances] = check_knn(points_in, centers_in, k);
  if (index.numel() == 0) return {index, distances};
  const Tensor points = dense(points_in), centers = dense(centers_in);
  const auto run = [&, &index = index, &distances = distances]<typename A>(A) {
    for_each_center(nearest_arrays<A>(points, centers, index, distances), best_kernels<NearestKernels<A>>().find);
  };
  dispatch_sum_type(points.scalar_type(), run);
  return {index, distances};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("ball_query(Tensor xyz, Tensor center_xyz, float low, float high, int count, bool is_stacked) -> Tensor");
  m.def("knn(Tensor xyz, Tensor center_xyz, int k) -> (Tensor index, Tensor distances)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ball_query", TORCH_BOX(&visdet::ball_query));
  m.impl("knn", TORCH_BOX(&visdet::knn));
}

// ball_query and knn: their schemas, and their functions for CPU tensors. cpu/kernels.h names the other parts.
#include "point_neighbours.h"

#include <limits>

#include "cpu/dispatch.h"
#include "cpu/points.h"

namespace visdet::point_neighbours {
namespace {

constexpr int64_t kPairsOfThread = 1 << 15;  // fewer do not repay a thread

// Calls find(a, c, columns, stride) for each center.
template <typename Arrays, typename A>
void for_each_center(const Arrays& a, void (*find)(const Arrays&, int64_t, const A*, int64_t)) {
  const int64_t stride = ceil_of(a.N, kAnyLanes) * kAnyLanes, grain = ceil_of(kPairsOfThread, stride + 1);
  const Scratch<A> columns(a.B * 3 * stride);
  parallel_each(a.B, grain, [&](int64_t b) {
    lay_out_points(a.points + b * 3 * a.N, a.N, stride, std::numeric_limits<A>::quiet_NaN(),
                   columns.data() + b * 3 * stride);
  });
  parallel_each(a.B * a.M, grain, [&](int64_t c) { find(a, c, columns.data() + c / a.M * 3 * stride, stride); });
}

}  // namespace

template <typename A>
void search(const OnDevice&, const BallArrays<A>& a) {
  for_each_center(a, best_kernels<BallKernels<A>>().find);
}

template <typename A>
void search(const OnDevice&, const NearestArrays<A>& a) {
  for_each_center(a, best_kernels<NearestKernels<A>>().find);
}

}  // namespace visdet::point_neighbours

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("ball_query(Tensor xyz, Tensor center_xyz, float low, float high, int count, bool is_stacked) -> Tensor");
  m.def("knn(Tensor xyz, Tensor center_xyz, int k) -> (Tensor index, Tensor distances)");
}

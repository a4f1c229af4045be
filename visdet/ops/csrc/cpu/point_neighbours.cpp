// ball_query and knn on the CPU. The contract is in csrc/point_neighbours.h.
//
// A vector of points is compared with the center at a time. Its lanes are looked at one by one only where one of them
// is in the ball, or is nearer than the nearest points so far.
#include "point_neighbours.h"

#include "cpu/kernels.h"
#include "cpu/vec.h"

VISDET_NO_CONTRACTION

namespace visdet::VISDET_ISA {

template <typename A>
VISDET_INLINE Vec<A> squared_distances(const A* center, const A* columns, int64_t stride, int64_t n) {
  const Vec<A> dx = load(columns + n) - center[0], dy = load(columns + stride + n) - center[1];
  const Vec<A> dz = load(columns + 2 * stride + n) - center[2];
  return dx * dx + dy * dy + dz * dz;
}

template <typename A>
void find_ball(const BallArrays<A>& a, int64_t c, const A* columns, int64_t stride) {
  const A* center = a.centers + 3 * c;
  int32_t* index = a.index + c * a.count;
  const IntVec<A> none = {}, at_center = a.is_stacked ? none : none == none;
  int64_t found = 0;
  for (int64_t n = 0; n < stride && found < a.count; n += kLanes<A>) {
    const Vec<A> distance = squared_distances(center, columns, stride, n);
    const IntVec<A> is_near = ((distance >= a.low) & (distance < a.high)) | ((distance == 0) & at_center);
    if (!any_lane<A>(is_near)) continue;
    for (int i = 0; i < kLanes<A> && found < a.count; ++i) {
      if (is_near[i]) index[found++] = static_cast<int32_t>(n + i);
    }
  }
  const int32_t first = found > 0 ? index[0] : 0;
  if (found == 0 && a.is_stacked) index[found++] = -1;
  for (; found < a.count; ++found) index[found] = first;
}

template <typename A>
void find_nearest(const NearestArrays<A>& a, int64_t c, const A* columns, int64_t stride) {
  const A* center = a.centers + 3 * c;
  int32_t* index = a.index + c * a.k;
  A* nearest = a.distances + c * a.k;
  for (int64_t i = 0; i < a.k; ++i) nearest[i] = A(__builtin_inf()), index[i] = 0;
  for (int64_t n = 0; n < stride; n += kLanes<A>) {
    const Vec<A> distance = squared_distances(center, columns, stride, n);
    const IntVec<A> is_near = distance < nearest[a.k - 1];
    if (!any_lane<A>(is_near)) continue;
    for (int lane = 0; lane < kLanes<A>; ++lane) {
      const A mine = distance[lane];
      if (!(mine < nearest[a.k - 1])) continue;
      int64_t i = a.k - 1;
      for (; i > 0 && mine < nearest[i - 1]; --i) nearest[i] = nearest[i - 1], index[i] = index[i - 1];
      nearest[i] = mine, index[i] = static_cast<int32_t>(n + lane);
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(BallKernels, find_ball<A>)
VISDET_SUM_KERNELS(NearestKernels, find_nearest<A>)

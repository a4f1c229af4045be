// furthest_point_sample on the CPU. The contract is in csrc/furthest_point_sample.h.
//
// A sample takes one pass over the cloud in vectors, which updates the least distances and finds the greatest of them.
// Each lane remembers where it found its greatest one first.
#include "furthest_point_sample.h"

#include "cpu/points.h"
#include "cpu/vec.h"

VISDET_NO_CONTRACTION

namespace visdet::VISDET_ISA {

// Updates nearest [stride] by distances, which distances_at(n) returns for the points from n on. Returns the index of
// the greatest number.
template <typename A, typename Distances>
VISDET_INLINE int64_t update_nearest(A* nearest, int64_t stride, const Distances& distances_at) {
  Vec<A> most = Vec<A>{} - A(__builtin_inf());
  IntVec<A> at = lane_numbers<A>(), where = at;
  for (int64_t n = 0; n < stride; n += kLanes<A>, at += kLanes<A>) {
    const Vec<A> distance = distances_at(n), before = load(nearest + n);
    const Vec<A> now = distance < before ? distance : before;
    store(nearest + n, now);
    where = now > most ? at : where;
    most = now > most ? now : most;
  }
  A greatest = most[0];
  int64_t index = where[0];
  for (int i = 1; i < kLanes<A>; ++i) {
    if (most[i] > greatest || (most[i] == greatest && where[i] < index)) greatest = most[i], index = where[i];
  }
  return index;
}

template <typename A>
void sample(const FurthestArrays<A>& a, int64_t cloud, A* scratch) {
  const int64_t N = a.N, stride = (N + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
  const A* points = a.points + cloud * N * (a.is_table ? N : 3);
  A *nearest = scratch, *x = nearest + stride, *y = x + stride, *z = y + stride;
  for (int64_t n = 0; n < stride; ++n) nearest[n] = n < N ? A(kGreatestDistance) : -A(__builtin_inf());
  if (!a.is_table) lay_out_points(points, N, stride, A(0), x);
  int64_t last = 0;
  int32_t* samples = a.samples + cloud * a.num_points;
  samples[0] = 0;
  for (int64_t s = 1; s < a.num_points; ++s) {
    if (a.is_table) {
      const A* row = points + last * N;
      last = update_nearest(nearest, stride, [&](int64_t n) {
        if (n + kLanes<A> <= N) return load(row + n);
        A rest[kLanes<A>] = {};
        std::memcpy(rest, row + n, (N - n) * sizeof(A));
        return load(rest);
      });
    } else {
      const A at[3] = {x[last], y[last], z[last]};
      last = update_nearest(nearest, stride, [&](int64_t n) {
        const Vec<A> dx = load(x + n) - at[0], dy = load(y + n) - at[1], dz = load(z + n) - at[2];
        return dx * dx + dy * dy + dz * dz;
      });
    }
    samples[s] = static_cast<int32_t>(last);
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(FurthestKernels, sample<A>)

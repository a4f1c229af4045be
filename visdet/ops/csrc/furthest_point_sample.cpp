// furthest_point_sample: its schema, and what it computes on the CPU. cpu/kernels.h names the other parts.
#include "furthest_point_sample.h"

namespace visdet::furthest_point_sample {

template <typename A>
void sample_furthest(const OnDevice&, const Tensor& points, const FurthestArrays<A>& a) {
  const auto run = best_kernels<FurthestKernels<A>>().sample;
  parallel_each<A>(points.size(0), 1, kFurthestScratch * (a.N + kAnyLanes),
                   [&](A* scratch, int64_t b) { run(a, b, scratch); });
}

}  // namespace visdet::furthest_point_sample

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("furthest_point_sample(Tensor points, int num_points, bool is_table) -> Tensor");
}

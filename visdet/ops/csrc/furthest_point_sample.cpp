// furthest_point_sample: its schema, and what it computes on the CPU. cpu/kernels.h names the other parts.
#include "furthest_point_sample.h"

namespace visdet::furthest_point_sample {

template <typename A>
void sample_furthest(const OnDevice&, const Tensor& points, const FurthestArrays<A>& a) {
  torch::stable::parallel_for(0, points.size(0), 1, [&](int64_t begin, int64_t end) {
    const Scratch<A> scratch(kFurthestScratch * (a.N + kAnyLanes));
    for (int64_t b = begin; b < end; ++b) best_kernels<FurthestKernels<A>>().sample(a, b, scratch.data());
  });
}

}  // namespace visdet::furthest_point_sample

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("furthest_point_sample(Tensor points, int num_points, bool is_table) -> Tensor");
}

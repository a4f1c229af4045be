// furthest_point_sample: its schema, and its function for CPU tensors. cpu/kernels.h names the other parts.
#include "furthest_point_sample.h"

#include "cpu/dispatch.h"

namespace visdet {
namespace {

Tensor furthest_point_sample(const Tensor& points_in, int64_t num_points, bool is_table) {
  Tensor samples = check_furthest_point_sample(points_in, num_points, is_table);
  if (samples.numel() == 0) return samples;
  const Tensor points = dense(points_in);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const auto a = furthest_arrays<A>(points, samples, is_table);
    torch::stable::parallel_for(0, points.size(0), 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> scratch(kFurthestScratch * (a.N + kAnyLanes));
      for (int64_t b = begin; b < end; ++b) best_kernels<FurthestKernels<A>>().sample(a, b, scratch.data());
    });
  });
  return samples;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("furthest_point_sample(Tensor points, int num_points, bool is_table) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("furthest_point_sample", TORCH_BOX(&visdet::furthest_point_sample));
}

// furthest_point_sample: the contract.
//
// points: [B, N, 3], or a table [B, N, N] of the distances between N points. float32 or float64. N is less than 2^31.
// samples: [B, num_points] int32. The first is 0. Each later one is the point whose least distance from the samples
// before it is the greatest, and of several such points the one of least index.
//
// A distance in [B, N, 3] is dx * dx + dy * dy + dz * dz, where every operation is rounded by itself. One that is NaN
// does not count, and none is greater than kGreatestDistance.
#pragma once

#include <cstdint>

namespace visdet {

constexpr double kGreatestDistance = 1e10;

template <typename A>
struct FurthestArrays {
  int64_t N, num_points;
  bool is_table;
  const A* points;
  int32_t* samples;
};

// The CPU kernel takes one cloud. scratch has kFurthestScratch * (N + kAnyLanes) numbers.
constexpr int64_t kFurthestScratch = 4;
template <typename A>
struct FurthestKernels {
  void (*sample)(const FurthestArrays<A>& a, int64_t cloud, A* scratch);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include "common/each.h"

namespace visdet::furthest_point_sample {

// Writes the samples, of which there are some.
template <typename A>
void sample_furthest(const OnDevice& device, const Tensor& points, const FurthestArrays<A>& a);

inline Tensor forward(const Tensor& points_in, int64_t num_points, bool is_table) {
  constexpr const char* op = "furthest_point_sample";
  check_sums(op, "points", points_in, {"B", "N", "3 or N"});
  const int64_t B = points_in.size(0), N = points_in.size(1);
  check_shape(op, "points", points_in, {B, N, is_table ? N : 3});
  VISDET_CHECK(op, N <= INT32_MAX, "points must be fewer than 2^31, got ", N);
  VISDET_CHECK(op, num_points >= 0 && (num_points == 0 || N > 0), "num_points must be ", N > 0 ? "0 or more" : "0",
               " for ", N, " points, got ", num_points);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), samples = new_empty(points, {B, num_points}, ScalarType::Int);
  if (samples.numel() == 0) return samples;
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    sample_furthest(device, points, FurthestArrays<A>{N, num_points, is_table, data_of(points), data_of(samples)});
  });
  return samples;
}

VISDET_OPERATORS(furthest_point_sample, m) { m.impl("furthest_point_sample", TORCH_BOX(&forward)); }

}  // namespace visdet::furthest_point_sample
#endif

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
#include "common/checks.h"

namespace visdet {

// Returns the result, uninitialised.
inline Tensor check_furthest_point_sample(const Tensor& points, int64_t num_points, bool is_table) {
  constexpr const char* op = "furthest_point_sample";
  check_shape(op, "points", points, {"B", "N", "3 or N"});
  check_sum_type(op, "points", points);
  const int64_t B = points.size(0), N = points.size(1);
  check_shape(op, "points", points, {B, N, is_table ? N : 3});
  VISDET_CHECK(op, N <= INT32_MAX, "points must be fewer than 2^31, got ", N);
  VISDET_CHECK(op, num_points >= 0 && (num_points == 0 || N > 0), "num_points must be ", N > 0 ? "0 or more" : "0",
               " for ", N, " points, got ", num_points);
  return new_empty(points, {B, num_points}, ScalarType::Int);
}

template <typename A>
FurthestArrays<A> furthest_arrays(const Tensor& points, const Tensor& samples, bool is_table) {
  return {points.size(1), samples.size(1), is_table, data_of(points), data_of(samples)};
}

}  // namespace visdet
#endif

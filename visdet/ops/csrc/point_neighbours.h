// point_neighbours: the contract of ball_query and knn.
//
// xyz, the points: [B, N, 3], and center_xyz: [B, M, 3]. Both float32 or both float64. N is less than 2^31. The squared
// distance d of a center from each point of its cloud is dx * dx + dy * dy + dz * dz, where every operation is rounded
// by itself.
//
// ball_query: [B, M, count] int32. The first `count` points in the ball, in rising order: those with low <= d < high,
// the
//   squares of the radii rounded to the type of the points, or d = 0. The first one fills the rest, and zeros fill an
//   empty ball. is_stacked, as in mmcv's function for clouds of different sizes: d = 0 is no exception, and the first
//   index of an empty ball is -1.
// knn: [B, M, k] int32 and [B, M, k] of the type of the points. The k nearest points and their d, nearest first, of
// equal
//   ones the lower index first. Where fewer than k points have a finite d, the index is 0 and d infinite. k is at most
//   kMaxNeighbours.
#pragma once

#include <cstdint>

#include "common/constants.h"

namespace visdet {

template <typename A>
struct BallArrays {
  int64_t B, N, M, count;
  bool is_stacked;
  A low, high;
  const A *points, *centers;
  int32_t* index;
};

template <typename A>
struct NearestArrays {
  int64_t B, N, M, k;
  const A *points, *centers;
  int32_t* index;
  A* distances;
};

// The CPU kernels take the center c of B * M, and the points of its cloud as columns [3, stride], which end with NaN.
// stride is a multiple of kAnyLanes.
template <typename A>
struct BallKernels {
  void (*find)(const BallArrays<A>& a, int64_t c, const A* columns, int64_t stride);
};
template <typename A>
struct NearestKernels {
  void (*find)(const NearestArrays<A>& a, int64_t c, const A* columns, int64_t stride);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include <tuple>

#include "common/each.h"

namespace visdet::point_neighbours {

// These write the results, which are not empty.
template <typename A>
void search(const OnDevice& device, const BallArrays<A>& a);
template <typename A>
void search(const OnDevice& device, const NearestArrays<A>& a);

inline void check_clouds(const char* op, const Tensor& points, const Tensor& centers) {
  check_sums(op, "xyz", points, {"B", "N", 3});
  check_like(op, "center_xyz", centers, {points.size(0), "M", 3}, "xyz", points);
  VISDET_CHECK(op, points.size(1) <= INT32_MAX, "xyz must have fewer than 2^31 points, got ", points.size(1));
}

inline Tensor ball_query(const Tensor& points_in, const Tensor& centers_in, double low, double high, int64_t count,
                         bool is_stacked) {
  constexpr const char* op = "ball_query";
  check_clouds(op, points_in, centers_in);
  VISDET_CHECK(op, count >= 0, "sample_num must be 0 or more, got ", count);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), centers = dense(centers_in);
  const int64_t B = points.size(0), N = points.size(1), M = centers.size(1);
  const Tensor index = new_empty(points, {B, M, count}, ScalarType::Int);
  if (index.numel() == 0) return index;
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    search(device, BallArrays<A>{B, N, M, count, is_stacked, static_cast<A>(low), static_cast<A>(high), data_of(points),
                                 data_of(centers), data_of(index)});
  });
  return index;
}

inline std::tuple<Tensor, Tensor> knn(const Tensor& points_in, const Tensor& centers_in, int64_t k) {
  constexpr const char* op = "knn";
  check_clouds(op, points_in, centers_in);
  VISDET_CHECK(op, k >= 1 && k <= kMaxNeighbours, "k must be 1 to ", kMaxNeighbours, ", got ", k);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), centers = dense(centers_in);
  const int64_t B = points.size(0), N = points.size(1), M = centers.size(1);
  const Tensor index = new_empty(points, {B, M, k}, ScalarType::Int), distances = new_empty(points, {B, M, k});
  if (index.numel() == 0) return {index, distances};
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    search(device, NearestArrays<A>{B, N, M, k, data_of(points), data_of(centers), data_of(index), data_of(distances)});
  });
  return {index, distances};
}

VISDET_OPERATORS(point_neighbours, m) {
  m.impl("ball_query", TORCH_BOX(&ball_query));
  m.impl("knn", TORCH_BOX(&knn));
}

}  // namespace visdet::point_neighbours
#endif

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

#include "common/checks.h"

namespace visdet {

inline void check_clouds(const char* op, const Tensor& points, const Tensor& centers) {
  check_shape(op, "xyz", points, {"B", "N", 3});
  check_sum_type(op, "xyz", points);
  check_like(op, "center_xyz", centers, {points.size(0), "M", 3}, "xyz", points);
  VISDET_CHECK(op, points.size(1) <= INT32_MAX, "xyz must have fewer than 2^31 points, got ", points.size(1));
}

// Both functions return the results, uninitialised.
inline Tensor check_ball_query(const Tensor& points, const Tensor& centers, int64_t count) {
  check_clouds("ball_query", points, centers);
  VISDET_CHECK("ball_query", count >= 0, "sample_num must be 0 or more, got ", count);
  return new_empty(points, {points.size(0), centers.size(1), count}, ScalarType::Int);
}

inline std::tuple<Tensor, Tensor> check_knn(const Tensor& points, const Tensor& centers, int64_t k) {
  check_clouds("knn", points, centers);
  VISDET_CHECK("knn", k >= 1 && k <= kMaxNeighbours, "k must be 1 to ", kMaxNeighbours, ", got ", k);
  const int64_t B = points.size(0), M = centers.size(1);
  return {new_empty(points, {B, M, k}, ScalarType::Int), new_empty(points, {B, M, k})};
}

// The inputs are dense.
template <typename A>
BallArrays<A> ball_arrays(const Tensor& points, const Tensor& centers, double low, double high, bool is_stacked,
                          const Tensor& index) {
  return {points.size(0),      points.size(1),       centers.size(1), index.size(2),    is_stacked,
          static_cast<A>(low), static_cast<A>(high), data_of(points), data_of(centers), data_of(index)};
}

template <typename A>
NearestArrays<A> nearest_arrays(const Tensor& points, const Tensor& centers, const Tensor& index,
                                const Tensor& distances) {
  return {points.size(0),  points.size(1),   centers.size(1), index.size(2),
          data_of(points), data_of(centers), data_of(index),  data_of(distances)};
}

}  // namespace visdet
#endif

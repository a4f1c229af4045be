// points_inside: in which boxes, quadrilaterals and voxels points lie. All numbers are float32, or all float64, and
// every operation is rounded by itself, so that results at borders are those of plain torch.
//
// points_in_boxes_part: points [B, N, 3] and boxes [B, M, 7] (x, y, z of the bottom, dx, dy, dz, heading) give the
// first
//   box of each point or -1, int32 [B, N]. points_in_boxes_all: 1 for each box that a point is in, else 0, int32
//   [B, N, M]. torch computes the cosine and sine of the heading. A point on the bottom or top is inside, and one on
//   another side is not.
// points_in_polygons: points [N, 2] and polygons [M, 8] give float32 [N, M], 1 where a ray from the point towards
//   greater x crosses an odd number of sides. The side i ends at corner i. A point at an end of a side or on it counts
//   the sides before that one alone.
// dynamic_voxelize: points [N, D], voxel_size [D] and coors_range [2 * D] (least, then greatest coordinates) give the
//   voxel of each point in reverse order, int32 [N, D]; only -1 for a point that is outside in any dimension. The
//   number of voxels is rounded.
#pragma once

#include <cmath>

#include "common/aten.h"
#include "common/each.h"
#include "common/rounded.h"

namespace visdet {

template <typename A>
VISDET_HOST_DEVICE bool is_in_box(const A* point, const A* box, A cosine, A sine) {
  const A x = sum(point[0], -box[0]), y = sum(point[1], -box[1]), half_x = box[3] / 2, half_y = box[4] / 2;
  const A half_z = box[5] / 2, up = sum(sum(point[2], -box[2]), -half_z);
  const A along = sum(product(x, cosine), product(y, sine)), across = sum(product(y, cosine), -product(x, sine));
  return up >= -half_z && up <= half_z && along > -half_x && along < half_x && across > -half_y && across < half_y;
}

template <typename A>
struct FirstBox {
  int64_t N, M;
  const A *points, *boxes, *cosine, *sine;
  int32_t* index;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t first = i / N * M;
    const A point[] = {points[3 * i], points[3 * i + 1], points[3 * i + 2]};
    int64_t m = 0;
    while (m < M && !is_in_box(point, boxes + 7 * (first + m), cosine[first + m], sine[first + m])) ++m;
    index[i] = m < M ? static_cast<int32_t>(m) : -1;
  }
};

constexpr int64_t kBoxes = 8;  // that one computation of AllBoxes compares with its point

template <typename A>
struct AllBoxes {
  int64_t N, M;
  const A *points, *boxes, *cosine, *sine;
  int32_t* is_inside;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t parts = (M + kBoxes - 1) / kBoxes, n = i / parts, first = n / N * M, begin = (i - n * parts) * kBoxes;
    const A point[] = {points[3 * n], points[3 * n + 1], points[3 * n + 2]};
    for (int64_t m = begin; m < begin + kBoxes && m < M; ++m) {
      is_inside[n * M + m] = is_in_box(point, boxes + 7 * (first + m), cosine[first + m], sine[first + m]);
    }
  }
};

template <typename A>
struct InPolygon {
  int64_t M;
  const A *points, *polygons;
  float* is_inside;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t n = i / M;
    const A px = points[2 * n], py = points[2 * n + 1], *polygon = polygons + 8 * (i - n * M);
    A from_x = polygon[6], from_y = polygon[7];
    bool is_odd = false;
    for (int corner = 0; corner < 4; ++corner) {
      const A x = polygon[2 * corner], y = polygon[2 * corner + 1];
      if ((x == px && y == py) || (from_x == px && from_y == py)) break;
      if ((y < py) != (from_y < py)) {
        const A at = sum(x, quotient(product(sum(py, -y), sum(from_x, -x)), sum(from_y, -y)));
        if (at == px) break;
        is_odd ^= at > px;
      }
      from_x = x, from_y = y;
    }
    is_inside[i] = is_odd;
  }
};

template <typename A>
struct VoxelOfPoint {
  int64_t D, row, column;  // row, column: the strides of points
  const A *points, *voxel_size, *range;
  int32_t* voxels;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    int32_t* voxel = voxels + i * D;
    bool is_inside = true;
    for (int64_t d = 0; d < D && is_inside; ++d) {
      const A place = quotient(sum(points[i * row + d * column], -range[d]), voxel_size[d]);
      is_inside = place >= 0 && place < std::rint(quotient(sum(range[D + d], -range[d]), voxel_size[d]));
      if (is_inside) voxel[D - 1 - d] = static_cast<int32_t>(place);
    }
    for (int64_t d = 0; d < D && !is_inside; ++d) voxel[d] = -1;
  }
};

// Writes FirstBox or AllBoxes into the result.
template <template <typename> typename Compute>
Tensor in_boxes(const char* op, const Tensor& points_in, const Tensor& boxes_in) {
  constexpr bool is_first = std::is_same_v<Compute<float>, FirstBox<float>>;
  check_sums(op, "points", points_in, {"B", "N", 3});
  check_like(op, "boxes", boxes_in, {points_in.size(0), "M", 7}, "points", points_in);
  const int64_t B = points_in.size(0), N = points_in.size(1), M = boxes_in.size(1);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), boxes = dense(boxes_in);
  const Tensor heading = call("aten::select", "int", boxes_in, int64_t{2}, int64_t{6});
  const Tensor cosine = dense(call("aten::cos", "", heading)), sine = dense(call("aten::sin", "", heading));
  const Tensor result =
      is_first ? new_empty(points, {B, N}, ScalarType::Int) : new_empty(points, {B, N, M}, ScalarType::Int);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    device.each(B * N * (is_first ? 1 : (M + kBoxes - 1) / kBoxes), 20 * (is_first ? M + 1 : kBoxes),
                Compute<A>{N, M, data_of(points), data_of(boxes), data_of(cosine), data_of(sine), data_of(result)});
  });
  return result;
}

inline Tensor points_in_boxes_part(const Tensor& points, const Tensor& boxes) {
  return in_boxes<FirstBox>("points_in_boxes_part", points, boxes);
}

inline Tensor points_in_boxes_all(const Tensor& points, const Tensor& boxes) {
  return in_boxes<AllBoxes>("points_in_boxes_all", points, boxes);
}

inline Tensor points_in_polygons(const Tensor& points_in, const Tensor& polygons_in) {
  constexpr const char* op = "points_in_polygons";
  check_sums(op, "points", points_in, {"N", 2});
  check_like(op, "polygons", polygons_in, {"M", 8}, "points", points_in);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), polygons = dense(polygons_in);
  const Tensor result = new_empty(points, {points.size(0), polygons.size(0)}, ScalarType::Float);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    device.each(result.numel(), 40,
                InPolygon<A>{polygons.size(0), data_of(points), data_of(polygons), data_of(result)});
  });
  return result;
}

inline Tensor dynamic_voxelize(const Tensor& points, const Tensor& voxel_size_in, const Tensor& range_in) {
  constexpr const char* op = "dynamic_voxelize";
  check_sums(op, "points", points, {"N", "D"});
  const int64_t N = points.size(0), D = points.size(1);
  check_like(op, "voxel_size", voxel_size_in, {D}, "points", points);
  check_like(op, "coors_range", range_in, {2 * D}, "points", points);
  const OnDevice device(op, points);
  const Tensor voxel_size = dense(voxel_size_in), range = dense(range_in);
  const Tensor voxels = new_empty(points, {N, D}, ScalarType::Int);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    device.each(N, 20 * D + 1,
                VoxelOfPoint<A>{D, points.stride(0), points.stride(1), data_of(points), data_of(voxel_size),
                                data_of(range), data_of(voxels)});
  });
  return voxels;
}

VISDET_OPERATORS(points_inside, m) {
  m.impl("points_in_boxes_part", TORCH_BOX(&points_in_boxes_part));
  m.impl("points_in_boxes_all", TORCH_BOX(&points_in_boxes_all));
  m.impl("points_in_polygons", TORCH_BOX(&points_in_polygons));
  m.impl("dynamic_voxelize", TORCH_BOX(&dynamic_voxelize));
}

}  // namespace visdet

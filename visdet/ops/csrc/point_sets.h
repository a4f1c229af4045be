// point_sets: min_area_polygons, convex_iou, convex_giou and nearest_points, each result by itself, for both kinds of
// device.
//
// pointsets: [N, 18], nine points (x, y) each. polygons: quadrilaterals [K, 8], four corners (x, y) each, either way
// round. All are float32 or all float64. Everything is computed in float64 and rounded. A NaN or an infinite number
// makes the results that depend on it NaN.
//
// min_area_polygons: [N, 8], the corners of the smallest box around each set. One side of it is on an edge of the hull,
//   of boxes that are equal within a millionth on the first one. The corners are those of greatest x and least y, of
//   least x and y, and so on, before the box is turned by an angle of 0 to 90 degrees.
// convex_iou: [N, K], the overlap of each set's hull with each polygon. It is 0 if neither has an area.
// convex_giou: [N] and [N, 18] for as many polygons. The overlap minus the share of the common hull that neither
//   covers, and its derivatives by the points.
// nearest_points: points [B, N, 2] and others [B, M, 2], both float32 or both float64, give the index of the nearest of
//   the others for each point, int32 [B, N]. Of points equally far it is the first, and so it is of those with a NaN,
//   which are nearer than all, as for torch's argmin. Without others it is 0. Every operation is rounded by itself.
#pragma once

#include <tuple>

#include "common/each.h"
#include "common/rounded.h"
#include "common/triangle_overlap.h"

namespace visdet {

// Reads points[begin] to points[end - 1]. Returns 0, or NaN if one of the numbers is not finite.
template <typename A, int K>
VISDET_HOST_DEVICE double read_points(const A* numbers, int begin, int end, Vector (&points)[K]) {
  double sum = 0;
  for (int i = begin; i < end; ++i) {
    points[i] = {numbers[2 * (i - begin)], numbers[2 * (i - begin) + 1]};
    sum += points[i].x + points[i].y;
  }
  return 0 * sum;
}

// The bounds of a hull along a direction (cos, sin) and across it.
struct Extent {
  double least_along = INFINITY, most_along = -INFINITY, least_across = INFINITY, most_across = -INFINITY;

  VISDET_HOST_DEVICE Extent(const Ring<9>& hull, Vector direction) {
    for (int i = 0; i < hull.count; ++i) {
      const Vector at = hull.corner[i];
      const double along = at.x * direction.x + at.y * direction.y, across = cross(direction, at);
      least_along = lesser(least_along, along), most_along = greater(most_along, along);
      least_across = lesser(least_across, across), most_across = greater(most_across, across);
    }
  }
};

template <typename A>
struct SmallestBoxes {
  const A* pointsets;
  A* polygons;

  VISDET_HOST_DEVICE void operator()(int64_t n) const {
    Vector points[9];
    const double zero = read_points(pointsets + 18 * n, 0, 9, points);
    const Hull<9> hull = hull_of(points);
    const auto edge = [&](int i) { return hull.corner[hull.after(i)] - hull.corner[i]; };
    double areas[9], least = INFINITY;
    for (int i = 0; i < hull.count; ++i) {
      const Extent box(hull, edge(i));
      areas[i] = (box.most_along - box.least_along) * (box.most_across - box.least_across) / square(edge(i));
      least = lesser(least, areas[i]);
    }
    int best = 0;
    for (int i = hull.count - 1; i >= 0; --i) best = areas[i] <= least * (1 + 1e-6) ? i : best;
    constexpr double kQuarter = 1.5707963267948966;
    double angle = fmod(atan2(edge(best).y, edge(best).x), kQuarter);
    if (angle < 0) angle += kQuarter;
    const Vector direction = {cos(angle), sin(angle)};
    const Extent box(hull, direction);
    for (int i = 0; i < 4; ++i) {
      const double along = i == 0 || i == 3 ? box.most_along : box.least_along;
      const double across = i < 2 ? box.least_across : box.most_across;
      A* to = polygons + 8 * n + 2 * i;
      to[0] = static_cast<A>(along * direction.x - across * direction.y + zero);
      to[1] = static_cast<A>(along * direction.y + across * direction.x + zero);
    }
  }
};

template <typename A>
struct HullsOfSets {
  const A* pointsets;
  Polygon<9>* hulls;

  VISDET_HOST_DEVICE void operator()(int64_t n) const {
    Vector points[9];
    const double zero = read_points(pointsets + 18 * n, 0, 9, points);
    const Hull<9> hull = hull_of(points);
    Polygon<9> polygon;
    for (int i = 0; i < 9; ++i) {  // the first corner stands for those that are not there
      const Vector corner = hull.corner[i < hull.count ? i : 0];
      polygon.x[i] = corner.x, polygon.y[i] = corner.y;
    }
    polygon.area = fabs(hull.area()) + zero;
    set_bounds(polygon);
    hulls[n] = polygon;
  }
};

template <typename A>
struct HullOverlaps {
  const Polygon<9>* hulls;
  const A* polygons;
  int64_t K;
  A* ious;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    ious[i] = overlap_of<A, false>(hulls[i / K], quadrilateral(polygons + 8 * (i % K)), OverlapMode::iou);
  }
};

template <int K>
VISDET_HOST_DEVICE void add_area_gradient(const Hull<K>& hull, double times, Vector* grad) {
  const double area = hull.area();
  if (area < 0) times = -times;
  for (int i = 0; i < hull.count && area != 0; ++i) add(grad[hull.index[i]], times, hull.area_by(i));
}

template <typename A>
struct GeneralisedOverlaps {
  const A *pointsets, *polygons;
  A *gious, *gradients;

  VISDET_HOST_DEVICE void operator()(int64_t n) const {
    Vector points[9], all[13], grad[13] = {}, by_corner[9] = {};
    read_points(pointsets + 18 * n, 0, 9, points);
    const double zero = read_points(pointsets + 18 * n, 0, 9, all) + read_points(polygons + 8 * n, 9, 13, all);
    const Hull<9> hull = hull_of(points);
    const Hull<13> around = hull_of(all);
    const double turn = cross(all[11] - all[9], all[12] - all[10]);  // twice the polygon's area
    const Ring<4> polygon = {
        4, {all[turn < 0 ? 12 : 9], all[turn < 0 ? 11 : 10], all[turn < 0 ? 10 : 11], all[turn < 0 ? 9 : 12]}};
    const double shared = overlap_by_triangles(hull, polygon, by_corner), common = fabs(around.area());
    const double both = fabs(hull.area()) + fabs(turn) / 2 - shared;
    const double per_both = both > 0 ? 1 / both : 0, per_common = common > 0 ? 1 / common : 0;
    // giou = shared / both - (common - both) / common
    const double by_both = per_common - shared * per_both * per_both, by_shared = per_both - by_both;
    for (int i = 0; i < hull.count; ++i) add(grad[hull.index[i]], by_shared, by_corner[i]);
    add_area_gradient(hull, by_both, grad);
    add_area_gradient(around, -both * per_common * per_common, grad);
    gious[n] = static_cast<A>(shared * per_both - (common - both) * per_common + zero);
    for (int i = 0; i < 9; ++i) {
      gradients[18 * n + 2 * i] = static_cast<A>(grad[i].x + zero);
      gradients[18 * n + 2 * i + 1] = static_cast<A>(grad[i].y + zero);
    }
  }
};

template <typename A>
struct NearestPoint {
  int64_t N, M;
  const A *points, *others;
  int32_t* index;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const A x = points[2 * i], y = points[2 * i + 1], *other = others + i / N * M * 2;
    A least = 0;
    int64_t nearest = 0;
    for (int64_t m = 0; m < M; ++m) {
      const A apart_x = sum(x, -other[2 * m]), apart_y = sum(y, -other[2 * m + 1]);
      const A apart = sum(product(apart_x, apart_x), product(apart_y, apart_y));
      if (m == 0 || apart < least || (apart != apart && least == least)) least = apart, nearest = m;
    }
    index[i] = static_cast<int32_t>(nearest);
  }
};

inline void check_pointsets(const char* op, const Tensor& pointsets) {
  check_sums(op, "pointsets", pointsets, {"N", 18});
}

inline Tensor min_area_polygons(const Tensor& pointsets_in) {
  check_pointsets("min_area_polygons", pointsets_in);
  const OnDevice device("min_area_polygons", pointsets_in);
  const Tensor pointsets = dense(pointsets_in), polygons = new_empty(pointsets, {pointsets.size(0), 8});
  if (polygons.numel() == 0) return polygons;
  dispatch_sum_type(pointsets.scalar_type(), [&]<typename A>(A) {
    device.each(polygons.size(0), 2000, SmallestBoxes<A>{data_of(pointsets), data_of(polygons)});
  });
  return polygons;
}

inline Tensor convex_iou(const Tensor& pointsets_in, const Tensor& polygons_in) {
  check_pointsets("convex_iou", pointsets_in);
  check_like("convex_iou", "polygons", polygons_in, {"K", 8}, "pointsets", pointsets_in);
  const OnDevice device("convex_iou", pointsets_in);
  const Tensor pointsets = dense(pointsets_in), polygons = dense(polygons_in);
  const int64_t N = pointsets.size(0), K = polygons.size(0);
  const Tensor ious = new_empty(pointsets, {N, K});
  if (ious.numel() == 0) return ious;
  const Tensor scratch = new_empty(pointsets, {N, sizeof(Polygon<9>) / sizeof(double)}, ScalarType::Double);
  Polygon<9>* hulls = data_of(scratch);
  dispatch_sum_type(pointsets.scalar_type(), [&]<typename A>(A) {
    device.each(N, 1500, HullsOfSets<A>{data_of(pointsets), hulls});
    device.each(N * K, 100, HullOverlaps<A>{hulls, data_of(polygons), K, data_of(ious)});
  });
  return ious;
}

inline std::tuple<Tensor, Tensor> convex_giou(const Tensor& pointsets_in, const Tensor& polygons_in) {
  check_pointsets("convex_giou", pointsets_in);
  const int64_t N = pointsets_in.size(0);
  check_like("convex_giou", "polygons", polygons_in, {N, 8}, "pointsets", pointsets_in);
  const OnDevice device("convex_giou", pointsets_in);
  const Tensor pointsets = dense(pointsets_in), polygons = dense(polygons_in);
  const Tensor gious = new_empty(pointsets, {N}), gradients = new_empty(pointsets, {N, 18});
  if (N == 0) return {gious, gradients};
  dispatch_sum_type(pointsets.scalar_type(), [&]<typename A>(A) {
    device.each(N, 30000,
                GeneralisedOverlaps<A>{data_of(pointsets), data_of(polygons), data_of(gious), data_of(gradients)});
  });
  return {gious, gradients};
}

inline Tensor nearest_points(const Tensor& points_in, const Tensor& others_in) {
  constexpr const char* op = "nearest_points";
  check_sums(op, "points", points_in, {"B", "N", 2});
  check_like(op, "others", others_in, {{"B", points_in.size(0)}, "M", 2}, "points", points_in);
  const OnDevice device(op, points_in);
  const Tensor points = dense(points_in), others = dense(others_in);
  const int64_t B = points.size(0), N = points.size(1), M = others.size(1);
  const Tensor index = new_empty(points, {B, N}, ScalarType::Int);
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    device.each(B * N, 8 * M + 1, NearestPoint<A>{N, M, data_of(points), data_of(others), data_of(index)});
  });
  return index;
}

VISDET_OPERATORS(point_sets, m) {
  m.impl("min_area_polygons", TORCH_BOX(&min_area_polygons));
  m.impl("convex_iou", TORCH_BOX(&convex_iou));
  m.impl("convex_giou", TORCH_BOX(&convex_giou));
  m.impl("nearest_points", TORCH_BOX(&nearest_points));
}

}  // namespace visdet

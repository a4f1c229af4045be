// How much two boxes overlap, on the host and on the device.
//
// Rotated boxes become quadrilaterals. The area that a polygon and a quadrilateral share is a line integral around the
// first one (Green's theorem): with the second one, or each of the two triangles that it consists of, mapped to a unit
// cell, every edge adds the integral over v of how far the cell reaches to the left of the edge. No corner has to be
// classified as inside or outside, so that the area is continuous: shared edges and equal boxes are no special cases.
// The first one may be concave. All of it is computed in float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/host_device.h"

namespace visdet {

enum class OverlapMode : int64_t { iou, iof, area };

template <int K>
struct Polygon {
  double x[K], y[K];                // the corners in order, either way round
  double area;                      // NaN if a number of the box is NaN or infinite
  double left, top, right, bottom;  // bounds
};
using Quadrilateral = Polygon<4>;

VISDET_HOST_DEVICE double lesser(double a, double b) { return b < a ? b : a; }
VISDET_HOST_DEVICE double greater(double a, double b) { return b > a ? b : a; }

template <int K>
VISDET_HOST_DEVICE void set_bounds(Polygon<K>& p) {
  p.left = p.right = p.x[0], p.top = p.bottom = p.y[0];
  for (int i = 1; i < K; ++i) {
    p.left = lesser(p.left, p.x[i]), p.right = greater(p.right, p.x[i]);
    p.top = lesser(p.top, p.y[i]), p.bottom = greater(p.bottom, p.y[i]);
  }
}

// box: (x, y, w, h, angle), its centre, its sides and the angle in radians from the x axis towards the y axis. A
// negative side counts as 0.
template <typename A>
VISDET_HOST_DEVICE Quadrilateral rotated_box(const A* box) {
  const double x = box[0], y = box[1], w = box[2] < 0 ? 0 : box[2], h = box[3] < 0 ? 0 : box[3], angle = box[4];
  const double c = cos(angle) / 2, s = sin(angle) / 2;
  const double wx = w * c, wy = w * s, hx = -h * s, hy = h * c;
  Quadrilateral q = {{x - wx - hx, x + wx - hx, x + wx + hx, x - wx + hx},
                     {y - wy - hy, y + wy - hy, y + wy + hy, y - wy + hy},
                     w * h + 0 * (x + y + w + h + angle),
                     0,
                     0,
                     0,
                     0};
  set_bounds(q);
  return q;
}

// box: (x1, y1, ..., x4, y4), four corners in order.
template <typename A>
VISDET_HOST_DEVICE Quadrilateral quadrilateral(const A* box) {
  Quadrilateral q;
  for (int i = 0; i < 4; ++i) q.x[i] = box[2 * i], q.y[i] = box[2 * i + 1];
  const double ax = q.x[2] - q.x[0], ay = q.y[2] - q.y[0], bx = q.x[3] - q.x[1], by = q.y[3] - q.y[1];
  q.area = fabs(ax * by - ay * bx) / 2 + 0 * (ax + ay + bx + by);  // half the cross product of the diagonals
  set_bounds(q);
  return q;
}

// Box n of boxes [N, 5], which are rotated ones, or [N, 8].
template <bool ROTATED, typename A>
VISDET_HOST_DEVICE Quadrilateral box_at(const A* boxes, int64_t n) {
  return ROTATED ? rotated_box(boxes + 5 * n) : quadrilateral(boxes + 8 * n);
}

// The integral over t from 0 to 1 of the positive part of a line from `from` to `to`.
VISDET_HOST_DEVICE double positive_part(double from, double to) {
  const double most = greater(from, to), least = lesser(from, to);
  if (!(most > 0)) return 0;
  return least >= 0 ? (least + most) / 2 : most * most / (most - least) / 2;
}

// What an edge adds to the area within the cell 0 <= v <= 1, 0 <= u <= 1 - slant * v. slant: 0 or 1.
VISDET_HOST_DEVICE double area_left_of_edge(double u0, double v0, double u1, double v1, double slant) {
  const double from = lesser(greater(v0, 0), 1), to = lesser(greater(v1, 0), 1);
  if (from == to) return 0;
  const double slope = (u1 - u0) / (v1 - v0), u_from = u0 + slope * (from - v0), u_to = u1 + slope * (to - v1);
  return (to - from) *
         (positive_part(u_from, u_to) - positive_part(u_from - (1 - slant * from), u_to - (1 - slant * to)));
}

// The area of p within the parallelogram, or with a slant of 1 the triangle, of corner i of q and the vectors from
// there to corners j and k. It is negative where p and q turn in opposite directions.
template <int K>
VISDET_HOST_DEVICE double area_within(const Polygon<K>& p, const Quadrilateral& q, int j, int k, double slant) {
  const double ax = q.x[j] - q.x[0], ay = q.y[j] - q.y[0], bx = q.x[k] - q.x[0], by = q.y[k] - q.y[0];
  const double cross = ax * by - ay * bx;
  if (cross == 0) return 0;
  double u[K], v[K], sum = 0;
  for (int i = 0; i < K; ++i) {
    const double x = p.x[i] - q.x[0], y = p.y[i] - q.y[0];
    u[i] = (x * by - y * bx) / cross, v[i] = (ax * y - ay * x) / cross;
  }
  for (int i = 0; i < K; ++i) sum += area_left_of_edge(u[i], v[i], u[(i + 1) % K], v[(i + 1) % K], slant);
  return fabs(cross) * sum;
}

// The area that both share; 0 where it is no number. ROTATED: whether q is a rotated box.
template <bool ROTATED, int K>
VISDET_HOST_DEVICE double shared_area(const Polygon<K>& p, const Quadrilateral& q) {
  if (!(p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom)) return 0;
  const double sum = ROTATED ? area_within(p, q, 1, 3, 0) : area_within(p, q, 1, 2, 1) + area_within(p, q, 2, 3, 1);
  const double area = lesser(fabs(sum), lesser(p.area, q.area));
  return area > 0 ? area : 0;
}

// Rounded to A, the type of the boxes. It is NaN if a number of either box is NaN or infinite.
template <typename A, bool ROTATED, int K>
VISDET_HOST_DEVICE A overlap_of(const Polygon<K>& p, const Quadrilateral& q, OverlapMode mode) {
  const double shared = shared_area<ROTATED>(p, q), areas = p.area + q.area;
  if (areas != areas) return static_cast<A>(areas);
  if (mode == OverlapMode::area || shared == 0) return static_cast<A>(shared);
  return static_cast<A>(shared / (mode == OverlapMode::iof ? p.area : areas - shared));
}

// The greatest number of type A that is not greater than x: y > x if and only if y > round_down<A>(x).
template <typename A>
A round_down(double x) {
  const A nearest = static_cast<A>(x);
  return static_cast<double>(nearest) > x ? std::nextafter(nearest, -static_cast<A>(INFINITY)) : nearest;
}

// An axis-aligned box suppresses another if their overlap is greater than `limit`. This needs an intersection of at
// least `low` times the union where limit is not negative, which is a comparison without a division.
template <typename A>
struct AlignedLimit {
  A limit, low;

  explicit AlignedLimit(double iou_threshold)
      : limit(round_down<A>(iou_threshold)), low(limit * (1 - 8 * std::numeric_limits<A>::epsilon())) {}
};

}  // namespace visdet

// The convex hull of a few points, on the host and on the device, in float64.
#pragma once

#include "common/box_overlap.h"

namespace visdet {

struct Vector {
  double x, y;
};

VISDET_HOST_DEVICE Vector operator-(Vector a, Vector b) { return {a.x - b.x, a.y - b.y}; }
VISDET_HOST_DEVICE double cross(Vector a, Vector b) { return a.x * b.y - a.y * b.x; }
VISDET_HOST_DEVICE double square(Vector a) { return a.x * a.x + a.y * a.y; }
VISDET_HOST_DEVICE void add(Vector& to, double times, Vector a) { to.x += times * a.x, to.y += times * a.y; }

// A polygon of at most K corners, which turns from x towards y.
template <int K>
struct Ring {
  int count = 0;
  Vector corner[K];

  VISDET_HOST_DEVICE int after(int i) const { return i + 1 < count ? i + 1 : 0; }
  VISDET_HOST_DEVICE int before(int i) const { return i > 0 ? i - 1 : count - 1; }

  // By the shoelace formula, relative to a corner.
  VISDET_HOST_DEVICE double area() const {
    double sum = 0;
    for (int i = 1; i + 1 < count; ++i) sum += cross(corner[i] - corner[0], corner[i + 1] - corner[0]);
    return sum / 2;
  }

  // The derivative of the area by corner i.
  VISDET_HOST_DEVICE Vector area_by(int i) const {
    const Vector apart = corner[after(i)] - corner[before(i)];
    return {apart.y / 2, -apart.x / 2};
  }
};

template <int K>
struct Hull : Ring<K> {
  int index[K];  // of the points that are corners
};

// The corners go from the point of least y (then x) on. A corner's successor has all other points to its left, within a
// slack; on a line it is the furthest one, of equal points the first one. The hull ends where the first corner may
// follow, as another point may be so near to it that both may. The loops over points are unrolled, so that these stay
// in registers on the device.
template <int K>
VISDET_HOST_DEVICE Hull<K> hull_of(const Vector (&points)[K]) {
  double longest = 0;
  Vector first = points[0];
  int index = 0;
  for (int i = 1; i < K; ++i) {
    for (int j = 0; j < i; ++j) longest = greater(longest, square(points[i] - points[j]));
    const bool is_first = points[i].y < first.y || (points[i].y == first.y && points[i].x < first.x);
    if (is_first) first = points[i], index = i;
  }
  const double slack = 1e-14 * longest;
  Hull<K> hull;
  Vector at = first;
  do {
    hull.corner[hull.count] = at, hull.index[hull.count] = index, ++hull.count;
    double furthest = 0;
    bool closes = false;
    Vector next = points[0];
    index = 0;
    for (int j = 0; j < K; ++j) {
      const Vector edge = points[j] - at;
      bool may_follow = square(edge) > 0;
      for (int k = 0; k < K; ++k) may_follow &= cross(edge, points[k] - at) >= -slack;
      closes |= may_follow && points[j].x == first.x && points[j].y == first.y;
      if (may_follow && square(edge) > furthest) furthest = square(edge), next = points[j], index = j;
    }
    at = closes ? first : next;
  } while (hull.count < K && !(at.x == first.x && at.y == first.y));
  return hull;
}

}  // namespace visdet

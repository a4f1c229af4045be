// The area that a hull and a quadrilateral share, and its derivatives, on the host and on the device, in float64: what
// ../mmcv/triangle_overlap.py defines, as mmcv adds it up, and the derivatives of that by the chain rule.
//
// Each side of either spans a triangle with the origin. The area is the sum of the signed overlaps of all pairs of
// these triangles. An overlap is a triangle cut by three lines; each corner of it is a corner of the triangle or a
// crossing of a side with a line, through which its derivatives go back.
#pragma once

#include "common/hull.h"

namespace visdet {

// Within the tolerance, a point lies on a line, or is another one.
VISDET_HOST_DEVICE int sign_of(double x) { return (x > 1e-8) - (x < -1e-8); }
VISDET_HOST_DEVICE bool is_same(Vector a, Vector b) { return sign_of(a.x - b.x) == 0 && sign_of(a.y - b.y) == 0; }

// What is left of a triangle.
struct CutTriangle : Ring<9> {
  int from[9];      // i: corner i of what was cut; -1 - i: the crossing of the line with the side behind corner i
  double share[9];  // how far along that side the crossing is
};

// Sets `left` to what is to the left of a line. limit: of corners, before those that coincide are dropped.
VISDET_HOST_DEVICE void cut(const CutTriangle& whole, Vector start, Vector along, int limit, CutTriangle& left) {
  int found = 0;
  Vector previous = {0, 0};
  left.count = 0;
  const auto append = [&](Vector corner, int from, double share) {
    if (found == limit) return;
    const bool is_repeated = found++ > 0 && is_same(corner, previous);
    previous = corner;
    if (is_repeated) return;
    left.corner[left.count] = corner, left.from[left.count] = from, left.share[left.count] = share;
    ++left.count;
  };
  for (int i = 0; i < whole.count; ++i) {
    const Vector p = whole.corner[i], q = whole.corner[whole.after(i)];
    const double here = cross(along, p - start), there = cross(along, q - start), apart = there - here;
    if (sign_of(here) > 0) append(p, i, 0);
    if (sign_of(here) == sign_of(there)) continue;
    append({(p.x * there - q.x * here) / apart, (p.y * there - q.y * here) / apart}, -1 - i, -here / apart);
  }
  while (left.count > 1 && is_same(left.corner[left.count - 1], left.corner[0])) --left.count;
}

// Turns the derivatives by the corners of what is left into those by the corners of the whole.
VISDET_HOST_DEVICE void pull_back(const CutTriangle& whole, const CutTriangle& left, Vector along, Vector* grad) {
  Vector grad_whole[9] = {};
  for (int n = 0; n < left.count; ++n) {
    Vector by = grad[n];
    const int from = left.from[n], i = from < 0 ? -1 - from : from, next = whole.after(i);
    if (from < 0) {  // A crossing moves along the line alone.
      const Vector side = whole.corner[next] - whole.corner[i];
      add(by, (side.x * by.x + side.y * by.y) / cross(along, side), {along.y, -along.x});
      add(grad_whole[next], left.share[n], by);
    }
    add(grad_whole[i], 1 - left.share[n], by);
  }
  for (int i = 0; i < whole.count; ++i) grad[i] = grad_whole[i];
}

// Returns the overlap of the triangles (0, a, b) and (0, c, d), both turning from x towards y. Sets grad[1] and grad[2]
// to its derivatives by a and b.
VISDET_HOST_DEVICE double triangle_overlap(Vector a, Vector b, Vector c, Vector d, Vector (&grad)[9]) {
  const Vector origin = {0, 0}, starts[3] = {origin, c, d}, along[3] = {c, d - c, origin - d};
  CutTriangle stages[4];
  stages[0].count = 3, stages[0].corner[0] = origin, stages[0].corner[1] = a, stages[0].corner[2] = b;
  for (int i = 0; i < 3; ++i) cut(stages[i], starts[i], along[i], 5 + 2 * i, stages[i + 1]);
  const double area = stages[3].area();
  for (int i = 0; i < stages[3].count; ++i) grad[i] = stages[3].area_by(i);
  for (int i = 2; i >= 0; --i) pull_back(stages[i], stages[i + 1], along[i], grad);
  return area;
}

// Returns the area that p and q share, and adds its derivatives by the corners of p to `grad`.
template <int K, int L>
VISDET_HOST_DEVICE double overlap_by_triangles(const Ring<K>& p, const Ring<L>& q, Vector* grad) {
  double size = 0;
  for (int i = 0; i < p.count; ++i) size = greater(size, greater(fabs(p.corner[i].x), fabs(p.corner[i].y)));
  for (int i = 0; i < q.count; ++i) size = greater(size, greater(fabs(q.corner[i].x), fabs(q.corner[i].y)));
  const double unit = size > 0 ? lesser(size, 1) : 1;  // The tolerance is for pixels.
  Vector away = {0, 0};
  const auto moved = [&](Vector a) { return Vector{(a.x + away.x) / unit, (a.y + away.y) / unit}; };
  bool is_in_line = false;  // A side in line with the origin spans no triangle.
  for (int i = 0; i < p.count && p.count > 1; ++i) {
    is_in_line |= sign_of(cross(moved(p.corner[i]), moved(p.corner[p.after(i)]))) == 0;
  }
  if (is_in_line) away = {1.9 * size, 3.1 * size};
  double area = 0;
  for (int i = 0; i < p.count; ++i) {
    const Vector a = moved(p.corner[i]), b = moved(p.corner[p.after(i)]);
    const int sign = sign_of(cross(a, b));
    for (int j = 0; j < q.count && sign != 0; ++j) {
      const Vector c = moved(q.corner[j]), d = moved(q.corner[q.after(j)]);
      const int signs = sign * sign_of(cross(c, d));
      if (signs == 0) continue;
      Vector by[9];
      area += signs *
              triangle_overlap(sign < 0 ? b : a, sign < 0 ? a : b, signs == sign ? c : d, signs == sign ? d : c, by);
      add(grad[i], signs * unit, by[sign < 0 ? 2 : 1]);
      add(grad[p.after(i)], signs * unit, by[sign < 0 ? 1 : 2]);
    }
  }
  return area * unit * unit;
}

}  // namespace visdet

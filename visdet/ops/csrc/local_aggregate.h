// local_aggregate: sums over the Gaussians, or superquadrics, around each point.
//
// points [N, 3]; gaussians [G, K + C]: the mean m, a matrix M [3, 3], of a superquadric (K = 14, else 12) two exponents
// u and v, and C numbers to add up. With d = m - point, (x, y, z) = M d and the density e = exp(-s / 2), of a Gaussian
//
//   s = d' M d, for a symmetric M,
//
// and of a superquadric
//
//   s = (|x|^(2 / u) + |y|^(2 / u))^(u / v) + |z|^(2 / v).
//
// There, squares are at least 1e-30, and sums of powers are taken by their logarithms, so that they neither overflow
// nor vanish. The output [N, C + 1] is the sum of e times the numbers, and the sum of log(max(1 - e, 1e-30)).
//
// A pair counts where the boxes of its point and its Gaussian meet. point_boxes [N / 32 + 1, 33, 6] has, for each 32
// points, a box around them, and then theirs; boxes [G / 32 + 1, 33, 6] has those of Gaussians. A box is its least x,
// y and z, and the negatives of the greatest ones. Infinity in all six meets nothing. The order of points and Gaussians
// changes results only by rounding, but neighbours in a group save time.
//
// The gradient of a Gaussian is a sum over kSlices slices of the points, which are added up one after another. All
// numbers are float32, or all are float64.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/aten.h"
#include "common/each.h"

namespace visdet {

constexpr int64_t kGroup = 32, kSlices = 16;
constexpr int kColumns = 20;  // of the output that are computed at once

template <typename A>
struct BoxGroups {
  int64_t count;   // of boxes
  const A* boxes;  // [groups(), kGroup + 1, 6]

  VISDET_HOST_DEVICE int64_t groups() const { return count / kGroup + 1; }
  VISDET_HOST_DEVICE const A* box(int64_t i) const { return boxes + 6 * (i + i / kGroup + 1); }

  // Calls f(i) for the boxes i that meet `near`, in groups from begin to end - 1.
  template <typename F>
  VISDET_HOST_DEVICE void visit(const A* near, int64_t begin, int64_t end, const F& f) const {
    const auto meets = [&](const A* of) {
      bool is_met = true;
      for (int d = 0; d < 3; ++d) is_met &= of[d] + near[3 + d] <= 0 && near[d] + of[3 + d] <= 0;
      return is_met;
    };
    for (int64_t group = begin; group < end; ++group) {
      if (!meets(box(group * kGroup) - 6)) continue;
      for (int64_t i = group * kGroup; i < (group + 1) * kGroup && i < count; ++i)
        if (meets(box(i))) f(i);
    }
  }
};

// Returns s. Its derivatives by the mean, the matrix and the exponents are written to `by`, unless that is null.
template <typename A>
VISDET_HOST_DEVICE A square_at(bool is_superquadric, const A* gaussian, const A* point, A* by) {
  A d[3], turned[3], by_turned[3], logs[3], s = 0;
  for (int i = 0; i < 3; ++i) d[i] = by_turned[i] = gaussian[i] - point[i];
  for (int i = 0; i < 3; ++i) {
    const A* row = gaussian + 3 + 3 * i;
    turned[i] = row[0] * d[0] + row[1] * d[1] + row[2] * d[2];
    s += turned[i] * d[i];
  }
  if (is_superquadric) {
    for (int i = 0; i < 3; ++i) logs[i] = std::log(std::max(turned[i] * turned[i], A(1e-30)));
    const A u = gaussian[12], v = gaussian[13], x = logs[0] / u, y = logs[1] / u;
    const A log_sum = std::max(x, y) + std::log1p(std::exp(-std::abs(x - y)));
    const A across = std::exp(log_sum * (u / v)), along = std::exp(logs[2] / v);
    s = across + along;
    if (!by) return s;
    const A parts[] = {across * std::exp(x - log_sum), across * std::exp(y - log_sum), along};
    for (int i = 0; i < 3; ++i) by_turned[i] = turned[i] * turned[i] < A(1e-30) ? A(0) : 2 * parts[i] / (v * turned[i]);
    by[12] = (across * log_sum - parts[0] * x - parts[1] * y) / v;
    by[13] = -(across * log_sum * u + along * logs[2]) / (v * v);
  }
  if (!by) return s;
  for (int i = 0; i < 3; ++i) by[i] = 0;
  for (int i = 0; i < 9; ++i) {
    by[i % 3] += (is_superquadric ? 1 : 2) * by_turned[i / 3] * gaussian[3 + i];
    by[3 + i] = by_turned[i / 3] * d[i % 3];
  }
  return s;
}

// A row of the output, or with GRAD what a slice of the points adds to the gradient of a Gaussian.
template <typename A, bool GRAD>
struct Aggregate {
  int64_t C;
  bool superquadrics;
  const A *points, *gaussians, *grad_output;
  BoxGroups<A> rows, others;  // points and Gaussians, or with GRAD the other way round
  A* result;                  // [N, C + 1], or [kSlices, G, K + C]

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t K = superquadrics ? 14 : 12, slice = i / rows.count, row = i % rows.count, groups = others.groups();
    const int64_t begin = GRAD ? groups * slice / kSlices : 0, end = GRAD ? groups * (slice + 1) / kSlices : groups;
    A* to = result + i * (GRAD ? K + C : C + 1);
    A grad[14] = {}, by[14] = {}, log_rests = 0;
    for (int64_t first = 0; first == 0 || first < C; first += kColumns) {
      A sums[kColumns] = {};
      log_rests = 0;
      others.visit(rows.box(row), begin, end, [&](int64_t other) {
        const int64_t n = GRAD ? other : row, g = GRAD ? row : other;
        const A *gaussian = gaussians + g * (K + C), *numbers = gaussian + K + first;
        const A density = std::exp(square_at(superquadrics, gaussian, points + 3 * n, GRAD ? by : nullptr) / -2);
        const A rest = 1 - density, *of_row = grad_output + n * (C + 1);
        A grad_density = GRAD && first == 0 && !(rest < A(1e-30)) ? -of_row[C] / rest : A(0);
        if (!GRAD) log_rests += std::log(std::max(rest, A(1e-30)));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (first + c >= C) break;
          sums[c] += density * (GRAD ? of_row[first + c] : numbers[c]);
          if (GRAD) grad_density += of_row[first + c] * numbers[c];
        }
        if (GRAD && density != 0)  // There, s may be infinite.
          for (int k = 0; k < K; ++k) grad[k] += grad_density * density / -2 * by[k];
      });
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (first + c < C) to[(GRAD ? K : 0) + first + c] = sums[c];
    }
    if (!GRAD) to[C] = log_rests;
    for (int k = 0; GRAD && k < K; ++k) to[k] = grad[k];
  }
};

// The output, or with its gradient that of the Gaussians.
inline Tensor run_aggregate(const char* op, const Tensor* grad_output_in, const Tensor& points_in,
                            const Tensor& gaussians_in, const Tensor& point_boxes_in, const Tensor& boxes_in,
                            bool superquadrics) {
  check_sums(op, "points", points_in, {"N", 3});
  check_like(op, "gaussians", gaussians_in, {"G", "K + C"}, "points", points_in);
  const int64_t N = points_in.size(0), G = gaussians_in.size(0), columns = gaussians_in.size(1);
  const int64_t C = columns - (superquadrics ? 14 : 12);
  VISDET_CHECK(op, C >= 0, "gaussians must have ", columns - C, " columns or more, got ", columns);
  const Tensor points = dense(points_in), gaussians = dense(gaussians_in), point_boxes = dense(point_boxes_in),
               boxes = dense(boxes_in), grad_output = dense(grad_output_in ? *grad_output_in : points_in);
  check_like(op, "point_boxes", point_boxes, {N / kGroup + 1, kGroup + 1, 6}, "points", points);
  check_like(op, "boxes", boxes, {G / kGroup + 1, kGroup + 1, 6}, "points", points);
  if (grad_output_in) check_like(op, "grad_output", grad_output, {N, C + 1}, "points", points);
  const OnDevice device(op, points);
  const Tensor result = grad_output_in ? new_empty(points, {kSlices, G, columns}) : new_empty(points, {N, C + 1});
  dispatch_sum_type(points.scalar_type(), [&]<typename A>(A) {
    const BoxGroups<A> of_points{N, data_of(point_boxes)};
    const BoxGroups<A> of_gaussians{G, data_of(boxes)};
    const A *point = data_of(points), *gaussian = data_of(gaussians), *grad = data_of(grad_output);
    A* to = data_of(result);
    if (grad_output_in) {
      const Aggregate<A, true> compute{C, superquadrics, point, gaussian, grad, of_gaussians, of_points, to};
      return device.each(kSlices * G, N / kGroup + 1, compute);
    }
    const Aggregate<A, false> compute{C, superquadrics, point, gaussian, grad, of_points, of_gaussians, to};
    device.each(N, G / 4 + 1, compute);
  });
  return grad_output_in ? sum_of_slices(result) : result;
}

inline Tensor local_aggregate(const Tensor& points, const Tensor& gaussians, const Tensor& point_boxes,
                              const Tensor& boxes, bool superquadrics) {
  return run_aggregate("local_aggregate", nullptr, points, gaussians, point_boxes, boxes, superquadrics);
}

inline Tensor local_aggregate_backward(const Tensor& grad_output, const Tensor& points, const Tensor& gaussians,
                                       const Tensor& point_boxes, const Tensor& boxes, bool superquadrics) {
  return run_aggregate("local_aggregate_backward", &grad_output, points, gaussians, point_boxes, boxes, superquadrics);
}

VISDET_OPERATORS(local_aggregate, m) {
  m.impl("local_aggregate", TORCH_BOX(&local_aggregate));
  m.impl("local_aggregate_backward", TORCH_BOX(&local_aggregate_backward));
}

}  // namespace visdet

// roi_align: the contract. On CUDA, visdet/ops/roi_align.py computes the maxima in plain torch.
//
// input [B, C, H, W], rois [N, 5] = (batch index, x1, y1, x2, y2), float64 for float64 input, float32 otherwise.
// Along x, with shift = 0.5 if aligned and 0 if not: start = x1 * scale - shift, extent = (x2 * scale - shift) - start,
// at least 1 if not aligned, and size = extent / PW. Bin q has `samples` samples, sampling_ratio of them or, if that is
// 0, ceil(size): sample i is at (start + q * size) + (i + 0.5) * size / samples. Along y likewise.
//
// A sample at position x counts iff -1 <= x <= W. It is clamped to 0 .. W - 1 and interpolated between the pixels
// floor(x) and floor(x) + 1, the latter if the map has it; a pixel of weight 0 is read too, so that its NaN shows.
// output[n, c, p, q] is the sum of the bin's samples, each a weight along y times a weight along x, divided by their
// number: 0 without any. Since the weights along y and x are independent, a bin is a weighted sum over rows of
// weighted sums over columns. roi_align_max has the largest sample of each bin instead, NaN if there is one, in which a
// sample that does not count is 0. Its gradient goes to the first of equal samples.
//
// rois [N, 6] = (batch index, x, y, w, h, angle) are rotated regions. Their bins and samples are those of the
// upright region (-w / 2, -h / 2, w / 2, h / 2) * scale, and the sample at (x', y') of that is at
// (x' cos + y' sin, y' cos - x' sin) from the centre (x * scale - shift, y * scale - shift).
//
// A region of no image of the batch (a whole number 0 to B - 1), with NaN among its numbers or with an infinite angle
// gives 0. Corners and sizes are bounded: see bounded_region(). A region with 2^31 samples or more along an axis
// gives 0.
//
// prroi_pool, on the CPU alone: bin q ends at the edges x1 * scale + q * step and x1 * scale + (q + 1) * step, and is
// the integral of the map's bilinear interpolation, which is 0 outside, divided by the bin's area. lines = 1: along x,
// not the bins but the PW + 1 lines at the edges, on which the mean is taken along y alone. lines = 2: along y
// likewise. A region without area, with a number that is not finite or of no image gives 0.
#pragma once

#include <limits>

#include "common/rois.h"

namespace visdet {

struct RoIAlignProblem {
  int64_t B, C, H, W, N, PH, PW;
  double scale;
  int64_t sampling_ratio;
  bool aligned;
  bool is_rotated = false;
};

// How far outside the map regions may reach, in pixels: float32 cannot represent half pixels further away. Where the
// number of samples grows with the region, this is the length of the map's longer side, but at least kLeastReach, and
// such that a region has fewer than 2^31 samples.
constexpr int64_t kFurthest = int64_t{1} << 24, kLeastReach = 128, kLargestSide = 46000;
inline double reach_of(const RoIAlignProblem& p) {
  const int64_t side = p.H > p.W ? p.H : p.W, room = kLargestSide - side > 2 ? (kLargestSide - side) / 2 : 1;
  const int64_t wanted = side > kLeastReach ? side : kLeastReach;
  return static_cast<double>(p.sampling_ratio > 0 ? kFurthest : (wanted < room ? wanted : room) + 2);
}

// The least and the greatest corner of a region, in pixels of the image.
template <typename A>
struct Bounds {
  A low, high;
};
template <typename A>
Bounds<A> bounds_of(const RoIAlignProblem& p) {
  const double most = static_cast<double>(std::numeric_limits<A>::max()) / 2 / (p.scale > 1 ? p.scale : 1),
               reach = reach_of(p);
  const double low = reach / p.scale, high = ((p.H > p.W ? p.H : p.W) + reach) / p.scale;
  return {static_cast<A>(-(low < most ? low : most)), static_cast<A>(high < most ? high : most)};
}

template <typename A>
VISDET_HOST_DEVICE A clamped(A value, A low, A high) {
  return value < low ? low : value > high ? high : value;
}

// Returns whether a region is one of an image of the batch, and writes its four numbers behind the batch index,
// bounded, to `box`. Corners lie within `bounds`; if the number of samples grows with the region, a far corner is not
// before the near one. The centre of a rotated region lies within `bounds`, and its sides are at most as long as both
// are apart.
template <typename A>
VISDET_HOST_DEVICE bool bounded_region(const A* roi, const RoIAlignProblem& p, const Bounds<A>& bounds, A (&box)[4]) {
  if (!is_image(roi[0], p.B)) return false;
  for (int i = 0; i < 4; ++i) {
    if (!(roi[i + 1] == roi[i + 1])) return false;
    const bool is_side = p.is_rotated && i > 1;
    const A low = is_side ? A(0) : bounds.low;
    box[i] = clamped(roi[i + 1], low, is_side ? bounds.high - bounds.low : bounds.high);
  }
  if (!p.is_rotated && p.sampling_ratio <= 0) {
    box[2] = box[2] < box[0] ? box[0] : box[2];
    box[3] = box[3] < box[1] ? box[1] : box[3];
  }
  return true;
}

// The bins along an axis: how long they are and how many samples each has.
template <typename A>
struct Bins {
  A size;
  int64_t samples;
};
template <typename A>
VISDET_HOST_DEVICE Bins<A> bins_of(const RoIAlignProblem& p, A extent, int64_t bins) {
  if (!p.aligned && !(extent > A(1))) extent = A(1);
  const A size = extent / static_cast<A>(bins);
  const A wanted = p.sampling_ratio > 0 ? static_cast<A>(p.sampling_ratio) : ceil(size);
  const bool is_countable = wanted > 0 && wanted * static_cast<A>(bins) < A(1u << 31);  // false for NaN
  return {size, is_countable ? static_cast<int64_t>(wanted) : 0};
}

inline void check_roi_align_problem(const char* op, const RoIAlignProblem& p, const Tensor& values,
                                    const Tensor& rois) {
  check_rois(op, rois, values);
  check_roi_sizes(op, p);
  VISDET_CHECK(op, p.scale > 0 && p.scale * 0 == 0, "spatial_scale must be positive and finite, got ", p.scale);
  const int64_t bins = p.PH <= INT32_MAX / p.PW ? p.PH * p.PW : INT32_MAX;
  VISDET_CHECK(
      op,
      p.sampling_ratio < 46341 && (p.sampling_ratio <= 0 || p.sampling_ratio * p.sampling_ratio <= INT32_MAX / bins),
      "sampling_ratio must give a region fewer than 2^31 samples, got ", p.sampling_ratio, " for ", p.PH, " x ", p.PW,
      " bins");
}

// rois may have five columns, or the six of rotated regions.
inline bool check_columns(const char* op, const Tensor& rois) {
  const bool is_rotated = rois.dim() == 2 && rois.size(1) == 6;
  check_shape(op, "rois", rois, {"N", is_rotated ? 6 : 5}, " or [N, 6]");
  return is_rotated;
}

inline RoIAlignProblem check_roi_align(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW, double scale,
                                       int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align";
  check_shape(op, "input", input, {"B", "C", "H", "W"});
  const bool is_rotated = check_columns(op, rois);
  const RoIAlignProblem problem{input.size(0), input.size(1),  input.size(2), input.size(3), rois.size(0), PH, PW,
                                scale,         sampling_ratio, aligned,       is_rotated};
  check_roi_align_problem(op, problem, input, rois);
  return problem;
}

inline RoIAlignProblem check_roi_align_backward(const Tensor& grad_output, const Tensor& rois, int64_t B, int64_t H,
                                                int64_t W, double scale, int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align_backward";
  const bool is_rotated = check_columns(op, rois);
  check_shape(op, "grad_output", grad_output, {rois.size(0), "C", "PH", "PW"});
  const RoIAlignProblem problem{
      B,     grad_output.size(1), H,       W,         rois.size(0), grad_output.size(2), grad_output.size(3),
      scale, sampling_ratio,      aligned, is_rotated};
  check_roi_align_problem(op, problem, grad_output, rois);
  return problem;
}

}  // namespace visdet

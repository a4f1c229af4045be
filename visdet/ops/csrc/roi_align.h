// roi_align, its averages on the CPU: the contract.
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
// weighted sums over columns.
//
// Regions are those that bounded_rois in visdet/ops/_roi_sampling.py returns. Others break nothing: a region of no
// image of the batch (a whole number 0 to B - 1), with NaN or an infinity among its numbers, or with 2^31 samples or more along an axis gives 0.
#pragma once

#include "common/rois.h"

namespace visdet {

struct RoIAlignProblem {
  int64_t B, C, H, W, N, PH, PW;
  double scale;
  int64_t sampling_ratio;
  bool aligned;
};

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

inline RoIAlignProblem check_roi_align(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW, double scale,
                                       int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align";
  check_shape(op, "input", input, {"B", "C", "H", "W"});
  check_shape(op, "rois", rois, {"N", 5});
  const RoIAlignProblem problem{input.size(0), input.size(1),  input.size(2), input.size(3), rois.size(0), PH, PW,
                                scale,         sampling_ratio, aligned};
  check_roi_align_problem(op, problem, input, rois);
  return problem;
}

inline RoIAlignProblem check_roi_align_backward(const Tensor& grad_output, const Tensor& rois, int64_t B, int64_t H,
                                                int64_t W, double scale, int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align_backward";
  check_shape(op, "rois", rois, {"N", 5});
  check_shape(op, "grad_output", grad_output, {rois.size(0), "C", "PH", "PW"});
  const RoIAlignProblem problem{
      B,     grad_output.size(1), H,      W, rois.size(0), grad_output.size(2), grad_output.size(3),
      scale, sampling_ratio,      aligned};
  check_roi_align_problem(op, problem, grad_output, rois);
  return problem;
}

}  // namespace visdet

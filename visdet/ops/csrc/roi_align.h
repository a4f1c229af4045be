// roi_align, its averages on the CPU: the contract.
//
// input [B, C, H, W], rois [N, 5] = (batch index, x1, y1, x2, y2), float64 for float64 input, float32 otherwise.
// Along x, with shift = 0.5 if aligned and 0 if not: start = x1 * scale - shift, extent = (x2 * scale - shift) - start,
// at least 1 if not aligned, and size = extent / PW. Bin q has `samples` samples, sampling_ratio of them or, if that is
// 0, ceil(size): sample i is at (start + q * size) + (i + 0.5) * size / samples. Along y likewise.
//
// A sample at position x counts iff -1 <= x <= W. It is clamped to 0 .. W - 1 and shared by the pixels floor(x) and
// floor(x) + 1, the latter if the map has it; a pixel whose share is 0 is read too, so that NaN in it shows.
// output[n, c, p, q] is the sum of the bin's samples, each a share along y times a share along x, divided by their
// number: 0 without any. Since the shares along y and x are independent, so is the average: a bin is a weighted sum
// over rows of weighted sums over columns.
//
// Regions are those that bounded_rois in visdet/ops/_roi_sampling.py returns. Others break nothing: a region of no
// image of the batch, with NaN or an infinity among its numbers, or with 2^31 samples or more along an axis gives 0.
#pragma once

#include "common/checks.h"

namespace visdet {

struct RoIAlignProblem {
  int64_t B, C, H, W, N, PH, PW;
  double scale;
  int64_t sampling_ratio;
  bool aligned;
};

inline void check_roi_align_problem(const char* op, const RoIAlignProblem& p, const Tensor& values,
                                    const Tensor& rois) {
  VISDET_CHECK(op, is_value_dtype(values.scalar_type()), "input must be float64, float32, float16 or bfloat16, got ",
               dtype_text(values));
  VISDET_CHECK(op, rois.scalar_type() == accumulate_dtype(values.scalar_type()), "rois must be ",
               torch::headeronly::toString(accumulate_dtype(values.scalar_type())), ", got ", dtype_text(rois));
  VISDET_CHECK(op, on_device_of(values, rois), "rois must be on the device of input");
  VISDET_CHECK(op, p.PH > 0 && p.PW > 0, "output_size must be positive, got ", p.PH, " x ", p.PW);
  VISDET_CHECK(op, p.B >= 0 && p.H >= 0 && p.W >= 0, "input's sizes must not be negative, got ", p.B, ", ", p.H, ", ",
               p.W);
  VISDET_CHECK(op, p.H == 0 || p.W <= INT32_MAX / p.H, "input must have fewer than 2^31 pixels, got ", p.H, " x ", p.W);
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
  VISDET_CHECK(op, input.dim() == 4, "input must be [B, C, H, W], got ", shape_text(input));
  VISDET_CHECK(op, rois.dim() == 2 && rois.size(1) == 5, "rois must be [N, 5], got ", shape_text(rois));
  const RoIAlignProblem problem{input.size(0), input.size(1),  input.size(2), input.size(3), rois.size(0), PH, PW,
                                scale,         sampling_ratio, aligned};
  check_roi_align_problem(op, problem, input, rois);
  return problem;
}

inline RoIAlignProblem check_roi_align_backward(const Tensor& grad_output, const Tensor& rois, int64_t B, int64_t H,
                                                int64_t W, double scale, int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align_backward";
  VISDET_CHECK(op, rois.dim() == 2 && rois.size(1) == 5, "rois must be [N, 5], got ", shape_text(rois));
  VISDET_CHECK(op, grad_output.dim() == 4 && grad_output.size(0) == rois.size(0), "grad_output must be [", rois.size(0),
               ", C, PH, PW], got ", shape_text(grad_output));
  const RoIAlignProblem problem{
      B,     grad_output.size(1), H,      W, rois.size(0), grad_output.size(2), grad_output.size(3),
      scale, sampling_ratio,      aligned};
  check_roi_align_problem(op, problem, grad_output, rois);
  return problem;
}

}  // namespace visdet

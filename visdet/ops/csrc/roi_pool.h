// roi_pool: the contract.
//
// input [B, C, H, W], rois [N, 5] = (batch index, x1, y1, x2, y2), float64 for float64 input, float32 otherwise.
// With start = x1 * scale, end = (x2 + 1) * scale and width = (end - start) / PW, bin q covers the columns
// floor(q * width + start) .. ceil((q + 1) * width + start) - 1 that the map has; rows likewise. Each product and sum
// is rounded on its own: a fused multiply-add would move bins that end on a pixel.
//
// output[n, c, p, q] is the greatest value of the bin, argmax [N, C, PH, PW] (int32) its index into H * W: the first in
// reading order of equal ones; NaN counts as -inf. A bin without pixels, and a region without area or of no image of
// the batch, gives 0 and -1.
#pragma once

#include "common/checks.h"

namespace visdet {

struct RoIPoolProblem {
  int64_t B, C, H, W, N, PH, PW;
};

inline void check_roi_input(const char* op, const char* name, const Tensor& tensor, const Tensor& input) {
  VISDET_CHECK(op, on_device_of(input, tensor), name, " must be on the device of input");
}

inline void check_rois(const char* op, const Tensor& rois, ScalarType value_type) {
  VISDET_CHECK(op, is_value_dtype(value_type), "input must be float64, float32, float16 or bfloat16, got ",
               torch::headeronly::toString(value_type));
  VISDET_CHECK(op, rois.dim() == 2 && rois.size(1) == 5, "rois must be [N, 5], got ", shape_text(rois));
  const ScalarType type = accumulate_dtype(value_type);
  VISDET_CHECK(op, rois.scalar_type() == type, "rois must be ", torch::headeronly::toString(type), ", got ",
               dtype_text(rois));
}

inline void check_roi_pool_sizes(const char* op, const RoIPoolProblem& p) {
  VISDET_CHECK(op, p.PH > 0 && p.PW > 0, "output_size must be positive, got ", p.PH, " x ", p.PW);
  VISDET_CHECK(op, p.H == 0 || p.W <= INT32_MAX / p.H, "input must have fewer than 2^31 pixels, got ", p.H, " x ", p.W);
}

inline RoIPoolProblem check_roi_pool(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW) {
  constexpr const char* op = "roi_pool";
  VISDET_CHECK(op, input.dim() == 4, "input must be [B, C, H, W], got ", shape_text(input));
  check_rois(op, rois, input.scalar_type());
  check_roi_input(op, "rois", rois, input);
  const RoIPoolProblem problem{input.size(0), input.size(1), input.size(2), input.size(3), rois.size(0), PH, PW};
  check_roi_pool_sizes(op, problem);
  return problem;
}

inline RoIPoolProblem check_roi_pool_backward(const Tensor& grad_output, const Tensor& rois, const Tensor& argmax,
                                              int64_t B, int64_t H, int64_t W) {
  constexpr const char* op = "roi_pool_backward";
  check_rois(op, rois, grad_output.scalar_type());
  VISDET_CHECK(op, grad_output.dim() == 4 && grad_output.size(0) == rois.size(0), "grad_output must be [", rois.size(0),
               ", C, PH, PW], got ", shape_text(grad_output));
  VISDET_CHECK(op, argmax.dim() == 4 && argmax.scalar_type() == ScalarType::Int,
               "argmax must be int32 of four dimensions, got ", dtype_text(argmax), " ", shape_text(argmax));
  for (int d = 0; d < 4; ++d) {
    VISDET_CHECK(op, argmax.size(d) == grad_output.size(d), "argmax must be ", shape_text(grad_output), ", got ",
                 shape_text(argmax));
  }
  VISDET_CHECK(op, B >= 0 && H >= 0 && W >= 0, "input's sizes must not be negative, got ", B, ", ", H, ", ", W);
  check_roi_input(op, "rois", rois, grad_output);
  check_roi_input(op, "argmax", argmax, grad_output);
  const RoIPoolProblem problem{B, grad_output.size(1), H, W, rois.size(0), grad_output.size(2), grad_output.size(3)};
  check_roi_pool_sizes(op, problem);
  return problem;
}

}  // namespace visdet

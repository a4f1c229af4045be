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

#include <cstdint>

#include "cpu/windows.h"

namespace visdet {

struct RoIPoolProblem {
  int64_t B, C, H, W, N, PH, PW;
};

template <typename T>
struct RoIPoolArrays : RoIPoolProblem {
  const T* input;   // [B, C, H, W]
  T* output;        // [N, C, PH, PW]
  int32_t* argmax;  // [N, C, PH, PW]
};

// A region: its bins, half-open intervals inside the map, and the smallest window around them.
struct RoIPoolRegion {
  int64_t n;
  const int32_t* rows;     // [PH, 2]
  const int32_t* columns;  // [PW, 2]
  Window window;
};

template <typename T, typename A>
struct RoIPoolKernels {
  LayOutWindow<T, A> lay_out;
  // Pools one region over a block of channels from c0 on. pixels [window, kBlock] holds at least the region's window.
  // peaks and indices: scratch of [PH * PW, kBlock] each.
  void (*pool)(const RoIPoolArrays<T>& a, const RoIPoolRegion& region, int64_t c0, const Window& window,
               const A* pixels, A* peaks, int32_t* indices);
};

}  // namespace visdet

#ifndef VISDET_ISA  // The files of the CPU kernels include nothing of torch.
#include "common/rois.h"

namespace visdet {

inline RoIPoolProblem check_roi_pool(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW) {
  constexpr const char* op = "roi_pool";
  check_shape(op, "input", input, {"B", "C", "H", "W"});
  check_shape(op, "rois", rois, {"N", 5});
  check_rois(op, rois, input);
  const RoIPoolProblem problem{input.size(0), input.size(1), input.size(2), input.size(3), rois.size(0), PH, PW};
  check_roi_sizes(op, problem);
  return problem;
}

inline RoIPoolProblem check_roi_pool_backward(const Tensor& grad_output, const Tensor& rois, const Tensor& argmax,
                                              int64_t B, int64_t H, int64_t W) {
  constexpr const char* op = "roi_pool_backward";
  check_shape(op, "rois", rois, {"N", 5});
  check_rois(op, rois, grad_output);
  check_shape(op, "grad_output", grad_output, {rois.size(0), "C", "PH", "PW"});
  const RoIPoolProblem problem{B, grad_output.size(1), H, W, rois.size(0), grad_output.size(2), grad_output.size(3)};
  check_shape(op, "argmax", argmax, {problem.N, problem.C, problem.PH, problem.PW});
  VISDET_CHECK(op, argmax.scalar_type() == ScalarType::Int, "argmax must be int32, got ", dtype_text(argmax));
  check_device(op, "argmax", argmax, "grad_output", grad_output);
  check_roi_sizes(op, problem);
  return problem;
}

}  // namespace visdet
#endif

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
#include <cmath>
#include <tuple>

#include "common/each.h"
#include "common/rois.h"

namespace visdet {

// Bin k of `count` between start and end, cut to 0..size. It is empty where its ends are NaN, as those of an infinite
// region are. float32 may not be able to represent `size`, which is therefore compared as an integer.
template <typename A>
VISDET_HOST_DEVICE void bin_of(A start, A end, int k, int64_t count, int64_t size, int32_t& begin, int32_t& stop) {
  const A width = sum(end, -start) / static_cast<A>(count), most = A(int64_t{1} << 31);
  const A first = floor(sum(product(A(k), width), start)), last = ceil(sum(product(A(k + 1), width), start));
  const int64_t low = first < most ? (first > 0 ? static_cast<int64_t>(first) : 0) : size;
  const int64_t high = last > 0 ? (last < most ? static_cast<int64_t>(last) : size) : 0;
  begin = static_cast<int32_t>(low < size ? low : size), stop = static_cast<int32_t>(high < size ? high : size);
}

// Computes the maxima and where they are.
template <typename T, typename A>
void pool_to_maxima(const OnDevice& device, const RoIPoolArrays<T>& a, const A* rois, A scale);

inline std::tuple<Tensor, Tensor> roi_pool_forward(const Tensor& input_in, const Tensor& rois_in, int64_t PH,
                                                   int64_t PW, double spatial_scale) {
  constexpr const char* op = "roi_pool";
  check_shape(op, "input", input_in, {"B", "C", "H", "W"});
  check_shape(op, "rois", rois_in, {"N", 5});
  check_rois(op, rois_in, input_in);
  const RoIPoolProblem problem{
      input_in.size(0), input_in.size(1), input_in.size(2), input_in.size(3), rois_in.size(0), PH, PW};
  check_roi_sizes(op, problem);
  const OnDevice device(op, input_in);
  const Tensor input = dense(input_in), rois = dense(rois_in);
  Tensor output = new_empty(input, {problem.N, problem.C, PH, PW});
  Tensor argmax = new_empty(input, {problem.N, problem.C, PH, PW}, ScalarType::Int);
  if (output.numel() == 0) return {output, argmax};
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    const RoIPoolArrays<T> a{problem, data_of(input), data_of(output), data_of(argmax)};
    pool_to_maxima(device, a, data_of<A>(rois), static_cast<A>(spatial_scale));
  });
  return {output, argmax};
}

// Adds up the gradient, which is 0 before.
template <typename T, typename A>
void scatter_to_maxima(const OnDevice& device, const RoIPoolProblem& p, const T* grad_output, const A* rois,
                       const int32_t* argmax, A* sums);

inline Tensor roi_pool_backward(const Tensor& grad_output_in, const Tensor& rois_in, const Tensor& argmax_in, int64_t B,
                                int64_t H, int64_t W) {
  constexpr const char* op = "roi_pool_backward";
  check_shape(op, "rois", rois_in, {"N", 5});
  check_rois(op, rois_in, grad_output_in);
  check_shape(op, "grad_output", grad_output_in, {rois_in.size(0), "C", "PH", "PW"});
  const RoIPoolProblem problem{
      B, grad_output_in.size(1), H, W, rois_in.size(0), grad_output_in.size(2), grad_output_in.size(3)};
  check_typed(op, "argmax", argmax_in, {problem.N, problem.C, problem.PH, problem.PW}, ScalarType::Int, "grad_output",
              grad_output_in);
  check_roi_sizes(op, problem);
  const OnDevice device(op, grad_output_in);
  const Tensor grad_output = dense(grad_output_in), rois = dense(rois_in), argmax = dense(argmax_in);
  Tensor grad_input = new_empty(rois, {B, problem.C, H, W});
  zero_(grad_input);
  if (grad_output.numel() == 0 || grad_input.numel() == 0) return grad_input;
  dispatch_value_type(grad_output.scalar_type(), [&]<typename T, typename A>(T, A) {
    scatter_to_maxima(device, problem, data_of<T>(grad_output), data_of<A>(rois), data_of<int32_t>(argmax),
                      mutable_data_of<A>(grad_input));
  });
  return grad_input;
}

VISDET_OPERATORS(roi_pool, m) {
  m.impl("roi_pool", TORCH_BOX(&roi_pool_forward));
  m.impl("roi_pool_backward", TORCH_BOX(&roi_pool_backward));
}

}  // namespace visdet
#endif

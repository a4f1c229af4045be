// deform_conv2d: the contract.
//
// input [B, C, H, W], offset [B, G * KH * KW * 2, H', W'] (y, x), mask [B, G * KH * KW, H', W'] or none, weight [M, C /
// groups, KH, KW], all of one type. Tap k = (i, j) of output position (y, x) reads channel c of the input, g = c / (C /
// G) rounded down, at the pixel
//
//   (y * stride - padding + i * dilation + offset[b, g, k, 0, y, x], x * stride - ... + j * ... + offset[b, g, k, 1,
//   ..])
//
// by the border rule of common/bilinear.h, times mask[b, g, k, y, x]: columns[b, c, k, y, x]. The output is the grouped
// matrix product of weight and columns. Positions, weights of corners and sums are float32 (float64 for float64).
//
// On CUDA columns and their gradient are of the type of the input, as the operands of the product are; as many images
// are taken at a time as keep the columns small, at most im2col_step. The gradients of offset, mask and weight are sums
// in a fixed order; that of input is added atomically, in float32 (float64).
//
// On the CPU columns and the operands of the product are float32 (float64), of some positions at a time: im2col_step
// plays no part. All sums are taken in a fixed order.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/each.h"

namespace visdet {

struct DeformConvProblem {
  int64_t B, C, H, W;     // of the input
  int64_t M, KH, KW;      // of the weight
  int64_t height, width;  // of the output
  int64_t groups, G;      // of weights, of offsets
  std::vector<int64_t> stride, padding, dilation;
  int64_t step;  // images at a time, at most, on CUDA

  int64_t taps() const { return KH * KW; }
  int64_t positions() const { return height * width; }
};

inline DeformConvProblem check_deform_conv(const char* op, const Tensor& input, const Tensor& offset,
                                           const Tensor* mask, const Tensor& weight, const std::vector<int64_t>& stride,
                                           const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
                                           int64_t deform_groups, int64_t im2col_step) {
  check_values(op, "input", input, {"B", "C", "H", "W"});
  VISDET_CHECK(op, weight.dim() == 4 && weight.size(1) > 0 && weight.size(2) > 0 && weight.size(3) > 0,
               "weight must be [M, C / groups, KH, KW] with positive sizes, got ", shape_text(weight));
  DeformConvProblem p{};
  p.B = input.size(0), p.C = input.size(1), p.H = input.size(2), p.W = input.size(3);
  p.M = weight.size(0), p.KH = weight.size(2), p.KW = weight.size(3);
  p.G = deform_groups, p.step = im2col_step;
  p.stride = stride, p.padding = padding, p.dilation = dilation;
  VISDET_CHECK(op, p.C > 0 && p.C % weight.size(1) == 0, "input must have a multiple of ", weight.size(1),
               " channels, got ", p.C);
  p.groups = p.C / weight.size(1);
  VISDET_CHECK(op, p.M % p.groups == 0, "weight must have a multiple of ", p.groups, " output channels, got ", p.M);
  VISDET_CHECK(op, p.G >= 1 && p.C % p.G == 0, "deform_groups must divide the ", p.C, " channels of input, got ", p.G);
  VISDET_CHECK(op, p.step >= 1, "im2col_step must be at least 1, got ", p.step);
  constexpr int64_t kMost = 1 << 28, kMostPositions = 1 << 30;  // computed in int32
  VISDET_CHECK(op, p.H <= kMost && p.W <= kMost && (p.H == 0 || p.W <= kMostPositions / p.H),
               "input must have sides of at most 2^28 and 2^30 pixels, got ", p.H, " x ", p.W);
  VISDET_CHECK(op, p.KH <= 1024 && p.KW <= 1024 && weight.size(1) <= INT32_MAX / p.taps() / p.groups,
               "weight must have kernels of at most 1024 x 1024, and C * KH * KW be below 2^31, got ",
               shape_text(weight));
  const auto output_size = [&](int64_t size, int64_t kernel, int d) {
    VISDET_CHECK(op, stride.size() == 2 && padding.size() == 2 && dilation.size() == 2,
                 "stride, padding and dilation must be pairs");
    VISDET_CHECK(op,
                 stride[d] >= 1 && dilation[d] >= 1 && padding[d] >= 0 && padding[d] <= kMost &&
                     dilation[d] <= kMost / kernel && stride[d] <= kMost,
                 "stride and dilation must be positive, padding must not be negative, got ", stride[d], ", ",
                 dilation[d], ", ", padding[d]);
    const int64_t reach = size + 2 * padding[d] - dilation[d] * (kernel - 1);
    VISDET_CHECK(op, reach > 0, "input [", p.H, ", ", p.W, "] is too small for the kernel");
    return (reach - 1) / stride[d] + 1;
  };
  p.height = output_size(p.H, p.KH, 0), p.width = output_size(p.W, p.KW, 1);
  VISDET_CHECK(op, p.width <= kMostPositions / p.height, "the output must have at most 2^30 positions, got ", p.height,
               " x ", p.width);
  check_like(op, "weight", weight, {p.M, weight.size(1), p.KH, p.KW}, "input", input);
  check_like(op, "offset", offset, {p.B, p.G * p.taps() * 2, p.height, p.width}, "input", input);
  if (mask != nullptr) check_like(op, "mask", *mask, {p.B, p.G * p.taps(), p.height, p.width}, "input", input);
  return p;
}

namespace deform_conv2d {

using Ints = std::vector<int64_t>;

// The arguments of a call, none of which is empty.
struct Arguments {
  DeformConvProblem problem;
  const Tensor &input, &offset;
  const std::optional<Tensor>& mask;
  const Tensor& weight;
};

// Where the gradients go, null for those that are not wanted.
struct GradientTensors {
  Tensor *input, *offset, *mask, *weight;
};

// These write the output, and the gradients. grad_output is dense.
void compute(const OnDevice& device, const Arguments& given, Tensor& output);
void compute_gradients(const OnDevice& device, const Arguments& given, const Tensor& grad_output,
                       const GradientTensors& gradients);

inline Tensor forward(const Tensor& input, const Tensor& offset, const std::optional<Tensor>& mask,
                      const Tensor& weight, const Ints& stride, const Ints& padding, const Ints& dilation,
                      int64_t deform_groups, int64_t im2col_step) {
  constexpr const char* op = "deform_conv2d";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  const OnDevice device(op, input);
  Tensor output = new_empty(input, {p.B, p.M, p.height, p.width});
  if (output.numel() == 0 || input.numel() == 0) return zero_(output);
  compute(device, Arguments{p, input, offset, mask, weight}, output);
  return output;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input,
                                                           const Tensor& offset, const std::optional<Tensor>& mask,
                                                           const Tensor& weight, const Ints& stride,
                                                           const Ints& padding, const Ints& dilation,
                                                           int64_t deform_groups, int64_t im2col_step, bool needs_input,
                                                           bool needs_offset, bool needs_weight) {
  constexpr const char* op = "deform_conv2d_backward";
  const auto p = check_deform_conv(op, input, offset, mask ? &*mask : nullptr, weight, stride, padding, dilation,
                                   deform_groups, im2col_step);
  check_like(op, "grad_output", grad_output, {p.B, p.M, p.height, p.width}, "input", input);
  const OnDevice device(op, input);
  const auto gradient_of = [&](const Tensor& tensor, bool needs) {
    return needs ? new_like(tensor) : new_empty(tensor, {0});
  };
  const bool needs_mask = needs_offset && mask;
  Tensor grad_input = gradient_of(input, needs_input), grad_offset = gradient_of(offset, needs_offset);
  Tensor grad_mask = gradient_of(mask ? *mask : offset, needs_mask), grad_weight = gradient_of(weight, needs_weight);
  if (grad_output.numel() == 0 || input.numel() == 0) {
    return {zero_(grad_input), zero_(grad_offset), zero_(grad_mask), zero_(grad_weight)};
  }
  if (needs_input || needs_offset || needs_weight) {
    const GradientTensors gradients{needs_input ? &grad_input : nullptr, needs_offset ? &grad_offset : nullptr,
                                    needs_mask ? &grad_mask : nullptr, needs_weight ? &grad_weight : nullptr};
    compute_gradients(device, Arguments{p, input, offset, mask, weight}, dense(grad_output), gradients);
  }
  return {grad_input, grad_offset, grad_mask, grad_weight};
}

VISDET_OPERATORS(deform_conv2d, m) {
  m.impl("deform_conv2d", TORCH_BOX(&forward));
  m.impl("deform_conv2d_backward", TORCH_BOX(&backward));
}

}  // namespace deform_conv2d
}  // namespace visdet

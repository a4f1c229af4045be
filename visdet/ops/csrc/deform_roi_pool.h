// deform_roi_pool: the contract, and what CPU and CUDA compute alike.
//
// input, rois: as of roi_align with aligned = true; offset [N, 2, PH, PW] = (x, y). All samples of a bin move by
// gamma * (the region's extent) * offset, along x and y, before they are compared with the borders. A sample whose
// offset is NaN or infinite counts nothing. Types: float64 or float32, all the same.
//
// Differentiable with respect to input and offset. The derivative along an axis is that of the clamped sample: 0 before
// the first pixel and from the last one on. On CUDA, threads add to the gradient of input in any order or, if it must
// be deterministic, in whole numbers (cuda/roi_align/sums.cuh).
#pragma once

#include <tuple>

#include "common/aten.h"
#include "common/each.h"
#include "roi_align_samples.h"

namespace visdet::deform_roi_pool {

using roi_align::Corners, roi_align::kTogether;

constexpr const char *kOp = "deform_roi_pool", *kBackward = "deform_roi_pool_backward";
constexpr int kSlice = 16;  // channels over which a thread adds up the gradient of an offset

template <typename A>
struct Arrays : RoIAlignProblem {
  Bounds<A> bounds;
  A gamma;
  const A *input, *rois, *offset;
  const A* grad_output;  // backward

  VISDET_HOST_DEVICE int64_t bins() const { return this->PH * this->PW; }
  VISDET_HOST_DEVICE int64_t plane() const { return this->H * this->W; }
  int64_t parts(int together) const { return (this->C + together - 1) / together; }  // of the channels
};

// A bin and up to `together` channels: the i-th of all in the order [parts, N, bins], in which the regions of a map
// come one after another.
template <typename A>
struct Part {
  int64_t n, bin, output, map = 0;  // map, output: indices of the first channel's map and of its bin in the output
  int channels;
  roi_align::Upright<A> region;  // moved
  A share = 0, x_of_offset = 0, y_of_offset = 0;

  VISDET_HOST_DEVICE Part(const Arrays<A>& a, int64_t i, int together) {
    const int64_t row = i / a.bins();
    n = row % a.N, bin = i - row * a.bins();
    const int64_t channel = row / a.N * together;
    channels = static_cast<int>(a.C - channel < together ? a.C - channel : together);
    output = (n * a.C + channel) * a.bins() + bin;
    const A *roi = a.rois + 5 * n, *offset = a.offset + 2 * n * a.bins() + bin;
    A box[4];
    if (!bounded_region(roi, a, a.bounds, box)) {
      region.down.samples = 0, region.across.samples = 0;
      return;
    }
    map = (static_cast<int64_t>(roi[0]) * a.C + channel) * a.plane();
    region.start(roi, box, a);
    share = A(1) / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    x_of_offset = a.gamma * region.across.size * static_cast<A>(a.PW);
    y_of_offset = a.gamma * region.down.size * static_cast<A>(a.PH);
    region.x += x_of_offset * offset[0], region.y += y_of_offset * offset[a.bins()];
  }

  // Calls f(corners) for the samples that count.
  template <typename F>
  VISDET_HOST_DEVICE void for_each_sample(const Arrays<A>& a, const F& f) const {
    const int p = static_cast<int>(bin / a.PW), q = static_cast<int>(bin - p * a.PW);
    for (int i = 0; i < region.down.samples; ++i) {
      for (int j = 0; j < region.across.samples; ++j) {
        Corners<A> corners;
        if (corners_of(region, a, p, q, i, j, corners)) f(corners);
      }
    }
  }
};

// A bin of up to kTogether channels.
template <typename A>
struct Average {
  Arrays<A> a;
  A* output;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const Part<A> part(a, i, kTogether);
    const A* maps = a.input + part.map;
    A sum[kTogether] = {};
    // The weight of each sample, rather than one division behind, so that sums of large values do not overflow.
    part.for_each_sample(a, [&](const Corners<A>& corners) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (k >= part.channels) break;
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[k] += corners.weight[c] * part.share * maps[k * a.plane() + corners.at[c]];
      }
    });
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (k < part.channels) output[part.output + k * a.bins()] = sum[k];
    }
  }
};

// Adds the gradient of a bin of up to kTogether channels to `sums`, those of the input.
template <typename A, typename Sums>
struct Spread {
  Arrays<A> a;
  Sums sums;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const Part<A> part(a, i, kTogether);
    Sums to = sums;
    to.begin();
    A gradient[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      gradient[k] = k < part.channels ? a.grad_output[part.output + k * a.bins()] * part.share : A(0);
    }
    part.for_each_sample(a, [&](const Corners<A>& corners) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (k >= part.channels) break;
        for (int c = 0; c < 4; ++c) {
          to.add(part.map + k * a.plane() + corners.at[c], corners.weight[c] * gradient[k]);
        }
      }
    });
  }
};

// The gradient of a bin's offset from up to kSlice channels.
template <typename A>
struct Slope {
  Arrays<A> a;
  A* slopes;  // [slices, N, 2, PH, PW]

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const Part<A> part(a, i, kSlice);
    A sum_x = 0, sum_y = 0;
    part.for_each_sample(a, [&](const Corners<A>& corners) {
      const A *w = corners.weight, *map = a.input + part.map, *gradient = a.grad_output + part.output;
      A along_x = 0, along_y = 0;
#pragma unroll 4
      for (int k = 0; k < part.channels; ++k, map += a.plane(), gradient += a.bins()) {
        const A v[4] = {map[corners.at[0]], map[corners.at[1]], map[corners.at[2]], map[corners.at[3]]};
        along_x += *gradient * ((w[0] + w[1]) * (v[1] - v[0]) + (w[2] + w[3]) * (v[3] - v[2]));
        along_y += *gradient * ((w[0] + w[2]) * (v[2] - v[0]) + (w[1] + w[3]) * (v[3] - v[1]));
      }
      if (corners.x >= 0 && corners.at[0] != corners.at[1]) sum_x += part.share * along_x;
      if (corners.y >= 0 && corners.at[0] != corners.at[2]) sum_y += part.share * along_y;
    });
    A* to = slopes + (i - part.bin) * 2 + part.bin;
    to[0] = sum_x * part.x_of_offset, to[a.bins()] = sum_y * part.y_of_offset;
  }
};

inline RoIAlignProblem check(const char* op, const Tensor& input, const Tensor& rois, const Tensor& offset, int64_t PH,
                             int64_t PW, double scale, int64_t sampling_ratio) {
  check_sums(op, "input", input, {"B", "C", "H", "W"});
  check_shape(op, "rois", rois, {"N", 5});
  const RoIAlignProblem p{input.size(0), input.size(1),  input.size(2), input.size(3), rois.size(0), PH, PW,
                          scale,         sampling_ratio, true};
  check_roi_align_problem(op, p, input, rois);
  check_like(op, "offset", offset, {p.N, 2, PH, PW}, "input", input);
  return p;
}

// The tensors are dense.
template <typename A>
Arrays<A> arrays_of(const RoIAlignProblem& p, double gamma, const Tensor& input, const Tensor& rois,
                    const Tensor& offset) {
  return {p, bounds_of<A>(p), static_cast<A>(gamma), data_of(input), data_of(rois), data_of(offset), nullptr};
}

inline Tensor forward(const Tensor& input_in, const Tensor& rois_in, const Tensor& offset_in, int64_t PH, int64_t PW,
                      double scale, int64_t sampling_ratio, double gamma) {
  const auto p = check(kOp, input_in, rois_in, offset_in, PH, PW, scale, sampling_ratio);
  const OnDevice device(kOp, input_in);
  const Tensor input = dense(input_in), rois = dense(rois_in), offset = dense(offset_in);
  Tensor output = new_empty(input, {p.N, p.C, PH, PW});
  if (output.numel() == 0) return output;
  if (input.numel() == 0) return zero_(output);
  dispatch_sum_type(input.scalar_type(), [&]<typename A>(A) {
    const auto a = arrays_of<A>(p, gamma, input, rois, offset);
    device.each(p.N * a.parts(kTogether) * a.bins(), 64 * kTogether, Average<A>{a, data_of(output)});
  });
  return output;
}

// Adds up the gradient of input, which is 0 before.
template <typename A>
void spread(const OnDevice& device, const Arrays<A>& a, const Tensor& grad_output, Tensor& grad_input,
            bool deterministic);

inline std::tuple<Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& input_in, const Tensor& rois_in,
                                           const Tensor& offset_in, int64_t PH, int64_t PW, double scale,
                                           int64_t sampling_ratio, double gamma, bool needs_input, bool needs_offset,
                                           bool deterministic) {
  const auto p = check(kBackward, input_in, rois_in, offset_in, PH, PW, scale, sampling_ratio);
  check_like(kBackward, "grad_output", grad_output_in, {p.N, p.C, PH, PW}, "input", input_in);
  const OnDevice device(kBackward, input_in);
  const Tensor grad_output = dense(grad_output_in), input = dense(input_in), rois = dense(rois_in),
               offset = dense(offset_in);
  Tensor grad_input = needs_input ? new_like(input) : new_empty(input, {0});
  Tensor grad_offset = needs_offset ? new_like(offset) : new_empty(offset, {0});
  zero_(grad_input);
  if (grad_output.numel() == 0 || input.numel() == 0) return {grad_input, zero_(grad_offset)};
  dispatch_sum_type(input.scalar_type(), [&]<typename A>(A) {
    auto a = arrays_of<A>(p, gamma, input, rois, offset);
    a.grad_output = data_of(grad_output);
    if (needs_input) spread(device, a, grad_output, grad_input, deterministic);
    if (!needs_offset) return;
    const int64_t slices = a.parts(kSlice);
    const Tensor slopes = new_empty(input, {slices, p.N, 2, PH, PW});
    device.each(p.N * slices * a.bins(), 64 * kSlice, Slope<A>{a, data_of(slopes)});
    grad_offset = sum_of_slices(slopes);
  });
  return {grad_input, grad_offset};
}

VISDET_OPERATORS(deform_roi_pool, m) {
  m.impl("deform_roi_pool", TORCH_BOX(&forward));
  m.impl("deform_roi_pool_backward", TORCH_BOX(&backward));
}

}  // namespace visdet::deform_roi_pool

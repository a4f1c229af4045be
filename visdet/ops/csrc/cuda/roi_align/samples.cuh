// Where the samples of a region lie, and bins as loops over them, for regions of any shape. A geometry is a struct with
// start(), which reads a region, and place(), which places a sample.
#pragma once

#include "common/values.cuh"
#include "roi_align.h"

namespace visdet::roi_align {

constexpr int kTogether = 4;  // channels that a thread samples at a time, for which it places a sample once

// The pixels around a sample along one axis: `low` and, where the axis has it, the next. Returns whether the sample
// counts.
template <typename A>
__device__ __forceinline__ bool locate_on_axis(A position, int size, int& low, A& fraction) {
  if (!(position >= A(-1) && position <= static_cast<A>(size))) return false;
  position = position > 0 ? position : A(0);
  low = min(static_cast<int>(position), size - 1);  // saturates
  fraction = low + 1 < size ? position - static_cast<A>(low) : A(0);
  return true;
}

// The bins of a region in its own frame: bin (p, q) begins at (y, x) + (p, q) * size.
template <typename A>
struct Frame {
  A x, y;
  Bins<A> down, across;

  // Along one axis: sample i of bin k.
  static __device__ __forceinline__ A at(A start, const Bins<A>& bins, int k, int i) {
    return start + static_cast<A>(k) * bins.size +
           (static_cast<A>(i) + A(0.5)) * bins.size / static_cast<A>(bins.samples);
  }
};

template <typename A>
struct Upright : Frame<A> {
  static constexpr int kColumns = 5;

  // box: the numbers of a region that bounded_region() wrote.
  __device__ __forceinline__ void start(const A*, const A (&box)[4], const RoIAlignProblem& p) {
    const A scale = static_cast<A>(p.scale), shift = p.aligned ? A(0.5) : A(0);
    this->x = plus(times(box[0], scale), -shift), this->y = plus(times(box[1], scale), -shift);
    this->across = bins_of(p, plus(plus(times(box[2], scale), -shift), -this->x), p.PW);
    this->down = bins_of(p, plus(plus(times(box[3], scale), -shift), -this->y), p.PH);
  }
  __device__ __forceinline__ void place(A& x, A& y) const {}
};

template <typename A>
struct Rotated : Frame<A> {
  static constexpr int kColumns = 6;
  A center_x, center_y, cosine, sine;

  __device__ __forceinline__ void start(const A* roi, const A (&box)[4], const RoIAlignProblem& p) {
    const A scale = static_cast<A>(p.scale), shift = p.aligned ? A(0.5) : A(0);
    A width = times(box[2], scale), height = times(box[3], scale);
    this->across = bins_of(p, width, p.PW), this->down = bins_of(p, height, p.PH);
    if (!p.aligned) width = width > 1 ? width : A(1), height = height > 1 ? height : A(1);
    this->x = -width / 2, this->y = -height / 2;
    center_x = plus(times(box[0], scale), -shift), center_y = plus(times(box[1], scale), -shift);
    cosine = cos(roi[5]), sine = sin(roi[5]);  // NaN for an infinite angle: then no sample counts
  }
  __device__ __forceinline__ void place(A& x, A& y) const {
    const A right = x * cosine + y * sine + center_x;
    y = y * cosine - x * sine + center_y, x = right;
  }
};

// A sample's corners: offsets into a map, and weights.
template <typename A>
struct Corners {
  int at[4];
  A weight[4];
};

template <typename Geometry, typename A>
__device__ __forceinline__ bool corners_of(const Geometry& region, const RoIAlignProblem& p, int bin_p, int bin_q,
                                           int i, int j, Corners<A>& corners) {
  A x = Geometry::at(region.x, region.across, bin_q, j), y = Geometry::at(region.y, region.down, bin_p, i), fx, fy;
  region.place(x, y);
  const int H = static_cast<int>(p.H), W = static_cast<int>(p.W);
  int left, top;
  if (!locate_on_axis(x, W, left, fx) || !locate_on_axis(y, H, top, fy)) return false;
  const int right = min(left + 1, W - 1), bottom = min(top + 1, H - 1);
  corners.at[0] = top * W + left, corners.at[1] = top * W + right;
  corners.at[2] = bottom * W + left, corners.at[3] = bottom * W + right;
  corners.weight[0] = (1 - fy) * (1 - fx), corners.weight[1] = (1 - fy) * fx;
  corners.weight[2] = fy * (1 - fx), corners.weight[3] = fy * fx;
  return true;
}

// Calls f(bin, channel, count) for every bin and every run of up to kTogether of the `channels` channels, one after
// another in the threads of a block.
template <typename F>
__device__ __forceinline__ void for_each_run(int bins, int channels, const F& f) {
  const int items = (channels + kTogether - 1) / kTogether * bins;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int run = item / bins, channel = run * kTogether;
    f(item - run * bins, channel, min(kTogether, channels - channel));
  }
}

// For all threads of a block: writes the bins of a region. maps, output: those of the first of `channels` channels.
template <typename T, typename A, typename Geometry>
__device__ void average_by_samples(const Geometry& region, const RoIAlignProblem& p, int channels, const T* maps,
                                   T* output) {
  const int bins = static_cast<int>(p.PH * p.PW);
  const int64_t plane = p.H * p.W;
  for_each_run(bins, channels, [&](int bin, int channel, int count) {
    const T* from = maps + channel * plane;
    const int bin_p = bin / static_cast<int>(p.PW), bin_q = bin % static_cast<int>(p.PW);
    A sum[kTogether] = {};
    // The weight of each sample, rather than one division behind, so that sums of large values do not overflow.
    const A share = A(1) / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    for (int i = 0; i < region.down.samples; ++i) {
      for (int j = 0; j < region.across.samples; ++j) {
        Corners<A> corners;
        if (!corners_of(region, p, bin_p, bin_q, i, j, corners)) continue;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (k >= count) break;
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            sum[k] += corners.weight[corner] * share * to_accumulate(from[k * plane + corners.at[corner]]);
          }
        }
      }
    }
    for (int k = 0; k < count; ++k) {
      output[(channel + k) * static_cast<int64_t>(bins) + bin] = from_accumulate<T>(sum[k]);
    }
  });
}

// For all threads of a block: adds the gradient of a region to `sums` from the index `first` on.
template <typename T, typename A, typename Geometry, typename Sums>
__device__ void spread_by_samples(const Geometry& region, const RoIAlignProblem& p, int channels, const T* grad_output,
                                  const Sums& sums, int64_t first) {
  const int bins = static_cast<int>(p.PH * p.PW);
  const int64_t plane = p.H * p.W;
  for_each_run(bins, channels, [&](int bin, int channel, int count) {
    const int bin_p = bin / static_cast<int>(p.PW), bin_q = bin % static_cast<int>(p.PW);
    A gradient[kTogether];
    for (int k = 0; k < count; ++k) {
      gradient[k] = to_accumulate(grad_output[(channel + k) * static_cast<int64_t>(bins) + bin]);
    }
    const A share = A(1) / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    for (int i = 0; i < region.down.samples; ++i) {
      for (int j = 0; j < region.across.samples; ++j) {
        Corners<A> corners;
        if (!corners_of(region, p, bin_p, bin_q, i, j, corners)) continue;
        for (int k = 0; k < count; ++k) {
          for (int corner = 0; corner < 4; ++corner) {
            sums.add(first + (channel + k) * plane + corners.at[corner], corners.weight[corner] * share * gradient[k]);
          }
        }
      }
    }
  });
}

}  // namespace visdet::roi_align

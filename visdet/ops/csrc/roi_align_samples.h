// Where the samples of a region of roi_align lie, for host and device.
//
// A geometry is a struct with start(), which reads a region, and place(), which places a sample.
#pragma once

#if !defined(__CUDACC__)
#include <algorithm>
#include <cmath>
#endif

#include "roi_align.h"

namespace visdet::roi_align {

#if !defined(__CUDACC__)
using std::cos, std::min, std::sin;  // CUDA has its own
#endif

constexpr int kTogether = 4;  // channels that a thread samples at a time, for which it places a sample once

// The pixels around a sample along one axis: `low` and, where the axis has it, the next. Returns whether the sample
// counts.
template <typename A>
VISDET_HOST_DEVICE bool locate_on_axis(A position, int size, int& low, A& fraction) {
  if (!(position >= A(-1) && position <= static_cast<A>(size))) return false;
  position = position > 0 ? position : A(0);
  low = min(static_cast<int>(position), size - 1);  // saturates on CUDA
  fraction = low + 1 < size ? position - static_cast<A>(low) : A(0);
  return true;
}

// The bins of a region in its own frame: bin (p, q) begins at (y, x) + (p, q) * size.
template <typename A>
struct Frame {
  A x, y;
  Bins<A> down, across;

  // Along one axis: sample i of bin k.
  static VISDET_HOST_DEVICE A at(A start, const Bins<A>& bins, int k, int i) {
    return start + static_cast<A>(k) * bins.size +
           (static_cast<A>(i) + A(0.5)) * bins.size / static_cast<A>(bins.samples);
  }
};

template <typename A>
struct Upright : Frame<A> {
  static constexpr int kColumns = 5;

  // box: the numbers of a region that bounded_region() wrote.
  VISDET_HOST_DEVICE void start(const A*, const A (&box)[4], const RoIAlignProblem& p) {
    const A scale = static_cast<A>(p.scale), shift = p.aligned ? A(0.5) : A(0);
    this->x = sum(product(box[0], scale), -shift), this->y = sum(product(box[1], scale), -shift);
    this->across = bins_of(p, sum(sum(product(box[2], scale), -shift), -this->x), p.PW);
    this->down = bins_of(p, sum(sum(product(box[3], scale), -shift), -this->y), p.PH);
  }
  VISDET_HOST_DEVICE void place(A& x, A& y) const {}
};

template <typename A>
struct Rotated : Frame<A> {
  static constexpr int kColumns = 6;
  A center_x, center_y, cosine, sine;

  VISDET_HOST_DEVICE void start(const A* roi, const A (&box)[4], const RoIAlignProblem& p) {
    const A scale = static_cast<A>(p.scale), shift = p.aligned ? A(0.5) : A(0);
    A width = product(box[2], scale), height = product(box[3], scale);
    this->across = bins_of(p, width, p.PW), this->down = bins_of(p, height, p.PH);
    if (!p.aligned) width = width > 1 ? width : A(1), height = height > 1 ? height : A(1);
    this->x = -width / 2, this->y = -height / 2;
    center_x = sum(product(box[0], scale), -shift), center_y = sum(product(box[1], scale), -shift);
    cosine = cos(roi[5]), sine = sin(roi[5]);  // NaN for an infinite angle: then no sample counts
  }
  VISDET_HOST_DEVICE void place(A& x, A& y) const {
    const A right = x * cosine + y * sine + center_x;
    y = y * cosine - x * sine + center_y, x = right;
  }
};

// A sample's corners: offsets into a map, and weights.
template <typename A>
struct Corners {
  A x, y;  // where the sample is
  int at[4];
  A weight[4];
};

template <typename Geometry, typename A>
VISDET_HOST_DEVICE bool corners_of(const Geometry& region, const RoIAlignProblem& p, int bin_p, int bin_q, int i, int j,
                                   Corners<A>& corners) {
  A x = Geometry::at(region.x, region.across, bin_q, j), y = Geometry::at(region.y, region.down, bin_p, i), fx, fy;
  region.place(x, y);
  const int H = static_cast<int>(p.H), W = static_cast<int>(p.W);
  int left, top;
  if (!locate_on_axis(x, W, left, fx) || !locate_on_axis(y, H, top, fy)) return false;
  const int right = min(left + 1, W - 1), bottom = min(top + 1, H - 1);
  corners.x = x, corners.y = y;
  corners.at[0] = top * W + left, corners.at[1] = top * W + right;
  corners.at[2] = bottom * W + left, corners.at[3] = bottom * W + right;
  corners.weight[0] = (1 - fy) * (1 - fx), corners.weight[1] = (1 - fy) * fx;
  corners.weight[2] = fy * (1 - fx), corners.weight[3] = fy * fx;
  return true;
}

}  // namespace visdet::roi_align

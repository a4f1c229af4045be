// The kinds of boxes that nms suppresses: how each is read, and when one suppresses another. ../../nms.h says what the
// overlap is.
#pragma once

#include <cuda_runtime.h>

#include "common/box_overlap.h"
#include "common/rounded.cuh"

namespace visdet::nms {

template <typename A>
struct AlignedBoxes {
  struct Box {
    A x1, y1, x2, y2, area;
  };
  static constexpr int kNumbers = 4, kUnrolled = 16;
  A limit, low;  // AlignedLimit

  __device__ static Box box_of(const A* box) {
    return {box[0], box[1], box[2], box[3], product(sum(box[2], -box[0]), sum(box[3], -box[1]))};
  }
  // A NaN corner makes the area NaN, so that the minima and maxima may ignore it.
  __device__ __forceinline__ bool suppresses(const Box& better, const Box& other) const {
    A width = sum(min(better.x2, other.x2), -max(better.x1, other.x1));
    A height = sum(min(better.y2, other.y2), -max(better.y1, other.y1));
    width = width > 0 ? width : A(0), height = height > 0 ? height : A(0);
    const A shared = product(width, height), both = sum(sum(better.area, other.area), -shared);
    if (limit >= 0 && !(shared > 0 && shared >= product(low, both))) return false;
    return quotient(shared, both) > limit;
  }
};

template <typename A, bool ROTATED>
struct Polygons {
  using Box = Quadrilateral;
  static constexpr int kNumbers = ROTATED ? 5 : 8, kUnrolled = 1;
  A limit;

  __device__ static Box box_of(const A* box) { return ROTATED ? rotated_box(box) : quadrilateral(box); }
  __device__ __forceinline__ bool suppresses(const Box& better, const Box& other) const {
    return overlap_of<A, ROTATED>(better, other, OverlapMode::iou) > limit;
  }
};

}  // namespace visdet::nms

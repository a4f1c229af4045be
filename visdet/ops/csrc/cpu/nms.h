// The arguments and the table of the CPU kernel of nms for axis-aligned boxes. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

// Boxes lie in blocks of kAnyLanes: their x1, then their y1, x2, y2 and areas. Blocks are filled up with NaN.
constexpr int64_t kBoxColumns = 5;
constexpr int64_t kBoxBlock = kBoxColumns * kAnyLanes;

template <typename A>
struct NmsKernels {
  // Writes the areas of boxes [N, 4].
  void (*write_areas)(const A* boxes, int64_t N, A* areas);
  // Whether `box`, which has kBoxColumns numbers, overlaps one of the boxes in these blocks by more than limit, of
  // which low is a little less (AlignedLimit).
  bool (*is_suppressed)(const A* blocks, int64_t count, const A* box, A limit, A low);
};

}  // namespace visdet

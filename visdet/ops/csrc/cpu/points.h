// Clouds of points, as the CPU kernels read them: all x, then all y and all z.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

// Writes points [N, 3] to columns [3, stride], of which `rest` fills the ends.
template <typename A>
VISDET_INLINE void lay_out_points(const A* points, int64_t N, int64_t stride, A rest, A* columns) {
  for (int64_t n = 0; n < stride; ++n) {
    for (int axis = 0; axis < 3; ++axis) columns[axis * stride + n] = n < N ? points[3 * n + axis] : rest;
  }
}

}  // namespace visdet

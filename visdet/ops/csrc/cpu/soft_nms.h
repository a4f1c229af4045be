// The arguments and the table of the CPU kernels of soft_nms. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

enum { kX1, kY1, kX2, kY2, kArea, kScore, kColumns };

template <typename A>
struct SoftNmsArrays {
  int64_t N;
  A* column[kColumns];  // each [N + a vector]
  int64_t* index;       // [N]
  A iou_threshold, sigma, min_score, offset;
  int64_t method;
};

template <typename A>
struct SoftNmsKernels {
  int64_t lanes;  // of a vector
  // Runs all rounds and returns how many boxes remain.
  int64_t (*rounds)(const SoftNmsArrays<A>& a);
};

}  // namespace visdet

// The arguments and the table of the CPU kernels of box_key_points. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

template <typename A>
struct KeyPointsArrays {
  int64_t D, F, M;
  const A *anchors, *fixed, *logits;  // [N, D], [F, 3], [N, M * 3]
  A max_log_size;
  A* output;             // [N, F + M, 3], forward
  const A* grad_output;  // [N, F + M, 3], backward
  A *grad_anchors, *grad_logits;
};

// The kernels take anchors [begin, end). scratch has (F + M) * 3 numbers and those of a vector.
template <typename A>
struct KeyPointsKernels {
  void (*forward)(const KeyPointsArrays<A>& a, int64_t begin, int64_t end, A* scratch);
  void (*backward)(const KeyPointsArrays<A>& a, int64_t begin, int64_t end, A* scratch);
};

}  // namespace visdet

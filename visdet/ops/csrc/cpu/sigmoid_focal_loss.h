// The arguments and the table of the CPU kernels of sigmoid_focal_loss. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

template <typename T, typename A>
struct FocalArrays {
  int64_t N, C;
  const T* input;         // [N, C]
  const int64_t* target;  // [N]
  const A* weight;        // [C], or null
  A gamma, alpha;
  const T* grad_output;  // [N, C], or null: forward
  int64_t grad_step;     // 1, or 0: one number for all
  T* output;             // [N, C]: losses, or their gradients
};

// The kernels write rows [begin, end) of the losses, or of their gradients.
template <typename T, typename A>
struct FocalKernels {
  void (*losses)(const FocalArrays<T, A>& a, int64_t begin, int64_t end);
  void (*gradients)(const FocalArrays<T, A>& a, int64_t begin, int64_t end);
};

}  // namespace visdet

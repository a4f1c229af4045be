// The arguments and the table of the CPU kernels of deformable_aggregation. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

// The tensors of one call, all contiguous. TW is the type of weights.
template <typename T, typename TW, typename A>
struct DeformableAggregationArrays {
  int64_t B, S, C, V, L, Q, P, G;
  const int64_t* level_shapes;  // [V, L, 2]
  const int64_t* level_starts;  // [V, L]
  const T* features;            // [B, S, C]
  const A* locations;           // [B, Q, P, V, 2]
  const TW* weights;            // [B, Q, P, V, L, G]
  T* output;                    // [B, Q, C]     forward
  const T* grad_output;         // [B, Q, C]     backward
  const int64_t* grad_starts;   // [V, L]        first row of each map in the gradients' sums
  A* grad_locations;            // [B, Q, P, V, 2]     zeroed
  TW* grad_weights;             // [B, Q, P, V, L, G]  zeroed
};

// Whether a pair counts: strictly inside the image.
template <typename A>
VISDET_INLINE bool is_visible(const A* location) {
  return location[0] > A(0) && location[0] < A(1) && location[1] > A(0) && location[1] < A(1);
}

template <typename T, typename TW, typename A = typename AccumulateType<T>::type>
struct DeformableAggregationKernels {
  // One row (b, q) of the output. acc: scratch of C numbers.
  void (*forward_row)(const DeformableAggregationArrays<T, TW, A>& a, A* acc, int64_t row);
  // Every gradient that camera v of batch entry b has. g_row: scratch of C numbers; sums, zeroed, are the gradients of
  // features, where map (v, l) begins at row grad_starts[v, l].
  void (*backward_camera)(const DeformableAggregationArrays<T, TW, A>& a, A* g_row, A* sums, int64_t b, int64_t v);
  // Sums back to the type of features.
  void (*round_sums)(const A* from, T* to, int64_t count);
};

}  // namespace visdet

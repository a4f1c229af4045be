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
  int64_t feature_row;          // numbers from one row of features to the next
  // With depths, locations have a third coordinate.
  bool has_depths;
  int64_t D, depth_row;
  const T* depths;  // [B, S, D]

  int64_t coordinates() const { return has_depths ? 3 : 2; }
};

// Whether a pair counts: strictly inside the image.
template <typename A>
VISDET_INLINE bool is_visible(const A* location) {
  return location[0] > A(0) && location[0] < A(1) && location[1] > A(0) && location[1] < A(1);
}

// The same with depths, where it must also lie among them.
template <typename T, typename TW, typename A>
VISDET_INLINE bool is_visible(const DeformableAggregationArrays<T, TW, A>& a, const A* location) {
  return is_visible(location) && (!a.has_depths || (location[2] > A(-1) && location[2] < static_cast<A>(a.D)));
}

template <typename T, typename TW, typename A = typename AccumulateType<T>::type>
struct DeformableAggregationKernels {
  // One row (b, q) of the output. acc: scratch of C numbers.
  void (*forward_row)(const DeformableAggregationArrays<T, TW, A>& a, A* acc, int64_t row);
  // Every gradient that camera v of batch entry b has. g_row: scratch of C numbers; sums and depth_sums, zeroed, are
  // the gradients of features and depths, where map (v, l) begins at row grad_starts[v, l].
  void (*backward_camera)(const DeformableAggregationArrays<T, TW, A>& a, A* g_row, A* sums, A* depth_sums, int64_t b,
                          int64_t v);
  // Sums back to the type of features.
  void (*round_sums)(const A* from, T* to, int64_t count);
};

}  // namespace visdet

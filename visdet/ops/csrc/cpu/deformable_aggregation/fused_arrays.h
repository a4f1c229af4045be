// The arguments and the table of the CPU kernels of deformable_aggregation_fused. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

// The tensors of one call, all contiguous, with A the type of all but logits and keep.
template <typename TL, typename A>
struct FusedAggregationArrays {
  int64_t B, Q, V, L, P, G;
  A keep_scale, min_depth;
  const A* key_points;      // [B, Q, P, 3]
  const A* projection;      // [B, V, 4, 4]
  const A* image_wh;        // [B, V, 2]
  const TL* logits;         // [B, Q, V, L, P, G], or [B, Q, L, P, G] beside camera_logits
  const TL* camera_logits;  // [B, V, L, P, G], or null
  const bool* keep;         // [B, Q, V, P], or null
  A* locations;             // [B, Q, P, V, 2]
  A* weights;               // [B, Q, P, V, L, G], those of visible pairs
  // Scratch of one task: two patterns of `period` numbers, a row of `row` numbers and three of `points`.
  int64_t period;  // of the patterns over a row: a multiple of G and of every vector's lanes
  int64_t row;     // V * L * P * G, up to a multiple of period
  int64_t points;  // P, up to a multiple of every vector's lanes
  // Backward.
  int64_t part, parts;      // queries of a part, parts of a batch entry
  const A* grad_locations;  // as locations, zero for pairs that are not visible
  const A* grad_weights;    // as weights
  A* grad_key_points;       // as key_points
  TL* grad_logits;          // as logits
  A* part_sums;             // [B, parts, V, L, P, G]
  TL* grad_camera_logits;   // as camera_logits
};

template <typename TL, typename A>
struct FusedAggregationKernels {
  // The locations of queries [begin, end), and the weights of their visible pairs. scratch: see above.
  void (*prepare_queries)(const FusedAggregationArrays<TL, A>& a, A* scratch, int64_t begin, int64_t end);
  // Part `task % parts` of the gradients of batch entry `task / parts`.
  void (*finish_part)(const FusedAggregationArrays<TL, A>& a, A* scratch, int64_t task);
  // grad_camera_logits of entries [begin, end) of [V, L, P, G] of a batch entry: the sums of its parts, in order.
  void (*add_parts)(const FusedAggregationArrays<TL, A>& a, int64_t b, int64_t begin, int64_t end);
};

}  // namespace visdet

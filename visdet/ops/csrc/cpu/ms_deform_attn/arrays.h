// The arguments and the table of ms_deform_attn's CPU kernels. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

// The tensors of one call, all contiguous.
template <typename T, typename A>
struct MsDeformAttnArrays {
  int64_t B, S, G, C, Q, L, K;  // K samples a row
  // Each of the K samples has its level and that level's geometry here. The last three have kBlock numbers more.
  const int32_t* level;  // [K]
  const int32_t* H;      // [K + kBlock]
  const int32_t* W;      // [K + kBlock]
  const int64_t* start;  // [K + kBlock]
  // In the forward a head's rows of some levels are copied into one piece before they are sampled.
  const int32_t* copied;      // [K + kBlock] whether the sample's level is one of them
  const int64_t* copy_start;  // [K + kBlock] the level's first row in the copy, else in value
  int64_t copy_rows;          // of one head, in all
  const T* zeros;             // [C up to a whole register] what a sample that does not count reads

  const int64_t* order;  // [Q] the order in which queries are worked on, or null for their own
  bool gathered;         // backward: a head's values and sums are laid out in one piece
  const T* value;        // [B, S, G, C]
  const A* locations;    // [B, Q, G, K, 2]
  const A* weights;      // [B, Q, G, K]
  T* output;             // [B, Q, G, C]     forward
  const T* grad_output;  // [B, Q, G, C]     backward
  T* grad_value;         // [B, S, G, C]
  A* grad_locations;     // [B, Q, G, K, 2]
  A* grad_weights;       // [B, Q, G, K]

  // The fused form has these instead of locations, weights and their gradients.
  const A* reference_points;  // [B, Q, L, 2 or 4], or null: the plain form
  const int32_t* center;      // [K + kBlock, 2] where the sample's point is in reference_points[b, q]
  const A* scale;             // [K + kBlock, 2] an offset's unit in locations, or in widths and heights of the box
  bool boxes;                 // 4
  bool in_sum_type;           // offsets and logits, and their gradients, are of type A; else of type T
  const void* offsets;        // [B, Q, G, K, 2]
  const void* logits;         // [B, Q, G, K]
  void* grad_offsets;         // [B, Q, G, K, 2]
  void* grad_logits;          // [B, Q, G, K]
  A* grad_reference;          // [B, G, Q, L, 2 or 4], the part of each head; null if it is not wanted
};

constexpr int kBlock = 32;  // samples located at a time: the arrays below take 3 KB of the first-level cache

// The scratch of a row has eight numbers for each sample, with K rounded up to registers of 16 numbers, and room for
// what a block may read behind them.
constexpr int64_t scratch_samples(int64_t K) { return (K + 15) / 16 * 16; }
constexpr int64_t row_scratch_size(int64_t K) { return 8 * scratch_samples(K) + 2 * kBlock; }

// kForwardRing and kBackwardRing are the numbers of blocks in flight. One block is summed while the rows of the last
// but one are prefetched and the last one is located. With three blocks the forward would wait for memory. With four
// blocks the backward's rows, of values and of gradients, would evict each other from the first-level cache.
constexpr int kForwardRing = 4, kBackwardRing = 3;

// Returns how many numbers of scratch `rows` of the forward needs: C, those of one row, and the rows of copied levels.
// C is rounded up to registers of 16 numbers.
template <typename T, typename A>
int64_t forward_scratch(const MsDeformAttnArrays<T, A>& a) {
  const int64_t C = (a.C + 15) / 16 * 16, rows = C + row_scratch_size(a.K);
  return rows + a.copy_rows * C;
}

// Returns how many numbers of scratch the backward of a head needs: C and those of kBackwardRing rows, since a row
// begins before others end; if gathered, also the head's S * C sums and its values.
template <typename T, typename A>
int64_t backward_scratch(const MsDeformAttnArrays<T, A>& a) {
  const int64_t C = (a.C + 15) / 16 * 16, rows = kBackwardRing * row_scratch_size(a.K) + C;
  return a.gathered ? rows + 2 * a.S * C : rows;
}

// The kernels of cpu/ms_deform_attn/forward.cpp.
template <typename T, typename A>
struct MsDeformAttnForward {
  // Writes so many rows from query `first` of batch entry b and head g on; if levels are copied, all are of this head.
  // scratch: of forward_scratch(a) numbers.
  void (*rows)(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t g, int64_t first, int64_t rows);
};

// The kernels of cpu/ms_deform_attn/backward.cpp.
template <typename T, typename A>
struct MsDeformAttnBackward {
  // Writes all gradients of batch entry b and head g. Unless a.gathered, grad_value holds zeros, is of type A, and is
  // added to. scratch: of backward_scratch(a) numbers.
  void (*head)(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t g);
};

}  // namespace visdet

// The arguments and the table of the CPU kernels of deform_conv2d. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

constexpr int kRows = 12;    // positions of a block; output channels of a block in the weight's gradient
constexpr int kDepth = 128;  // terms of a product at a time: a panel of so many rows stays in the first-level cache
constexpr int kAtOnce = 4;   // lines of a pixel that one task adds to
template <typename A>
constexpr int kLine = 64 / static_cast<int>(sizeof(A));  // numbers
template <typename A>
constexpr int kPanel = 2 * kLine<A>;  // columns of a matrix that are multiplied at a time
template <typename A>
constexpr int kTile = kRows * kPanel<A>;  // numbers of a product of kRows rows with a panel: [2, kRows, kLine]

// DeformSample is one tap at one position.
template <typename A>
struct DeformSample {
  int32_t pixel[4];  // of each corner, -1 outside the map
  A fx, fy, mask;
};

template <typename T, typename A>
struct DeformConvArrays {
  int64_t C, H, W, M, KW, taps, width, positions, groups, G;
  int64_t stride[2], padding[2], dilation[2];
  int64_t per_group, per_offset, per_output;  // channels of a group of the weight, of the offsets, of the output
  int64_t lines;                              // of a deformable group
  int64_t blocks;                             // of an image's positions
  const T* input;                             // [B, C, H, W]
  const T* offset;                            // [B, G, taps, 2, positions]
  const T* mask;                              // [B, G, taps, positions] or null
  const A* images;                            // [B, H, W, G, lines, kLine]
  const A* zeros;                             // [lines, kLine], read instead of corners outside the map
  const int64_t* term_offset;                 // [groups, terms()] where a block of columns holds a term of a kernel
  const A* weight;                            // forward: [groups, panels of per_output, terms(), kPanel]
  T* output;                                  // [B, M, positions]

  // The backward takes `count` blocks of all images from `first` on.
  int64_t first, count;
  const T* grad_output;      // [B, M, positions]
  const A* transposed;       // [groups, panels of terms(), per_output, kPanel]
  DeformSample<A>* samples;  // [count, G, taps, kRows]
  A* grad_columns;           // [count, block()], or null if neither input nor offset want a gradient
  A* columns;                // [count, block()], or null if the weight wants none
  A* grad_products;          // [groups, tiles(), count, kRows (positions), kRows (output channels)], with columns
  A* grad_images;            // [B, H, W, G, lines, kLine], or null
  A* grad_weight;            // [groups, pairs, tiles(), kTile]: of pairs of lines, see line_pair
  const int64_t* line_pair;  // [groups, pairs, 2] the lines of a block that hold channels of the group
  int64_t pairs;
  T* grad_offset;  // as offset, or null
  T* grad_mask;    // as mask, or null
  T* grad_input;   // as input

  int64_t terms() const { return taps * per_group; }
  int64_t tiles() const { return ceil_of(per_output, kRows); }
  int64_t pixel() const { return G * lines * kLine<A>; }
  int64_t block() const { return taps * kRows * pixel(); }
  int64_t block_samples() const { return G * taps * kRows; }
  // Returns how many positions block `n` of an image has.
  int64_t rows(int64_t n) const { return positions - n * kRows < kRows ? positions - n * kRows : kRows; }
  // Returns whether the last line of a deformable group has zeros after its channels.
  bool is_padded() const { return per_offset % kLine<A> != 0; }
  int64_t forward_scratch(int64_t tile) const { return tile * (block() + ceil_of(per_output, kPanel<A>) * kTile<A>); }
  int64_t backward_scratch(int64_t tile) const { return tile * (M * kRows + kTile<A>); }
};

template <typename T, typename A>
struct DeformConvKernels {
  // Copies pixels `first` .. `last` of image b, channels innermost.
  void (*copy_image)(const DeformConvArrays<T, A>& a, A* images, int64_t b, int64_t first, int64_t last);
  // Copies the gradient of these pixels back.
  void (*copy_grad_image)(const DeformConvArrays<T, A>& a, int64_t b, int64_t first, int64_t last);
  // `count` blocks from block n0 of image b on. scratch: forward_scratch(count); samples: block_samples().
  void (*forward_tile)(const DeformConvArrays<T, A>& a, A* scratch, DeformSample<A>* samples, int64_t b, int64_t n0,
                       int64_t count);
  // Writes samples, columns and their gradients of `count` blocks from the t0-th of `a.first` on. scratch:
  // backward_scratch(count).
  void (*backward_tile)(const DeformConvArrays<T, A>& a, A* scratch, int64_t t0, int64_t count);
  // Adds what blocks t0 .. t1, of image b, give to lines line0 .. line1 of group g of its pixels pixel0 .. pixel1. The
  // order of a pixel's terms is that of the blocks, whoever adds them.
  void (*add_to_pixels)(const DeformConvArrays<T, A>& a, int64_t b, int64_t t0, int64_t t1, int64_t g, int64_t line0,
                        int64_t line1, int64_t pixel0, int64_t pixel1);
  // Adds what all blocks give to the gradient of the weight, in the channels of one pair of lines of a group.
  void (*add_to_weight)(const DeformConvArrays<T, A>& a, int64_t group, int64_t pair);
};

}  // namespace visdet

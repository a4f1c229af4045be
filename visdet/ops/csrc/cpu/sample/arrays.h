// The arguments and the tables of the CPU kernels of sample_sum and sample_dot. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

constexpr int64_t kChunk = 16;  // channels of one task of the scatter pass, and the fewest that a copied pixel has

template <typename T, typename A>
struct SampleArrays {
  int64_t B, C, H, W, Q, D, G, K;
  int64_t pixel;          // elements of a pixel of images: C, or kChunk, filled up with zeros
  const T* images;        // [B, H, W, pixel]
  const A* samples;       // [B, Q, D, 2]
  const A* coefficients;  // [B, G, Q, D], or null
  const A* rows;          // [B, G, Q, K], or null
  const A* depths;        // [B, Q, D], or null: K = C
  A* sums;                // [B, G, Q, K], or null
  A* dots;                // [B, G, Q, D], or null
  A* grad_samples;        // [B, Q, D, 2], or null
  A* grad_depths;         // [B, Q, D], or null
};

// SampleCorners has the four corners of a sample that counts.
template <typename A>
struct SampleCorners {
  int32_t pixel[4];
  A weight[4];
  A fx, fy;
  int32_t d, inside;  // inside: a bit a corner
};

// The kernels of sum.cpp. list: scratch of D + 1.
template <typename T, typename A>
struct SampleSum {
  // Takes one (b, q) of the sum pass.
  void (*query)(const SampleArrays<T, A>& a, SampleCorners<A>* list, int64_t query);
};

// The kernels of dot.cpp.
template <typename T, typename A>
struct SampleDot {
  // Takes one (b, q) of the dots pass and writes dots and the gradients of samples and depths, as a has them. list:
  // scratch of D + 1; scratch: of (G + 5) * (pixel + kLanes) + (C - K) * D.
  void (*query)(const SampleArrays<T, A>& a, SampleCorners<A>* list, A* scratch, int64_t query);
};

// The kernels of scatter.cpp.
template <typename T, typename A>
struct SampleScatter {
  // Lists the samples of a query that count, in order, and returns how many. list: of D + 1.
  int64_t (*list)(const SampleArrays<T, A>& a, int64_t query, SampleCorners<A>* list);
  // Adds channels [begin, begin + kChunk) of image b of the scatter pass to image [H, W, kChunk], zeroed. lists: of the
  // image's queries, one every D + 1, and how many samples each has; scratch: of G * kChunk + (C - K) * D.
  void (*chunk)(const SampleArrays<T, A>& a, const SampleCorners<A>* lists, const int64_t* counts, A* scratch, A* image,
                int64_t b, int64_t begin);
};

// The kernels of layout.cpp: to[c * to_stride + r] = from[r * from_stride + c], of rows x columns numbers; and
// to[i] = from[i].
template <typename T, typename A>
struct SampleLayout {
  void (*transpose_values)(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns);
  void (*transpose_sums)(const A* from, int64_t from_stride, T* to, int64_t to_stride, int64_t rows, int64_t columns);
  void (*round)(const A* from, T* to, int64_t count);
};

}  // namespace visdet

// The arguments and the table of the CPU kernels of gaussian_field. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

template <typename A>
struct GaussianArrays {
  int64_t B, N;
  const A* points;                // [B, 3]
  const A* means;                 // [N, 3]
  const A* cholesky;              // [N, 3, 3]
  const A* weights;               // [N], or null
  const int64_t* gaussian_order;  // [N], or null
  A cutoff;                       // tolerance / N, or 0: all pairs count
  A* blocks;                      // [ceil(N / lanes), kRows, lanes]
  const A* grad_output;           // [B, N] or [B]
  A* output;                      // [B, N] or [B]
  A* grad_points;                 // [B, 3]
  A* grad_means;                  // [N, 3]
  A* grad_cholesky;               // [N, 3, 3]
  A* grad_weights;                // [N], or null
};

template <typename A>
struct GaussianKernels {
  int64_t lanes, block;  // Gaussians and numbers of a block
  // Writes blocks [begin, end). Returns the first Gaussian whose factor has a diagonal that is not positive, or -1.
  int64_t (*prepare_blocks)(const GaussianArrays<A>& a, int64_t begin, int64_t end);
  // These write the results of one point, or of the Gaussians of one block.
  void (*distances_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*distance_grad_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*distance_grad_of_block)(const GaussianArrays<A>& a, int64_t block);
  void (*field_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*field_grad_of_point)(const GaussianArrays<A>& a, int64_t b);
  void (*field_grad_of_block)(const GaussianArrays<A>& a, int64_t block);
};

}  // namespace visdet

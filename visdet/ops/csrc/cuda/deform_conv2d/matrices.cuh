// Transposes and sums of matrices.
#pragma once

#include "cuda/deform_conv2d/samples.cuh"

namespace visdet::deform_conv2d {
namespace {

constexpr int kSide = 64;

// Threads in turn take the elements (row, column) of a matrix that fits into a square, row by row; rows past the last
// are none.
template <typename F>
__device__ __forceinline__ void for_elements(int columns, const F& f) {
  int row = threadIdx.x / columns, column = threadIdx.x - row * columns;
  const int down = kThreads / columns, across = kThreads - down * columns;
#pragma unroll
  for (int turn = 0; turn < kSide * kSide / kThreads; ++turn) {
    f(turn, row, column);
    row += down, column += across;
    if (column >= columns) column -= columns, ++row;
  }
}

// Matrices [rows, columns], of which there are [outer, inner], to [inner, outer] of [columns, rows], converted. A block
// owns a square of kSide x kSide numbers.
template <typename From, typename To, typename A>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const From* __restrict__ from, To* __restrict__ to, int rows, int columns, int outer, int inner) {
  __shared__ To square[kSide][kSide + 1];
  const int across = (columns + kSide - 1) / kSide, down = (rows + kSide - 1) / kSide;
  const int matrix = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
  const int row0 = tile / across * kSide, column0 = tile % across * kSide;
  const int height = min(rows - row0, kSide), width = min(columns - column0, kSide);
  const int64_t numbers = static_cast<int64_t>(rows) * columns;
  from += matrix * numbers + static_cast<int64_t>(row0) * columns + column0;
  From value[kSide * kSide / kThreads];
  for_elements(width, [&](int turn, int row, int column) {  // without a branch: all are on their way at once
    value[turn] = from[row < height ? static_cast<int64_t>(row) * columns + column : 0];
  });
  for_elements(width, [&](int turn, int row, int column) {
    if (row < height) square[row][column] = from_accumulate<To>(A(to_accumulate(value[turn])));
  });
  __syncthreads();
  to += (matrix % inner * outer + matrix / inner) * numbers + static_cast<int64_t>(column0) * rows + row0;
  for_elements(height, [&](int, int row, int column) {
    if (row < width) to[static_cast<int64_t>(row) * rows + column] = square[column][row];
  });
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    add_kernel(A* __restrict__ sums, const A* __restrict__ terms, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) sums[i] += terms[i];
}

}  // namespace
}  // namespace visdet::deform_conv2d

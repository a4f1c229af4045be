// Transposed copies of matrices, and their sum.
#pragma once

#include "common/values.cuh"
#include "cuda/deform_conv2d/samples.cuh"

namespace visdet::deform_conv2d {
namespace {

constexpr int kSide = 64;

// Called by all threads of a block: calls f(n, row, column) for the elements of a matrix that has `columns` columns and
// fits into a square, row by row; a thread's n-th element comes with n. Rows past the matrix's last come, too.
template <typename F>
__device__ __forceinline__ void for_elements(int columns, const F& f) {
  int row = threadIdx.x / columns, column = threadIdx.x - row * columns;
  const int down = kThreads / columns, across = kThreads - down * columns;
#pragma unroll
  for (int n = 0; n < kSide * kSide / kThreads; ++n) {
    f(n, row, column);
    row += down, column += across;
    if (column >= columns) column -= columns, ++row;
  }
}

// Transposes matrices [rows, columns], of which there are [outer, inner], to [inner, outer] matrices [columns, rows],
// and converts their numbers. A block has a square of kSide x kSide numbers.
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
  for_elements(width, [&](int n, int row, int column) {  // without a branch: all are under way at once
    value[n] = from[row < height ? static_cast<int64_t>(row) * columns + column : 0];
  });
  for_elements(width, [&](int n, int row, int column) {
    if (row < height) square[row][column] = from_accumulate<To>(A(to_accumulate(value[n])));
  });
  __syncthreads();
  to += (matrix % inner * outer + matrix / inner) * numbers + static_cast<int64_t>(column0) * rows + row0;
  for_elements(height, [&](int, int row, int column) {
    if (row < width) to[static_cast<int64_t>(row) * rows + column] = square[column][row];
  });
}

// sums += terms, a number a thread.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    add_kernel(A* __restrict__ sums, const A* __restrict__ terms, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) sums[i] += terms[i];
}

}  // namespace
}  // namespace visdet::deform_conv2d

// The four texels around a bilinear sample, in the order of bilinear.h: corner k is column k % 2 of row k / 2. What
// needs no GPU can be compiled by a C++ compiler, too.
#pragma once

#include <cstdint>

#include "common/bilinear.h"

#if defined(__CUDACC__)
#include "common/values.cuh"
#endif

namespace visdet {

// The weight of corner k of a sample at fractions (fx, fy) of the way to the second column and row, and the derivatives
// of this weight by x and by y.
template <typename A>
struct CornerFactors {
  A weight, by_x, by_y;
};
template <typename A>
VISDET_HOST_DEVICE CornerFactors<A> corner_factors(int k, A fx, A fy) {
  const A of_column = k & 1 ? fx : 1 - fx, of_row = k & 2 ? fy : 1 - fy;
  return {of_column * of_row, k & 1 ? of_row : -of_row, k & 2 ? of_column : -of_column};
}

// The weights of all corners, times `scale`.
template <typename A>
VISDET_HOST_DEVICE void scaled_corner_weights(A scale, A fx, A fy, A (&weight)[4]) {
  const A bottom = fy * scale, top = scale - bottom;
  const A right_top = top * fx, right_bottom = bottom * fx;
  weight[0] = top - right_top, weight[1] = right_top;
  weight[2] = bottom - right_bottom, weight[3] = right_bottom;
}

// The bilinear interpolation of four numbers and its derivatives by x and by y, in texels. In a backward, the numbers
// are the dot products of each corner's channels with the output's gradient, and zero outside the map. Then `value` is
// the gradient of the sample's weight. The derivatives, times this weight and the width or height of the map, are the
// gradient of the sample's location in 0..1.
template <typename A>
struct Interpolation {
  A value, by_x, by_y;
};
template <typename A>
VISDET_HOST_DEVICE Interpolation<A> interpolate_numbers(const A (&corner)[4], A fx, A fy) {
  const A top_x = corner[1] - corner[0], bottom_x = corner[3] - corner[2];
  const A top = corner[0] + fx * top_x, bottom = corner[2] + fx * bottom_x;
  const A left_y = corner[2] - corner[0], right_y = corner[3] - corner[1];
  return {top + fy * (bottom - top), top_x + fy * (right_y - left_y), left_y + fx * (right_y - left_y)};
}

#if defined(__CUDACC__)

// Where a kernel finds the corners of a sample: the row of a [rows, channels] array that holds each one's channels, and
// its weight, zero outside the map. All rows exist, so that they can be loaded without a branch.
template <typename A>
struct alignas(16) CornerRows {
  uint32_t row[4];
  A weight[4];

  // first_row: that of the map's first texel.
  static __device__ __forceinline__ CornerRows of(const Bilinear<A>& at, int32_t first_row = 0) {
    CornerRows corners;
    at.corner_weights(corners.weight);
#pragma unroll
    for (int k = 0; k < 4; ++k) corners.row[k] = first_row + at.index[k];
    return corners;
  }
};

// Loads VEC channels of the four corners. `first_row` points at the first of these channels in row 0; rows are
// `row_bytes` apart.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_corners(const char* first_row, const uint32_t (&row)[4], uint32_t row_bytes,
                                             A (&corner)[4][VEC]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_pack<T, VEC>(first_row + static_cast<uint64_t>(row[k]) * row_bytes, corner[k]);
  }
}

// Interpolates VEC channels: the sum of the corners times their weights.
template <int VEC, typename A>
__device__ __forceinline__ void interpolate(const A (&corner)[4][VEC], const A (&weight)[4], A (&value)[VEC]) {
#pragma unroll
  for (int v = 0; v < VEC; ++v) {
    value[v] = corner[0][v] * weight[0];
#pragma unroll
    for (int k = 1; k < 4; ++k) value[v] += corner[k][v] * weight[k];
  }
}

#endif

}  // namespace visdet

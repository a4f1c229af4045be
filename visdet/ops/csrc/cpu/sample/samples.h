// The samples of a query, and what the passes over them have in common.
//
// Channels are taken in whole vectors: the last one of a pixel begins early enough to end with the pixel.
#pragma once

#include "common/bilinear.h"
#include "cpu/sample/arrays.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

VISDET_INLINE float floor_of(float x) { return __builtin_floorf(x); }
VISDET_INLINE double floor_of(double x) { return __builtin_floor(x); }

// Lists the samples of a query that count, in order, and returns how many. list: of D + 1.
template <typename T, typename A>
int64_t list_samples(const SampleArrays<T, A>& a, int64_t query, SampleCorners<A>* list) {
  const A half_width = A(a.W) / 2, half_height = A(a.H) / 2;
  int64_t count = 0;
  for (int64_t d = 0; d < a.D; ++d) {
    const A* sample = a.samples + 2 * (query * a.D + d);
    Bilinear<A> at;
    const A x = (sample[0] + 1) * half_width - A(0.5), y = (sample[1] + 1) * half_height - A(0.5);
    const bool counts = locate(x, y, static_cast<int32_t>(a.H), static_cast<int32_t>(a.W), at);
    SampleCorners<A>& out = list[count];
    at.corner_weights(out.weight);
    out.inside = 0;
    for (int k = 0; k < 4; ++k) out.pixel[k] = at.index[k], out.inside |= at.is_inside[k] << k;
    out.fx = at.fx, out.fy = at.fy, out.d = static_cast<int32_t>(d);
    count += counts;
  }
  return count;
}

// Returns where the n-th vector of `length` >= kLanes elements begins.
template <typename A>
VISDET_INLINE int64_t vector_start(int64_t n, int64_t length) {
  const int64_t start = n * kLanes<A>;
  return start + kLanes<A> <= length ? start : length - kLanes<A>;
}
template <typename A>
VISDET_INLINE int64_t vectors_of(int64_t length) {
  return (length + kLanes<A> - 1) / kLanes<A>;
}

// Finds where the corners' channels begin.
template <typename T, typename A>
VISDET_INLINE void find_corners(const T* image, const SampleCorners<A>& at, int64_t pixel, const T* (&corner)[4]) {
  for (int k = 0; k < 4; ++k) corner[k] = image + at.pixel[k] * pixel;
}

template <typename A>
VISDET_INLINE Vec<A> interpolate(const Vec<A> (&corner)[4], const SampleCorners<A>& at) {
  return (corner[0] * at.weight[0] + corner[1] * at.weight[1]) + (corner[2] * at.weight[2] + corner[3] * at.weight[3]);
}

// Writes sin and cos of 2 pi 2^k depth, for k < octaves, to encodings[2 k] and encodings[2 k + 1], each [stride], of
// the depths of the listed samples. Turns lose nothing when they are doubled or taken modulo one, so the argument is
// exact up to the eighth of a turn that remains; there Taylor's series end below the last digit.
template <typename A>
VISDET_INLINE void encode_depths(const A* depths, const SampleCorners<A>* list, int64_t count, int64_t octaves,
                                 A* encodings, int64_t stride) {
  constexpr int kTerms = sizeof(A) == 4 ? 6 : 10;
  constexpr A kTurn = A(6.283185307179586476925286766559);
  for (int64_t k = 0; k < octaves; ++k) {
    const A scale = static_cast<A>(int64_t{1} << k);
    A *sines = encodings + 2 * k * stride, *cosines = sines + stride;
    for (int64_t i = 0; i < count; ++i) sines[i] = depths[list[i].d] * scale;
    for (int64_t i = 0; i < count; ++i) {
      const A turn = sines[i] - floor_of(sines[i]), quarter = floor_of(4 * turn + A(0.5));
      const A angle = kTurn * (turn - quarter / 4), square = -angle * angle;
      A sine = 1, cosine = 1;
#pragma GCC unroll 10
      for (int n = kTerms - 1; n > 0; --n) {
        cosine = 1 + cosine * square * (A(1) / A((2 * n - 1) * (2 * n)));
        sine = 1 + sine * square * (A(1) / A((2 * n) * (2 * n + 1)));
      }
      sine *= angle;
      const bool is_odd = (quarter == 1) | (quarter == 3);
      const A of_sine = is_odd ? cosine : sine, of_cosine = is_odd ? sine : cosine;
      sines[i] = (quarter == 2) | (quarter == 3) ? -of_sine : of_sine;
      cosines[i] = (quarter == 1) | (quarter == 2) ? -of_cosine : of_cosine;
    }
  }
}

}  // namespace visdet::VISDET_ISA

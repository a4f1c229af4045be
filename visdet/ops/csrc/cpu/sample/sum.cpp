// The sum pass of sample_sum and sample_dot. A call writes the sums of one (b, q).
#include "cpu/sample/samples.h"

namespace visdet::VISDET_ISA {

// Writes N vectors, from the n-th on, of the sum pass for GROUPS groups from g0 on, over the samples of a query that
// count.
template <int GROUPS, int N, typename T, typename A>
VISDET_INLINE void sum_vectors(const SampleArrays<T, A>& a, const T* image, const SampleCorners<A>* list, int64_t count,
                               int64_t b, int64_t q, int64_t g0, int64_t n) {
  Vec<A> sums[GROUPS][N] = {};
  const A* coefficients[GROUPS];
  const int64_t length = a.K < kLanes<A> ? kLanes<A> : a.K;  // of a pixel's elements, which are at least that many
  int64_t start[N];
  for (int i = 0; i < N; ++i) start[i] = vector_start<A>(n + i, length);
  for (int g = 0; g < GROUPS; ++g) coefficients[g] = a.coefficients + ((b * a.G + g0 + g) * a.Q + q) * a.D;
  for (int64_t i = 0; i < count; ++i) {
    const T* from[4];
    find_corners(image, list[i], a.pixel, from);
    Vec<A> s[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      Vec<A> corner[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) corner[k] = load(from[k] + start[j]);
      s[j] = interpolate(corner, list[i]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[g][j] += s[j] * coefficients[g][list[i].d];
    }
  }
  for (int g = 0; g < GROUPS; ++g) {
    A* to = a.sums + ((b * a.G + g0 + g) * a.Q + q) * a.K;
    for (int j = 0; j < N; ++j) {
      if (a.K >= kLanes<A>) {
        store(to + start[j], sums[g][j]);
      } else {
        for (int64_t c = 0; c < a.K; ++c) to[c] = sums[g][j][c];
      }
    }
  }
}

template <typename T, typename A>
void sum_query(const SampleArrays<T, A>& a, SampleCorners<A>* list, int64_t query) {
  const int64_t b = query / a.Q, q = query - b * a.Q, vectors = vectors_of<A>(a.K);
  const T* image = a.images + b * a.H * a.W * a.pixel;
  const int64_t count = list_samples(a, query, list);
  int64_t n = 0;
  for (; n + 2 <= vectors; n += 2) {
    int64_t g = 0;
    for (; g + 4 <= a.G; g += 4) sum_vectors<4, 2>(a, image, list, count, b, q, g, n);
    for (; g < a.G; ++g) sum_vectors<1, 2>(a, image, list, count, b, q, g, n);
  }
  for (; n < vectors; ++n) {
    int64_t g = 0;
    for (; g + 4 <= a.G; g += 4) sum_vectors<4, 1>(a, image, list, count, b, q, g, n);
    for (; g < a.G; ++g) sum_vectors<1, 1>(a, image, list, count, b, q, g, n);
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(SampleSum, sum_query<T, A>)

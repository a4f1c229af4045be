// The dots pass of sample_sum and sample_dot. A call writes the dots and gradients of samples of one (b, q).
#include "cpu/sample/samples.h"

namespace visdet::VISDET_ISA {

template <int N>
struct Number {
  static constexpr int value = N;
};

// Takes a query's listed samples; DOTS: writes their dots; GRAD: writes the gradients of samples and depths. rows: [G
// rounded up to GROUPS][vectors * kLanes], the elements of vector n from n * kLanes on, zero where a vector overlaps
// the one before it.
template <int GROUPS, bool DOTS, bool GRAD, typename T, typename A>
VISDET_INLINE void dot_samples(const SampleArrays<T, A>& a, const SampleCorners<A>* list, int64_t count, const A* rows,
                               const A* encodings, A* encoding, A* derivative, int64_t query) {
  const int64_t b = query / a.Q, q = query - b * a.Q, vectors = vectors_of<A>(a.pixel);
  const int64_t in_rows = vectors_of<A>(a.K), padded = vectors * kLanes<A>;
  const int64_t octaves = (a.C - a.K) / 2, first_encoded = octaves > 0 ? a.K / kLanes<A> : vectors;
  constexpr A kTurn = A(6.283185307179586476925286766559);
  const T* image = a.images + b * a.H * a.W * a.pixel;
  const int64_t step = a.Q * a.D;  // between groups
  const int64_t row0 = (b * a.G * a.Q + q) * a.D;
  for (int64_t i = 0; i < count; ++i) {
    const SampleCorners<A>& at = list[i];
    const int64_t sample = query * a.D + at.d;
    A total = 0;
    for (int64_t g = 0; GRAD && g < a.G; ++g) total += a.coefficients[row0 + g * step + at.d];
    for (int64_t j = 0; j < 2 * octaves; ++j) {
      const int64_t c = a.K + j, n = c / kLanes<A>;
      const int64_t slot = c + n * kLanes<A> - vector_start<A>(n, a.pixel);
      const A rate = kTurn * static_cast<A>(int64_t{1} << j / 2);
      encoding[slot] = encodings[j * a.D + i];
      derivative[slot] = (j % 2 ? -rate : rate) * encodings[(j ^ 1) * a.D + i];
    }
    if (i + 1 < count) {  // prefetches the next sample's pixels, which often lie in the last cache only
      for (int k = 0; k < 4; ++k) {
        const T* next = image + list[i + 1].pixel[k] * a.pixel;
        for (int64_t c = 0; c < a.pixel; c += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(next + c);
      }
    }
    const T* from[4];
    find_corners(image, at, a.pixel, from);
    Vec<A> products[4] = {}, of_encoding = {}, of_derivative = {};
    for (int64_t g0 = 0; g0 < a.G; g0 += GROUPS) {
      const int64_t groups = a.G - g0 < GROUPS ? a.G - g0 : GROUPS;
      Vec<A> dots[4] = {};
      A coefficients[GROUPS];
      for (int64_t g = 0; GRAD && g < GROUPS; ++g) {
        coefficients[g] = g < groups ? a.coefficients[row0 + (g0 + g) * step + at.d] : A(0);
      }
      for (int64_t n = 0; n < vectors; ++n) {
        const int64_t c = vector_start<A>(n, a.pixel);
        Vec<A> corner[4], h = {};
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) corner[k] = load(from[k] + c);
        const Vec<A> s = interpolate(corner, at);
        if (n < in_rows) {
#pragma GCC unroll 4
          for (int g = 0; g < GROUPS; ++g) {
            const Vec<A> row = load(rows + (g0 + g) * padded + n * kLanes<A>);
            if (DOTS) dots[g] += s * row;
            if (GRAD) h += row * coefficients[g];
          }
        }
        if (n >= first_encoded && g0 == 0) {
          const Vec<A> with = load(encoding + n * kLanes<A>);
          if (DOTS) of_encoding += s * with;
          if (GRAD) {
            // The register may hold channels of queries too: those add nothing, not even zero times infinity.
            const Vec<A> rate = load(derivative + n * kLanes<A>);
            h += with * total, of_derivative += rate != 0 ? s * rate : Vec<A>{};
          }
        }
        if (GRAD) {
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) products[k] += corner[k] * h;
        }
      }
      if (!DOTS) continue;
      A sums[4];
      for (int g = 0; g < GROUPS; ++g) dots[g] += of_encoding;
      horizontal_sums(dots, sums);
      for (int64_t g = 0; g < groups; ++g) a.dots[row0 + (g0 + g) * step + at.d] = sums[g];
    }
    if (!GRAD) continue;
    A e[4];
    horizontal_sums(products, e);
    for (int k = 0; k < 4; ++k) e[k] = at.inside >> k & 1 ? e[k] : A(0);
    a.grad_samples[2 * sample] = A(a.W) / 2 * ((1 - at.fy) * (e[1] - e[0]) + at.fy * (e[3] - e[2]));
    a.grad_samples[2 * sample + 1] = A(a.H) / 2 * ((1 - at.fx) * (e[2] - e[0]) + at.fx * (e[3] - e[1]));
    if (!a.grad_depths) continue;
    Vec<A> alone[4] = {of_derivative};
    horizontal_sums(alone, e);
    a.grad_depths[sample] = octaves > 0 ? total * e[0] : A(0);  // total may be NaN
  }
}

template <typename T, typename A>
void dot_query(const SampleArrays<T, A>& a, SampleCorners<A>* list, A* scratch, int64_t query) {
  const int64_t b = query / a.Q, q = query - b * a.Q, octaves = (a.C - a.K) / 2;
  const int64_t count = list_samples(a, query, list);
  for (int64_t g = 0; a.dots && g < a.G; ++g) {
    A* dots = a.dots + ((b * a.G + g) * a.Q + q) * a.D;
    for (int64_t d = 0; d < a.D; ++d) dots[d] = 0;
  }
  for (int64_t i = 0; a.grad_samples && i < 2 * a.D; ++i) a.grad_samples[2 * query * a.D + i] = 0;
  for (int64_t d = 0; a.grad_depths && d < a.D; ++d) a.grad_depths[query * a.D + d] = 0;

  const int64_t padded = vectors_of<A>(a.pixel) * kLanes<A>, all_groups = a.G == 1 ? 1 : (a.G + 3) / 4 * 4;
  A *rows = scratch, *encoding = rows + all_groups * padded, *derivative = encoding + padded,
    *encodings = derivative + padded;
  for (int64_t i = 0; i < (all_groups + 2) * padded; ++i) scratch[i] = 0;
  for (int64_t g = 0; g < a.G; ++g) {
    const A* row = a.rows + ((b * a.G + g) * a.Q + q) * a.K;
    for (int64_t c = 0; c < a.K; ++c) {
      const int64_t n = c / kLanes<A>;
      rows[g * padded + c + n * kLanes<A> - vector_start<A>(n, a.pixel)] = row[c];
    }
  }
  if (octaves > 0) encode_depths(a.depths + query * a.D, list, count, octaves, encodings, a.D);
  const auto run = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    if (!a.grad_samples) {
      dot_samples<kGroups, true, false>(a, list, count, rows, encodings, encoding, derivative, query);
    } else if (a.dots) {
      dot_samples<kGroups, true, true>(a, list, count, rows, encodings, encoding, derivative, query);
    } else {
      dot_samples<kGroups, false, true>(a, list, count, rows, encodings, encoding, derivative, query);
    }
  };
  if (a.G == 1) {
    run(Number<1>{});
  } else {
    run(Number<4>{});
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(SampleDot, dot_query<T, A>)

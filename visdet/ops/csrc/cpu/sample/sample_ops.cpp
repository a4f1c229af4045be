// sample_sum and sample_dot on the CPU. The contract, and the three passes, are in ../sample_ops.h; how this file is
// compiled, in vec.h.
//
// Images are read as [B, H, W, pixel]: NCHW ones are copied into that order first. The sum and dots passes are parallel
// over (b, q), the scatter pass over (b, chunk of channels), so there are no races and no dependence on the number of
// threads. Channels are taken in whole vectors: the last one of a pixel begins early enough to end with the pixel.
#include "common/bilinear.h"
#include "cpu/vec.h"

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

// The four corners of a sample that counts.
template <typename A>
struct SampleCorners {
  int32_t pixel[4];
  A weight[4];
  A fx, fy;
  int32_t d, inside;  // inside: a bit a corner
};

namespace VISDET_ISA {

VISDET_INLINE float floor_of(float x) { return __builtin_floorf(x); }
VISDET_INLINE double floor_of(double x) { return __builtin_floor(x); }

template <int N>
struct Number {
  static constexpr int value = N;
};

// The samples of a query that count, in order; returns how many. list: of D + 1.
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

// Where the n-th vector of `length` >= kLanes elements begins.
template <typename A>
VISDET_INLINE int64_t vector_start(int64_t n, int64_t length) {
  const int64_t start = n * kLanes<A>;
  return start + kLanes<A> <= length ? start : length - kLanes<A>;
}
template <typename A>
VISDET_INLINE int64_t vectors_of(int64_t length) {
  return (length + kLanes<A> - 1) / kLanes<A>;
}

// Where the corners' channels begin.
template <typename T, typename A>
VISDET_INLINE void find_corners(const T* image, const SampleCorners<A>& at, int64_t pixel, const T* (&corner)[4]) {
  for (int k = 0; k < 4; ++k) corner[k] = image + at.pixel[k] * pixel;
}

template <typename A>
VISDET_INLINE Vec<A> interpolate(const Vec<A> (&corner)[4], const SampleCorners<A>& at) {
  return (corner[0] * at.weight[0] + corner[1] * at.weight[1]) + (corner[2] * at.weight[2] + corner[3] * at.weight[3]);
}

// sin and cos of 2 pi 2^k depth for k < octaves at encodings[2 k] and encodings[2 k + 1], each [stride], of the depths
// of the listed samples. Turns lose nothing when they are doubled or taken modulo one, so the argument is exact up to
// the eighth of a turn that remains; there Taylor's series end below the last digit.
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

// N vectors, from the n-th on, of the sum pass for GROUPS groups from g0 on, over the samples of a query that count.
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

// One (b, q) of the sum pass. list: scratch of D + 1.
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

// The dots pass of a query's listed samples, DOTS and GRAD as in dot_query. rows: [G rounded up to GROUPS][vectors *
// kLanes], an element in each vector's place, zero where a vector overlaps the one before it.
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
      const int64_t place = c + n * kLanes<A> - vector_start<A>(n, a.pixel);
      const A rate = kTurn * static_cast<A>(int64_t{1} << j / 2);
      encoding[place] = encodings[j * a.D + i];
      derivative[place] = (j % 2 ? -rate : rate) * encodings[(j ^ 1) * a.D + i];
    }
    if (i + 1 < count) {  // the next sample's pixels, often in no nearer cache than the last: a quarter less time
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

// One (b, q) of the dots pass: dots and the gradients of samples and depths, as a has them. list: scratch of D + 1;
// scratch: of (G + 5) * (pixel + kLanes) + (C - K) * D.
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

// Channels [begin, begin + kChunk) of image b of the scatter pass, into image [H, W, kChunk], zeroed. lists: of the
// image's queries, one every D + 1, and how many samples each has; scratch: of G * kChunk + (C - K) * D.
template <typename T, typename A>
void scatter_chunk(const SampleArrays<T, A>& a, const SampleCorners<A>* lists, const int64_t* counts, A* scratch,
                   A* image, int64_t b, int64_t begin) {
  constexpr int kVectors = kChunk / kLanes<A>;
  const int64_t octaves = begin + kChunk > a.K ? (a.C - a.K) / 2 : 0;
  A *rows = scratch, *encodings = rows + a.G * kChunk;
  for (int64_t q = 0; q < a.Q; ++q) {
    const SampleCorners<A>* list = lists + q * (a.D + 1);
    for (int64_t g = 0; g < a.G; ++g) {
      const A* row = a.rows + ((b * a.G + g) * a.Q + q) * a.K;
      for (int64_t c = 0; c < kChunk; ++c) rows[g * kChunk + c] = begin + c < a.K ? row[begin + c] : A(0);
    }
    if (octaves > 0) encode_depths(a.depths + (b * a.Q + q) * a.D, list, counts[q], octaves, encodings, a.D);
    const A* coefficients = a.coefficients + (b * a.G * a.Q + q) * a.D;
    for (int64_t i = 0; i < counts[q]; ++i) {
      const SampleCorners<A>& at = list[i];
      Vec<A> h[kVectors] = {};
      A total = 0;
      for (int64_t g = 0; g < a.G; ++g) {
        const A coefficient = coefficients[g * a.Q * a.D + at.d];
        total += coefficient;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) h[v] += load(rows + g * kChunk + v * kLanes<A>) * coefficient;
      }
      if (octaves > 0) {
        A encoded[kChunk] = {};
        for (int64_t c = 0; c < kChunk; ++c) {
          const int64_t j = begin + c - a.K;
          if (j >= 0 && j < 2 * octaves) encoded[c] = total * encodings[j * a.D + i];
        }
        for (int v = 0; v < kVectors; ++v) h[v] += load(encoded + v * kLanes<A>);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        if (at.weight[k] == 0) continue;
        A* to = image + at.pixel[k] * kChunk;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          store(to + v * kLanes<A>, load(to + v * kLanes<A>) + h[v] * at.weight[k]);
        }
      }
    }
  }
}

template <int... I>
struct Lanes {};
template <int N, int... I>
struct LanesUpTo : LanesUpTo<N - 1, N - 1, I...> {};
template <int... I>
struct LanesUpTo<0, I...> {
  using type = Lanes<I...>;
};

// Swaps the odd blocks of STEP lanes of a with the even ones of b.
template <int STEP, typename V, int... I>
VISDET_INLINE void swap_blocks(V& a, V& b, Lanes<I...>) {
  constexpr int kCount = sizeof...(I);
  const V even = __builtin_shufflevector(a, b, (I & STEP ? I - STEP + kCount : I)...);
  b = __builtin_shufflevector(a, b, (I & STEP ? I + kCount : I + STEP)...);
  a = even;
}

template <int STEP, typename A>
VISDET_INLINE void transpose_square(Vec<A> (&square)[kLanes<A>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<A>; ++i) {
    if (!(i & STEP)) swap_blocks<STEP>(square[i], square[i + STEP], typename LanesUpTo<kLanes<A>>::type{});
  }
  if constexpr (2 * STEP < kLanes<A>) transpose_square<2 * STEP, A>(square);
}

// to[c * to_stride + r] = from[r * from_stride + c], of rows x columns numbers; `readable` columns may be read.
template <typename From, typename To>
void transpose(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows, int64_t columns,
               int64_t readable) {
  if constexpr (sizeof(From) >= 4 && sizeof(From) == sizeof(To)) {
    constexpr int64_t kSide = kLanes<From>;
    if (rows >= kSide && readable >= kSide) {
      for (int64_t i = 0; i < vectors_of<From>(rows); ++i) {
        const int64_t r = vector_start<From>(i, rows);
        for (int64_t j = 0; j < vectors_of<From>(columns); ++j) {
          const int64_t c = columns < kSide ? 0 : vector_start<From>(j, columns);
          Vec<From> square[kSide];
#pragma GCC unroll 16
          for (int64_t k = 0; k < kSide; ++k) square[k] = load(from + (r + k) * from_stride + c);
          transpose_square<1, From>(square);
          for (int64_t k = 0; k < kSide && k < columns; ++k) store(to + (c + k) * to_stride + r, square[k]);
        }
      }
      return;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      if constexpr (sizeof(From) == sizeof(To)) {
        to[c * to_stride + r] = from[r * from_stride + c];
      } else {
        from_accumulate(from[r * from_stride + c], to[c * to_stride + r]);
      }
    }
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                                \
  template void sum_query<T, A>(const SampleArrays<T, A>&, SampleCorners<A>*, int64_t);                         \
  template void dot_query<T, A>(const SampleArrays<T, A>&, SampleCorners<A>*, A*, int64_t);                     \
  template int64_t list_samples<T, A>(const SampleArrays<T, A>&, int64_t, SampleCorners<A>*);                   \
  template void scatter_chunk<T, A>(const SampleArrays<T, A>&, const SampleCorners<A>*, const int64_t*, A*, A*, \
                                    int64_t, int64_t);                                                          \
  template void transpose<A, T>(const A*, int64_t, T*, int64_t, int64_t, int64_t, int64_t);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
template void transpose<Float16, Float16>(const Float16*, int64_t, Float16*, int64_t, int64_t, int64_t, int64_t);
template void transpose<BFloat16, BFloat16>(const BFloat16*, int64_t, BFloat16*, int64_t, int64_t, int64_t, int64_t);
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "cpu/dispatch.h"
#include "sample_ops.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                                                         \
  namespace isa {                                                                                                   \
  template <typename T, typename A>                                                                                 \
  void sum_query(const SampleArrays<T, A>&, SampleCorners<A>*, int64_t);                                            \
  template <typename T, typename A>                                                                                 \
  void dot_query(const SampleArrays<T, A>&, SampleCorners<A>*, A*, int64_t);                                        \
  template <typename T, typename A>                                                                                 \
  int64_t list_samples(const SampleArrays<T, A>&, int64_t, SampleCorners<A>*);                                      \
  template <typename T, typename A>                                                                                 \
  void scatter_chunk(const SampleArrays<T, A>&, const SampleCorners<A>*, const int64_t*, A*, A*, int64_t, int64_t); \
  template <typename From, typename To>                                                                             \
  void transpose(const From*, int64_t, To*, int64_t, int64_t, int64_t, int64_t);                                    \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

constexpr int64_t kGrain = 4;         // queries of one piece of work
constexpr int64_t kCopyPixels = 128;  // of one task of the copy

// images as [B, H, W, pixel] in memory, see SampleArrays: themselves, or a copy.
template <typename T>
Tensor in_channels_last(const Tensor& images, const SampleProblem& problem) {
  if (problem.channels_last && problem.C >= kChunk) return images;
  const int64_t C = problem.C, pixels = problem.H * problem.W, pixel = std::max(C, kChunk);
  const Tensor given = problem.channels_last ? images : dense(images);
  Tensor copy = new_empty(images, {problem.B, problem.H, problem.W, pixel});
  if (C < kChunk) zero_(copy);
  const auto* from = static_cast<const T*>(given.const_data_ptr());
  auto* to = static_cast<T*>(copy.mutable_data_ptr());
  if (problem.channels_last) {
    for (int64_t i = 0; i < problem.B * pixels; ++i) std::copy_n(from + i * C, C, to + i * pixel);
    return copy;
  }
  const auto run = VISDET_BEST_ISA(transpose, T, T);
  const int64_t tasks = (pixels + kCopyPixels - 1) / kCopyPixels;
  torch::stable::parallel_for(0, problem.B * tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / tasks, first = (task - b * tasks) * kCopyPixels, left = pixels - first;
      run(from + b * C * pixels + first, pixels, to + (b * pixels + first) * pixel, pixel, C,
          std::min(left, kCopyPixels), left);
    }
  });
  return copy;
}

template <typename T, typename A>
SampleArrays<T, A> arrays_of(const SampleProblem& problem, const Tensor& images, const Tensor& samples) {
  SampleArrays<T, A> a{};
  a.B = problem.B, a.C = problem.C, a.H = problem.H, a.W = problem.W;
  a.Q = problem.Q, a.D = problem.D, a.G = problem.G, a.K = problem.K;
  a.pixel = std::max(problem.C, kChunk);
  a.images = static_cast<const T*>(images.const_data_ptr());
  a.samples = static_cast<const A*>(samples.const_data_ptr());
  return a;
}

template <typename A>
const A* data_of(const Tensor& tensor) {
  return static_cast<const A*>(tensor.const_data_ptr());
}
template <typename A>
A* data_of(Tensor& tensor) {
  return static_cast<A*>(tensor.mutable_data_ptr());
}

template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::copy_n(from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) baseline::from_accumulate(from[i], to[i]);
  }
}

template <typename T, typename A>
void run_sum(const SampleArrays<T, A>& a) {
  const auto run = VISDET_BEST_ISA(sum_query, T, A);
  torch::stable::parallel_for(0, a.B * a.Q, kGrain, [&](int64_t begin, int64_t end) {
    Scratch<SampleCorners<A>> list(a.D + 1);
    for (int64_t query = begin; query < end; ++query) run(a, list.data(), query);
  });
}

template <typename T, typename A>
void run_dots(const SampleArrays<T, A>& a) {
  const auto run = VISDET_BEST_ISA(dot_query, T, A);
  constexpr int64_t kMostLanes = 16;
  torch::stable::parallel_for(0, a.B * a.Q, kGrain, [&](int64_t begin, int64_t end) {
    Scratch<SampleCorners<A>> list(a.D + 1);
    Scratch<A> scratch((a.G + 5) * (a.pixel + kMostLanes) + (a.C - a.K) * a.D);
    for (int64_t query = begin; query < end; ++query) run(a, list.data(), scratch.data(), query);
  });
}

// The gradient of images, in their layout and type. A task has its sums, few enough for a cache, in memory of its own.
template <typename T, typename A>
Tensor run_scatter(const SampleArrays<T, A>& a, const SampleProblem& problem, const Tensor& images) {
  Tensor grad = problem.channels_last ? empty_like(images) : new_empty(images, images.sizes());
  auto* to = static_cast<T*>(grad.mutable_data_ptr());
  const auto find = VISDET_BEST_ISA(list_samples, T, A);
  const auto run = VISDET_BEST_ISA(scatter_chunk, T, A);
  const auto write = VISDET_BEST_ISA(transpose, A, T);
  const int64_t chunks = (a.C + kChunk - 1) / kChunk, pixels = a.H * a.W, queries = a.B * a.Q;
  const Scratch<SampleCorners<A>> lists(queries * (a.D + 1));  // every chunk of an image reads them
  const Scratch<int64_t> counts(queries);
  torch::stable::parallel_for(0, queries, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t query = begin; query < end; ++query) {
      counts.data()[query] = find(a, query, lists.data() + query * (a.D + 1));
    }
  });
  torch::stable::parallel_for(0, a.B * chunks, 1, [&](int64_t begin, int64_t end) {
    Scratch<A> scratch(a.G * kChunk + (a.C - a.K) * a.D), sums(pixels * kChunk);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / chunks, first = (task - b * chunks) * kChunk, count = std::min(kChunk, a.C - first);
      std::fill_n(sums.data(), pixels * kChunk, A(0));
      run(a, lists.data() + b * a.Q * (a.D + 1), counts.data() + b * a.Q, scratch.data(), sums.data(), b, first);
      if (problem.channels_last) {
        for (int64_t p = 0; p < pixels; ++p)
          convert(sums.data() + p * kChunk, to + (b * pixels + p) * a.C + first, count);
      } else {
        write(sums.data(), kChunk, to + (b * a.C + first) * pixels, pixels, pixels, count, kChunk);
      }
    }
  });
  return grad;
}

// In the type of images.
template <typename T, typename A>
Tensor rounded(const Tensor& sums, const Tensor& images) {
  if constexpr (std::is_same_v<T, A>) return sums;
  Tensor out = new_empty(images, sums.sizes());
  convert(data_of<A>(sums), static_cast<T*>(out.mutable_data_ptr()), sums.numel());
  return out;
}

Tensor sample_sum(const Tensor& images_in, const Tensor& samples_in, const Tensor& weights_in) {
  const auto problem = check_sample_sum("sample_sum", images_in, samples_in, weights_in);
  const Tensor samples = dense(samples_in), weights = dense(weights_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor sums = new_empty(samples, {problem.B, problem.G, problem.Q, problem.C});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(weights), a.sums = data_of<A>(sums);
    run_sum(a);
    output = rounded<T, A>(sums, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool /*deterministic: always*/) {
  constexpr const char* op = "sample_sum_backward";
  auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_grouped(op, "grad_output", "C", grad_output_in, problem.C, samples_in, problem, false);
  const Tensor grad_output = dense(grad_output_in), samples = dense(samples_in), weights = dense(weights_in);
  Tensor grad_images = images_in, grad_samples = new_empty(samples, samples.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(weights), a.rows = data_of<A>(grad_output);
    a.dots = data_of<A>(grad_weights), a.grad_samples = data_of<A>(grad_samples);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in);
  });
  return {grad_images, grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images_in, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  const auto problem = check_sample_dot("sample_dot", images_in, samples_in, queries_in, depths_in, num_octaves);
  const Tensor samples = dense(samples_in), queries = dense(queries_in), depths = dense(depths_in);
  Tensor output = images_in;
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    Tensor dots = new_empty(samples, {problem.B, problem.G, problem.Q, problem.D});
    auto a = arrays_of<T, A>(problem, images, samples);
    a.rows = data_of<A>(queries), a.depths = data_of<A>(depths), a.dots = data_of<A>(dots);
    run_dots(a);
    output = rounded<T, A>(dots, images_in);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool /*deterministic: always*/) {
  constexpr const char* op = "sample_dot_backward";
  auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", "D", grad_output_in, problem.D, samples_in, problem, false);
  const Tensor grad_output = dense(grad_output_in), samples = dense(samples_in), queries = dense(queries_in),
               depths = dense(depths_in);
  Tensor grad_images = images_in, grad_samples = new_empty(samples, samples.sizes()),
         grad_queries = new_empty(queries, queries.sizes()), grad_depths = new_empty(depths, depths.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(images_in, problem);
    auto a = arrays_of<T, A>(problem, images, samples);
    a.coefficients = data_of<A>(grad_output), a.rows = data_of<A>(queries), a.depths = data_of<A>(depths);
    a.sums = data_of<A>(grad_queries);
    run_sum(a);
    a.grad_samples = data_of<A>(grad_samples), a.grad_depths = data_of<A>(grad_depths);
    run_dots(a);
    grad_images = run_scatter(a, problem, images_in);
  });
  return {grad_images, grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample_dot_backward));
}

#endif  // VISDET_ISA_BASELINE

// Copies of images from one order in memory to another, and of sums to the type of images.
#include "cpu/sample/samples.h"

namespace visdet::VISDET_ISA {

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

// Writes to[c * to_stride + r] = from[r * from_stride + c] of rows x columns numbers; `readable` columns may be read.
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

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(SampleLayout, transpose<T, T>, transpose<A, T>, round_numbers<T, A>)

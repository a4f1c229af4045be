// Copies of images from one order in memory to another, and of sums to the type of images.
#include "cpu/sample/samples.h"

namespace visdet::VISDET_ISA {

// Writes to[c * to_stride + r] = from[r * from_stride + c] of rows x columns numbers, square by square, so that each
// line of the cache is read once.
template <typename From, typename To>
void transpose(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows, int64_t columns) {
  constexpr int64_t kSide = 16;
  for (int64_t r0 = 0; r0 < rows; r0 += kSide) {
    const int64_t end_r = r0 + kSide < rows ? r0 + kSide : rows;
    for (int64_t c0 = 0; c0 < columns; c0 += kSide) {
      const int64_t end_c = c0 + kSide < columns ? c0 + kSide : columns;
      for (int64_t c = c0; c < end_c; ++c) {
        for (int64_t r = r0; r < end_r; ++r) {
          if constexpr (sizeof(From) == sizeof(To)) {
            to[c * to_stride + r] = from[r * from_stride + c];
          } else {
            from_accumulate(from[r * from_stride + c], to[c * to_stride + r]);
          }
        }
      }
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(SampleLayout, transpose<T, T>, transpose<A, T>, round_numbers<T, A>)

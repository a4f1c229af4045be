// The scatter pass of sample_sum and sample_dot. A call writes kChunk channels of the gradient of one image.
#include "cpu/sample/samples.h"

namespace visdet::VISDET_ISA {

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

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(SampleScatter, list_samples<T, A>, scatter_chunk<T, A>)

// roi_pool on the CPU. The contract is in csrc/roi_pool.h.
//
// Forward: parallel over blocks of channels, which lie side by side in the lanes: a window of the map is laid out pixel
// by pixel once, then every bin is searched without branches, in reading order. Backward: parallel over channels, each
// adding its regions in order.
#include "roi_pool.h"

#include "cpu/regions.h"

namespace visdet::VISDET_ISA {

// A vector of integers of the size of A.
template <typename A>
using IndexVec = decltype(Vec<A>{} > Vec<A>{});

template <typename T, typename A>
void pool_region(const RoIPoolArrays<T>& a, const RoIPoolRegion& region, int64_t c0, const Window& window,
                 const A* pixels, A* peaks, int32_t* indices) {
  constexpr int kTile = kBlock<A>, kStep = kLanes<A>;
  const int64_t width = window.right - window.left, bins = a.PH * a.PW;
  int64_t at = 0;
  for (int64_t p = 0; p < a.PH; ++p) {
    const int32_t top = region.rows[2 * p], bottom = region.rows[2 * p + 1];
    for (int64_t q = 0; q < a.PW; ++q, at += kTile) {
      const int32_t left = region.columns[2 * q], right = region.columns[2 * q + 1];
      if (top >= bottom || left >= right) {
        for (int c = 0; c < kTile; ++c) peaks[at + c] = 0, indices[at + c] = -1;
        continue;
      }
      const A* first = pixels + ((top - window.top) * width + left - window.left) * kTile;
      Vec<A> most[kParts<A>];
      IndexVec<A> index[kParts<A>];
      for (int k = 0; k < kParts<A>; ++k) {
        most[k] = (Vec<A>{}) - A(__builtin_inf());
        index[k] = (IndexVec<A>{}) + (top * static_cast<int32_t>(a.W) + left);
      }
      for (int32_t h = top; h < bottom; ++h) {
        const A* pixel = first + (h - top) * width * kTile;
        IndexVec<A> here = (IndexVec<A>{}) + (h * static_cast<int32_t>(a.W) + left);
        for (int32_t w = left; w < right; ++w, pixel += kTile, here += 1) {
          for (int k = 0; k < kParts<A>; ++k) {
            const Vec<A> value = load(pixel + k * kStep);
            const auto is_better = value > most[k];
            most[k] = is_better ? value : most[k];
            index[k] = is_better ? here : index[k];
          }
        }
      }
      for (int k = 0; k < kParts<A>; ++k) {
        // Where nothing is greater than -inf the first pixel stands, be it NaN.
        const Vec<A> none = (Vec<A>{}) - A(__builtin_inf());
        store(peaks + at + k * kStep, most[k] > none ? most[k] : load(first + k * kStep));
        for (int lane = 0; lane < kStep; ++lane) indices[at + k * kStep + lane] = static_cast<int32_t>(index[k][lane]);
      }
    }
  }
  const int64_t channels = a.C - c0 < kTile ? a.C - c0 : kTile;
  T* output = a.output + (region.n * a.C + c0) * bins;
  int32_t* argmax = a.argmax + (region.n * a.C + c0) * bins;
  for (int64_t c = 0; c < channels; ++c, output += bins, argmax += bins) {
    for (int64_t i = 0; i < bins; ++i) {
      from_accumulate(peaks[i * kTile + c], output[i]);
      argmax[i] = indices[i * kTile + c];
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(RoIPoolKernels, lay_out_window<T, A>, pool_region<T, A>)

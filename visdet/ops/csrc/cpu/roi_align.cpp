// roi_align, its maxima and prroi_pool on the CPU. The contracts are in csrc/roi_align.h.
//
// The weights with which a bin takes pixels are the same in every channel: they are computed once a region. Then
// channels lie side by side in the lanes: a window of the map is laid out pixel by pixel once for a block of them, and
// each bin adds up its pixels. Forward: parallel over images (or parts of their regions) and blocks of channels.
// Backward: parallel over images and blocks of channels, each adding its regions in order.
#include "cpu/roi_align.h"

#include "cpu/regions.h"

namespace visdet::VISDET_ISA {

// Calls f(weight, line, tap, end) for the rows of the sample in row p and column q of all samples. The taps of its
// columns are [tap, end), and their pixels are the (line + tap->index)-th.
template <typename A, typename F>
VISDET_INLINE void for_each_row(const RoIAlignRegion<A>& region, int64_t p, int64_t q, const Window& window,
                                const F& f) {
  const RoIAlignAxis<A>&rows = region.rows, &columns = region.columns;
  const int64_t width = window.right - window.left;
  for (int64_t i = rows.ends[p]; i < rows.ends[p + 1]; ++i) {
    const int64_t begin = region.is_listed ? i : columns.ends[q], end = region.is_listed ? i + 1 : columns.ends[q + 1];
    f(rows.taps[i].weight, (rows.taps[i].index - window.top) * width - window.left, columns.taps + begin,
      columns.taps + end);
  }
}

// Writes the sample in row p and column q of all samples.
template <typename A>
VISDET_INLINE void add_up(const RoIAlignRegion<A>& region, int64_t p, int64_t q, const Window& window, const A* pixels,
                          Vec<A> (&sum)[kParts<A>]) {
  for (int k = 0; k < kParts<A>; ++k) sum[k] = Vec<A>{};
  for_each_row(region, p, q, window, [&](A weight, int64_t line, const auto* tap, const auto* end) {
    Vec<A> along[kParts<A>] = {};
    for (; tap != end; ++tap) {
      const A* pixel = pixels + (line + tap->index) * kBlock<A>;
      for (int k = 0; k < kParts<A>; ++k) along[k] += tap->weight * load(pixel + k * kLanes<A>);
    }
    for (int k = 0; k < kParts<A>; ++k) sum[k] += weight * along[k];
  });
}

// Writes the largest sample of bin (p, q) to `most`, NaN if there is one, and the number of the first such sample. Both
// are 0 before.
template <typename A>
VISDET_INLINE void find_largest(const RoIAlignRegion<A>& region, int64_t p, int64_t q, const Window& window,
                                const A* pixels, Vec<A> (&most)[kParts<A>], IntVec<A> (&number)[kParts<A>]) {
  const int64_t samples = region.down * region.across;
  if (samples > 0) add_up(region, p * region.down, q * region.across, window, pixels, most);
  for (int64_t here = 1; here < samples; ++here) {
    Vec<A> sum[kParts<A>];
    add_up(region, p * region.down + here / region.across, q * region.across + here % region.across, window, pixels,
           sum);
    for (int k = 0; k < kParts<A>; ++k) {
      const IntVec<A> is_larger = (most[k] == most[k]) & ~(sum[k] <= most[k]);
      most[k] = is_larger ? sum[k] : most[k];
      number[k] = is_larger ? IntVec<A>{} + static_cast<int>(here) : number[k];
    }
  }
}

template <typename T, typename A>
void pool_region(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels, A* results,
                 T* output) {
  const int64_t bins = region.PH * region.PW;
  A* result = results;
  for (int64_t p = 0; p < region.PH; ++p) {
    for (int64_t q = 0; q < region.PW; ++q) {
      Vec<A> most[kParts<A>] = {};
      IntVec<A> number[kParts<A>] = {};
      find_largest(region, p, q, window, pixels, most, number);
      for (int k = 0; k < kParts<A>; ++k, result += kLanes<A>) store(result, most[k]);
    }
  }
  for (int64_t c = 0; c < channels; ++c, output += bins) {
    for (int64_t i = 0; i < bins; ++i) from_accumulate(results[i * kBlock<A> + c], output[i]);
  }
}

template <typename T, typename A>
void spread_region(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels,
                   const T* grad_output, A* gradients, A* sums) {
  constexpr int kTile = kBlock<A>;
  const int64_t bins = region.PH * region.PW;
  for (int64_t c = 0; c < kTile; ++c) {
    for (int64_t i = 0; i < bins; ++i) {
      gradients[i * kTile + c] = c < channels ? to_accumulate(grad_output[c * bins + i]) : A(0);
    }
  }
  const A* gradient = gradients;
  for (int64_t p = 0; p < region.PH; ++p) {
    for (int64_t q = 0; q < region.PW; ++q, gradient += kTile) {
      Vec<A> most[kParts<A>] = {};
      IntVec<A> number[kParts<A>] = {};
      if (pixels) find_largest(region, p, q, window, pixels, most, number);
      for (int64_t here = 0; here < region.down * region.across; ++here) {
        Vec<A> part[kParts<A>];
        bool is_any = false;
        for (int k = 0; k < kParts<A>; ++k) {
          const IntVec<A> is_here = number[k] == static_cast<int>(here);
          part[k] = is_here ? load(gradient + k * kLanes<A>) : Vec<A>{};
          is_any |= any_lane<A>(is_here);
        }
        if (!is_any) continue;
        const int64_t i = p * region.down + here / region.across, j = q * region.across + here % region.across;
        for_each_row(region, i, j, window, [&](A weight, int64_t line, const auto* tap, const auto* end) {
          Vec<A> along[kParts<A>];
          for (int k = 0; k < kParts<A>; ++k) along[k] = weight * part[k];
          for (; tap != end; ++tap) {
            A* pixel = sums + (line + tap->index) * kBlock<A>;
            for (int k = 0; k < kParts<A>; ++k) {
              store(pixel + k * kLanes<A>, load(pixel + k * kLanes<A>) + tap->weight * along[k]);
            }
          }
        });
      }
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(RoIAlignKernels, lay_out_window<T, A>, add_window<T, A>, pool_region<T, A>, spread_region<T, A>)

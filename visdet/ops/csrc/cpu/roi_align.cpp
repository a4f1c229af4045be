// roi_align on the CPU. The contract is in csrc/roi_align.h.
//
// The weights with which a bin takes rows and columns are the same in every channel: they are computed once a region.
// Then channels lie side by side in the lanes: a window of the map is laid out pixel by pixel once for a block of them,
// and each bin adds up its pixels. Forward: parallel over images (or parts of their regions) and blocks of channels.
// Backward: parallel over images and blocks of channels, each adding its regions in order.
#include "cpu/roi_align.h"

#include "cpu/regions.h"

namespace visdet::VISDET_ISA {

template <typename T, typename A>
void average_region(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels, A* means,
                    T* output) {
  constexpr int kTile = kBlock<A>, kStep = kLanes<A>;
  const RoIAlignAxis<A>&rows = region.rows, &columns = region.columns;
  const int64_t width = window.right - window.left, bins = rows.bins * columns.bins;
  A* mean = means;
  for (int64_t p = 0, row = 0; p < rows.bins; row = rows.ends[p++]) {
    for (int64_t q = 0, column = 0; q < columns.bins; column = columns.ends[q++], mean += kTile) {
      Vec<A> sum[kParts<A>] = {};
      for (int64_t i = row; i < rows.ends[p]; ++i) {
        const A* line = pixels + ((rows.taps[i].index - window.top) * width - window.left) * kTile;
        Vec<A> along[kParts<A>] = {};
        for (int64_t j = column; j < columns.ends[q]; ++j) {
          const A* pixel = line + columns.taps[j].index * static_cast<int64_t>(kTile);
          for (int k = 0; k < kParts<A>; ++k) along[k] += columns.taps[j].weight * load(pixel + k * kStep);
        }
        for (int k = 0; k < kParts<A>; ++k) sum[k] += rows.taps[i].weight * along[k];
      }
      for (int k = 0; k < kParts<A>; ++k) store(mean + k * kStep, sum[k]);
    }
  }
  for (int64_t c = 0; c < channels; ++c, output += bins) {
    for (int64_t i = 0; i < bins; ++i) from_accumulate(means[i * kTile + c], output[i]);
  }
}

template <typename T, typename A>
void spread_region(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const T* grad_output,
                   A* gradients, A* sums) {
  constexpr int kTile = kBlock<A>, kStep = kLanes<A>;
  const RoIAlignAxis<A>&rows = region.rows, &columns = region.columns;
  const int64_t width = window.right - window.left, bins = rows.bins * columns.bins;
  for (int64_t c = 0; c < kTile; ++c) {
    for (int64_t i = 0; i < bins; ++i) {
      gradients[i * kTile + c] = c < channels ? to_accumulate(grad_output[c * bins + i]) : A(0);
    }
  }
  const A* gradient = gradients;
  for (int64_t p = 0, row = 0; p < rows.bins; row = rows.ends[p++]) {
    for (int64_t q = 0, column = 0; q < columns.bins; column = columns.ends[q++], gradient += kTile) {
      for (int64_t i = row; i < rows.ends[p]; ++i) {
        A* line = sums + ((rows.taps[i].index - window.top) * width - window.left) * kTile;
        Vec<A> along[kParts<A>];
        for (int k = 0; k < kParts<A>; ++k) along[k] = rows.taps[i].weight * load(gradient + k * kStep);
        for (int64_t j = column; j < columns.ends[q]; ++j) {
          A* pixel = line + columns.taps[j].index * static_cast<int64_t>(kTile);
          for (int k = 0; k < kParts<A>; ++k) {
            store(pixel + k * kStep, load(pixel + k * kStep) + columns.taps[j].weight * along[k]);
          }
        }
      }
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(RoIAlignKernels, lay_out_window<T, A>, take_back_window<T, A>, average_region<T, A>, spread_region<T, A>)

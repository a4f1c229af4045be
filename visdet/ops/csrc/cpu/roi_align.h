// The arguments and the table of the CPU kernels of roi_align and prroi_pool. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/windows.h"

namespace visdet {

// A row or column of the map and its weight in a sample or bin.
template <typename A>
struct RoIAlignTap {
  A weight;
  int32_t index;
};

// The taps of all bins along an axis, one bin after another: those of bin k are ends[k] to ends[k + 1].
template <typename A>
struct RoIAlignAxis {
  const RoIAlignTap<A>* taps;
  const int64_t* ends;
};

// A bin is the largest of down x across samples, each a sum over rows and columns of the map. A mean is one sample. If
// `is_listed`, rows and columns are not along axes but have a tap each for each pixel, and PW is 1.
template <typename A>
struct RoIAlignRegion {
  int64_t n;
  RoIAlignAxis<A> rows, columns;
  Window window;  // the smallest with all taps
  int64_t PH, PW, down, across;
  bool is_listed;
};

template <typename T, typename A>
struct RoIAlignKernels {
  LayOutWindow<T, A> lay_out;
  AddWindow<T, A> add_window;
  // Pools one region over a block of channels into output [channels, PH * PW]. pixels [window, kBlock] holds at least
  // the region's window. results: scratch of [PH * PW, kBlock].
  void (*pool)(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels, A* results,
               T* output);
  // Adds the gradient of one region, grad_output [channels, PH * PW], to sums [window, kBlock]. pixels: as above, or
  // null if bins have one sample. gradients: scratch of [PH * PW, kBlock].
  void (*spread)(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels,
                 const T* grad_output, A* gradients, A* sums);
};

}  // namespace visdet

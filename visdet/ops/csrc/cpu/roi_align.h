// The arguments and the table of the CPU kernels of roi_align. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/windows.h"

namespace visdet {

// A row or column of the map and its weight in a bin.
template <typename A>
struct RoIAlignTap {
  A weight;
  int32_t index;
};

// The taps of all bins along an axis, one bin after another. The taps of bin k end before ends[k].
template <typename A>
struct RoIAlignAxis {
  const RoIAlignTap<A>* taps;
  const int64_t* ends;
  int64_t bins;
};

template <typename A>
struct RoIAlignRegion {
  int64_t n;
  RoIAlignAxis<A> rows, columns;
  Window window;  // the smallest with all taps
};

template <typename T, typename A>
struct RoIAlignKernels {
  LayOutWindow<T, A> lay_out;
  TakeBackWindow<T, A> take_back;
  // Averages one region over a block of channels into output [channels, PH * PW]. pixels [window, kBlock] holds at
  // least the region's window. means: scratch of [PH * PW, kBlock].
  void (*average)(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const A* pixels, A* means,
                  T* output);
  // Adds the gradient of one region, grad_output [channels, PH * PW], to sums [window, kBlock]. gradients: scratch of
  // [PH * PW, kBlock].
  void (*spread)(const RoIAlignRegion<A>& region, int64_t channels, const Window& window, const T* grad_output,
                 A* gradients, A* sums);
};

}  // namespace visdet

// The arguments and the table of the CPU kernels of roi_pool. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/windows.h"

namespace visdet {

template <typename T>
struct RoIPoolArrays {
  int64_t B, C, H, W, N, PH, PW;
  const T* input;   // [B, C, H, W]
  T* output;        // [N, C, PH, PW]
  int32_t* argmax;  // [N, C, PH, PW]
};

// A region: its bins, half-open intervals inside the map, and the smallest window around them.
struct RoIPoolRegion {
  int64_t n;
  const int32_t* rows;     // [PH, 2]
  const int32_t* columns;  // [PW, 2]
  Window window;
};

template <typename T, typename A>
struct RoIPoolKernels {
  LayOutWindow<T, A> lay_out;
  // Pools one region over a block of channels from c0 on. pixels [window, kBlock] holds at least the region's window.
  // peaks and indices: scratch of [PH * PW, kBlock] each.
  void (*pool)(const RoIPoolArrays<T>& a, const RoIPoolRegion& region, int64_t c0, const Window& window,
               const A* pixels, A* peaks, int32_t* indices);
};

}  // namespace visdet

// The arguments and the table of the CPU kernels of carafe. See cpu/kernels.h.
#pragma once

#include "cpu/kernels.h"

namespace visdet {

template <typename T, typename A>
struct CarafeArrays {
  int64_t B, C, H, W, G, K, s;
  const T* features;     // [B, C, H, W]
  const T* masks;        // [B, G * K * K, H * s, W * s]
  const T* grad_output;  // [B, C, H * s, W * s]
  A* phases;             // [B, G, H, s * s, K * K, W]: masks, later their gradients
  T* output;             // [B, C, H * s, W * s]
  T* grad_features;      // [B, C, H, W]
  T* grad_masks;         // as masks
};

template <typename T, typename A>
struct CarafeKernels {
  // These copy row h of group g of image b: from masks to phases, and from the gradients of phases to those of masks.
  void (*masks_to_phases)(const CarafeArrays<T, A>& a, int64_t b, int64_t g, int64_t h);
  void (*phases_to_masks)(const CarafeArrays<T, A>& a, int64_t b, int64_t g, int64_t h);
  // Writes the output in row h of group g of image b. scratch: [K * (W + K - 1) + W].
  void (*upsample_row)(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t g, int64_t h);
  // Writes the gradient of phases in row h to `grads` [s * s, K * K, W]. scratch is as above.
  void (*grad_masks_row)(const CarafeArrays<T, A>& a, A* grads, A* scratch, int64_t b, int64_t g, int64_t h);
  // Writes the gradient of channel c of image b. scratch: [(H + K - 1) * (W + K - 1) + W].
  void (*grad_features_map)(const CarafeArrays<T, A>& a, A* scratch, int64_t b, int64_t c);
};

}  // namespace visdet

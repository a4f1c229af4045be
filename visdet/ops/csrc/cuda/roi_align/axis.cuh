// The pixels of an upright region along one axis, and their weights in each bin. The weights along y and x are
// independent and the same in all channels, so that a block computes them once.
#pragma once

#include <cstdint>

#include "common/warp.cuh"
#include "cuda/roi_align/samples.cuh"

namespace visdet::roi_align {

constexpr int kBins = 32;                     // a lane each
constexpr int kSlots = 256;                   // pixels of an axis that a region may read
constexpr int kWeights = kSlots + 2 * kBins;  // two neighbouring bins have two pixels in common at most

// Slot s is the pixel pixels[s], ascending. Bin k has the weights first[k] .. first[k + 1], those of the slots from
// slot[k] on.
template <typename A>
struct Axis {
  A weights[kWeights];
  int32_t pixels[kSlots];  // times the stride along the axis
  int16_t first[kBins + 1], slot[kBins];
  uint8_t low[kSlots], high[kSlots];  // slot s is of the bins low[s] .. high[s] - 1. See find_bins().
  int slots;                          // -1 where the region needs more slots than there are

  __device__ __forceinline__ A weight(int bin, int of_slot) const { return weights[first[bin] + of_slot - slot[bin]]; }
};

// For all lanes of a warp: lays out an axis of `size` pixels. Samples must not go backwards; where they do, and where
// there are more pixels than slots, `slots` becomes -1.
template <typename A>
__device__ void lay_out(Axis<A>& axis, A start, const Bins<A>& bins, int count, int size, int stride) {
  const int lane = threadIdx.x % 32;
  const bool is_bin = lane < count && bins.size >= 0 && bins.samples <= kSlots;
  int pixels = 0, least = 0, low = 0;
  A fraction;
  for (int i = 0; is_bin && i < bins.samples; ++i) {
    int at;
    if (!locate_on_axis(Frame<A>::at(start, bins, lane, i), size, at, fraction)) continue;
    const int both = at + 1 < size ? 2 : 1, step = at - low;
    if (pixels == 0) {
      least = at, pixels = both;
    } else if (step > 0) {
      pixels += step == 1 ? both - 1 : both;
    }
    low = at;
  }
  const int greatest = min(low + 1, size - 1);
  const int before = __shfl_up_sync(kAllLanes, pixels, 1), low_before = __shfl_up_sync(kAllLanes, low, 1);
  const int greatest_before = __shfl_up_sync(kAllLanes, greatest, 1);
  const bool has_neighbour = lane > 0 && pixels > 0 && before > 0;
  const bool is_ordered = !has_neighbour || least >= low_before;  // rounding may break the order
  const int common = has_neighbour ? max(greatest_before - least + 1, 0) : 0;
  const int weights = inclusive_sum_lanes(pixels), slots = inclusive_sum_lanes(pixels - common);
  const int first = weights - pixels, slot = slots - pixels;
  const bool fits = __shfl_sync(kAllLanes, slots, 31) <= kSlots && bins.size >= 0 && bins.samples <= kSlots;
  if (!__all_sync(kAllLanes, is_ordered) || !fits) {
    if (lane == 0) axis.slots = -1;
    return;
  }
  if (lane < count) axis.first[lane] = static_cast<int16_t>(first), axis.slot[lane] = static_cast<int16_t>(slot);
  if (lane == 31) axis.first[count] = static_cast<int16_t>(weights), axis.slots = slots;
  if (pixels == 0) return;
  for (int i = 0; i < pixels; ++i) axis.weights[first + i] = 0;
  const A share = A(1) / static_cast<A>(bins.samples);
  int at_pixel = 0;
  low = least;
  for (int i = 0; i < bins.samples; ++i) {
    int at;
    if (!locate_on_axis(Frame<A>::at(start, bins, lane, i), size, at, fraction)) continue;
    at_pixel += min(at - low, 2), low = at;
    axis.weights[first + at_pixel] += share * (1 - fraction);
    axis.pixels[slot + at_pixel] = at * stride;
    if (at + 1 < size) {
      axis.weights[first + at_pixel + 1] += share * fraction;
      axis.pixels[slot + at_pixel + 1] = (at + 1) * stride;
    }
  }
}

// For all threads of a block, once the axis is laid out: finds the bins of each slot. Bins without pixels lie before
// the first and behind the last one with pixels, and their ranges of slots are empty.
template <typename A>
__device__ void find_bins(Axis<A>& axis, int count) {
  for (int s = threadIdx.x; s < axis.slots; s += blockDim.x) {
    int low = count, high = 0;
    for (int k = 0; k < count; ++k) {
      if (s >= axis.slot[k] && s < axis.slot[k] + axis.first[k + 1] - axis.first[k]) low = min(low, k), high = k + 1;
    }
    axis.low[s] = static_cast<uint8_t>(low), axis.high[s] = static_cast<uint8_t>(high);
  }
}

}  // namespace visdet::roi_align

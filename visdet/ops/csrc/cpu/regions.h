// Maps of a block of channels, laid out pixel by pixel for the operators that pool regions on the CPU.
#pragma once

#include "cpu/vec.h"
#include "cpu/windows.h"

namespace visdet::VISDET_ISA {

// The vectors of a block.
template <typename A>
constexpr int kParts = kBlock<A> / kLanes<A>;

// Writes `window` of the `channels` planes from `maps` on to `to` [pixels, kBlock]; the other lanes are 0.
template <typename T, typename A>
void lay_out_window(const T* maps, int64_t W, int64_t plane, int64_t channels, const Window& window, A* to) {
  constexpr int kTile = kBlock<A>;
  A tile[kTile][kTile] = {};  // [channel, pixel]: each row of a plane is read once, whatever set of the cache it is in
  for (int64_t h = window.top; h < window.bottom; ++h) {
    for (int64_t w = window.left; w < window.right; w += kTile) {
      const int64_t count = window.right - w < kTile ? window.right - w : kTile;
      const T* from = maps + h * W + w;
      for (int64_t c = 0; c < channels; ++c, from += plane) {
        if (count == kTile) {
          for (int k = 0; k < kTile; k += kLanes<A>) store(tile[c] + k, load(from + k));
        } else {
          for (int64_t k = 0; k < count; ++k) tile[c][k] = to_accumulate(from[k]);
        }
      }
      for (int64_t k = 0; k < count; ++k, to += kTile) {
        for (int c = 0; c < kTile; ++c) to[c] = tile[c][k];
      }
    }
  }
}

// The way back: adds `from` [pixels, kBlock] to `window` of the planes.
template <typename T, typename A>
void add_window(const A* from, int64_t W, int64_t plane, int64_t channels, const Window& window, T* maps) {
  constexpr int kTile = kBlock<A>;
  for (int64_t h = window.top; h < window.bottom; ++h) {
    for (int64_t w = window.left; w < window.right; w += kTile) {
      const int64_t count = window.right - w < kTile ? window.right - w : kTile;
      T* to = maps + h * W + w;
      for (int64_t c = 0; c < channels; ++c, to += plane) {
        for (int64_t k = 0; k < count; ++k) from_accumulate(to_accumulate(to[k]) + from[k * kTile + c], to[k]);
      }
      from += count * kTile;
    }
  }
}

}  // namespace visdet::VISDET_ISA

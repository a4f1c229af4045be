// Bilinear sampling of a zero-padded map: THE border rule, written once for host and device.
//
// A map of H x W texels has texel (0, 0) centred at pixel coordinate (0, 0). A sample at (x, y) counts iff
// -1 < x < W and -1 < y < H; a corner outside the map counts as zero. NaN fails every comparison, so it counts nothing.
// This is grid_sample(2 * loc - 1, bilinear, zeros, align_corners=False) at x = loc_x * W - 0.5, y = loc_y * H - 0.5.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace visdet {

// The four texels around a sample. Texels outside the map have their index clamped into it and is_inside false, so that
// a reader may load all four without a branch and multiply by zero.
template <typename Coord>
struct Bilinear {
  int32_t index[4];   // y * W + x of corners 00, 01 (x + 1), 10 (y + 1), 11
  bool is_inside[4];  // whether that corner is a texel of the map
  Coord fx, fy;       // fractions of the way to corner 01 and to corner 10
  // Of a sample that counts, whether columns x, x + 1 and rows y, y + 1 are of the map: weights by column and by row
  // cost host code four selects, those by corner a dozen operations on masks.
  bool left, right, top, bottom;

  // The interpolation weight of each corner, zero outside the map.
  VISDET_HOST_DEVICE void corner_weights(Coord (&w)[4]) const {
    w[0] = is_inside[0] ? (1 - fy) * (1 - fx) : Coord(0);
    w[1] = is_inside[1] ? (1 - fy) * fx : Coord(0);
    w[2] = is_inside[2] ? fy * (1 - fx) : Coord(0);
    w[3] = is_inside[3] ? fy * fx : Coord(0);
  }
};

// Returns whether the sample at pixel coordinates (x, y) counts, and writes its corners to `out`. The corners of a
// sample that does not count are texels of the map, which must have one, with is_inside false. There are no branches,
// so that compilers turn loops over samples into vector code.
template <typename Coord>
VISDET_HOST_DEVICE bool locate(Coord x, Coord y, int32_t H, int32_t W, Bilinear<Coord>& out) {
  const bool counts = (x > Coord(-1)) & (y > Coord(-1)) & (x < Coord(W)) & (y < Coord(H));
  x = counts ? x : Coord(0);
  y = counts ? y : Coord(0);
  // The floor of a number in (-1, 2^31): its truncation, less one where the truncation is above the number.
  int32_t x0 = static_cast<int32_t>(x), y0 = static_cast<int32_t>(y);
  x0 -= static_cast<Coord>(x0) > x;
  y0 -= static_cast<Coord>(y0) > y;
  const bool left = x0 >= 0, right = x0 + 1 < W, top = y0 >= 0, bottom = y0 + 1 < H;
  out.left = left, out.right = right, out.top = top, out.bottom = bottom;
  const int32_t xl = left ? x0 : 0, xr = right ? x0 + 1 : W - 1;
  const int32_t yt = (top ? y0 : 0) * W, yb = (bottom ? y0 + 1 : H - 1) * W;
  out.index[0] = yt + xl;
  out.index[1] = yt + xr;
  out.index[2] = yb + xl;
  out.index[3] = yb + xr;
  out.is_inside[0] = counts & top & left;
  out.is_inside[1] = counts & top & right;
  out.is_inside[2] = counts & bottom & left;
  out.is_inside[3] = counts & bottom & right;
  out.fx = x - static_cast<Coord>(x0);
  out.fy = y - static_cast<Coord>(y0);
  return counts;
}

}  // namespace visdet

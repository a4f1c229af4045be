// The regions of each image, for host code of the operators that pool regions.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/windows.h"

namespace visdet {

inline int64_t area(const Window& w) { return static_cast<int64_t>(w.bottom - w.top) * (w.right - w.left); }

// Regions of one image, and what of it is laid out at a time: `shared`, around all of them, or, where that is more,
// each region's own window.
template <typename Region>
struct RegionsOfImage {
  std::vector<Region> regions;
  Window shared{INT32_MAX, 0, INT32_MAX, 0};
  int64_t own_areas = 0, largest = 0;

  void add(const Region& region) {
    regions.push_back(region);
    const Window& w = region.window;
    if (area(w) == 0) return;
    shared = {std::min(shared.top, w.top), std::max(shared.bottom, w.bottom), std::min(shared.left, w.left),
              std::max(shared.right, w.right)};
    own_areas += area(w);
    largest = std::max(largest, area(w));
  }
  bool is_shared() const { return own_areas > 0 && area(shared) < own_areas; }
  int64_t pixels() const { return is_shared() ? area(shared) : largest; }
};

}  // namespace visdet

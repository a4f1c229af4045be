// The regions of each image and the loop over them, for host code of the operators that pool regions.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/windows.h"

namespace visdet {

inline int64_t area(const Window& w) { return static_cast<int64_t>(w.bottom - w.top) * (w.right - w.left); }

// RegionsOfImage has the regions of one image, and says which window of the image is laid out at a time: `shared`, the
// window around all regions, or each region's own window where these have fewer pixels together.
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

// Pools the regions of input [B, C, H, W]. images: for each image its regions in `parts` parts, one after another. A
// task takes a part and a block of channels. new_pool() returns a thread's function, which pools one region:
// pool(region, c0, channels, window, pixels) for `channels` channels from c0 on, given pixels [window, kBlock].
template <typename A, typename T, typename Region, typename NewPool>
void pool_regions(const std::vector<RegionsOfImage<Region>>& images, int64_t parts, const T* input, int64_t C,
                  int64_t H, int64_t W, LayOutWindow<T, A> lay_out, const NewPool& new_pool) {
  int64_t pixels = 0;
  for (const auto& image : images) pixels = std::max(pixels, image.pixels());
  const int64_t blocks = ceil_of(C, kBlock<A>), plane = H * W, tasks = static_cast<int64_t>(images.size()) * blocks;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    const Scratch<A> laid_out(pixels * kBlock<A>);
    const auto pool = new_pool();
    for (int64_t task = begin; task < end; ++task) {
      const auto& image = images[task / blocks];
      const int64_t b = task / blocks / parts, c0 = task % blocks * kBlock<A>;
      const int64_t channels = std::min<int64_t>(C - c0, kBlock<A>);
      const T* maps = input + (b * C + c0) * plane;
      if (image.is_shared()) lay_out(maps, W, plane, channels, image.shared, laid_out.data());
      for (const Region& region : image.regions) {
        const Window& window = image.is_shared() ? image.shared : region.window;
        if (!image.is_shared()) lay_out(maps, W, plane, channels, window, laid_out.data());
        pool(region, c0, channels, window, laid_out.data());
      }
    }
  });
}

}  // namespace visdet

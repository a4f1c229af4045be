// roi_pool: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "roi_pool.h"

#include "cpu/dispatch.h"
#include "cpu/images.h"

namespace visdet {
namespace {

// Writes the bins of start..end, each [begin, end) within 0..size, and returns whether there is an extent.
template <typename A>
bool write_bins(A start, A end, int64_t count, int64_t size, int32_t* bins) {
  if (!(end > start)) return false;
  for (int k = 0; k < count; ++k) bin_of(start, end, k, count, size, bins[2 * k], bins[2 * k + 1]);
  return true;
}

// Returns the smallest window around a region's bins. Empty bins do not count.
Window window_of(const RoIPoolRegion& region, int64_t PH, int64_t PW) {
  Window window{INT32_MAX, 0, INT32_MAX, 0};
  for (int64_t p = 0; p < PH; ++p) {
    if (region.rows[2 * p] >= region.rows[2 * p + 1]) continue;
    window.top = std::min(window.top, region.rows[2 * p]);
    window.bottom = std::max(window.bottom, region.rows[2 * p + 1]);
  }
  for (int64_t q = 0; q < PW; ++q) {
    if (region.columns[2 * q] >= region.columns[2 * q + 1]) continue;
    window.left = std::min(window.left, region.columns[2 * q]);
    window.right = std::max(window.right, region.columns[2 * q + 1]);
  }
  return window.top < window.bottom && window.left < window.right ? window : Window{0, 0, 0, 0};
}

using RoIPoolImage = RegionsOfImage<RoIPoolRegion>;

// Sorts the regions by image; those of none have no bins, and are with the first. intervals: [N, 2 * (PH + PW)].
template <typename A>
std::vector<RoIPoolImage> sort_regions(const RoIPoolProblem& p, const A* boxes, A scale, int32_t* intervals) {
  std::vector<RoIPoolImage> images(std::max<int64_t>(p.B, 1));
  for (int64_t n = 0; n < p.N; ++n, boxes += 5, intervals += 2 * (p.PH + p.PW)) {
    int32_t *rows = intervals, *columns = rows + 2 * p.PH;
    const bool is_region = is_image(boxes[0], p.B) &&
                           write_bins<A>(boxes[2] * scale, (boxes[4] + 1) * scale, p.PH, p.H, rows) &&
                           write_bins<A>(boxes[1] * scale, (boxes[3] + 1) * scale, p.PW, p.W, columns);
    if (!is_region) std::fill(rows, rows + 2 * (p.PH + p.PW), 0);
    RoIPoolRegion region{n, rows, columns, {}};
    region.window = window_of(region, p.PH, p.PW);
    images[is_region ? static_cast<int64_t>(boxes[0]) : 0].add(region);
  }
  return images;
}

}  // namespace

template <typename T, typename A>
void pool_to_maxima(const OnDevice&, const RoIPoolArrays<T>& a, const A* rois, A scale) {
  const int64_t bins = a.PH * a.PW;
  const Scratch<int32_t> intervals(a.N * 2 * (a.PH + a.PW));
  const auto images = sort_regions<A>(a, rois, scale, intervals.data());
  const auto& kernels = best_kernels<RoIPoolKernels<T, A>>();
  pool_regions<A>(images, 1, a.input, a.C, a.H, a.W, kernels.lay_out, [&] {
    return [&, peaks = Scratch<A>(bins * kBlock<A>), indices = Scratch<int32_t>(bins * kBlock<A>)](
               const RoIPoolRegion& region, int64_t c0, int64_t, const Window& window, const A* pixels) {
      kernels.pool(a, region, c0, window, pixels, peaks.data(), indices.data());
    };
  });
}

template <typename T, typename A>
void scatter_to_maxima(const OnDevice&, const RoIPoolProblem& p, const T* grad_output, const A* rois,
                       const int32_t* argmax, A* sums) {
  const int64_t bins = p.PH * p.PW, pixels = p.H * p.W;
  torch::stable::parallel_for(0, p.C, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = 0; n < p.N; ++n) {
      const A b = rois[5 * n];
      if (!(b >= 0 && b < static_cast<A>(p.B))) continue;
      for (int64_t c = begin; c < end; ++c) {
        A* map = sums + (static_cast<int64_t>(b) * p.C + c) * pixels;
        const int64_t first = (n * p.C + c) * bins;
        for (int64_t i = first; i < first + bins; ++i) {
          if (argmax[i] >= 0 && argmax[i] < pixels) map[argmax[i]] += to_accumulate(grad_output[i]);
        }
      }
    }
  });
}

}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "roi_pool(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale)"
      " -> (Tensor output, Tensor argmax)");
  m.def(
      "roi_pool_backward(Tensor grad_output, Tensor rois, Tensor argmax, int B, int H, int W)"
      " -> Tensor grad_input");
}

// roi_pool on the CPU. The contract is in ../roi_pool.h; how this file is compiled, in vec.h.
//
// Forward: parallel over blocks of channels, which lie side by side in the lanes: a window of the map is laid out pixel
// by pixel once, then every bin is searched without branches, in reading order. Backward: parallel over channels, each
// adding its regions in order.
#include "cpu/regions.h"

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

namespace VISDET_ISA {

// Integers as wide as A, in a vector.
template <typename A>
using IndexVec = decltype(Vec<A>{} > Vec<A>{});

// Pools one region over a block of channels from c0 on. pixels [window, kBlock] holds at least the region's window.
// peaks and places: scratch of [PH * PW, kBlock] each.
template <typename T, typename A>
void pool_region(const RoIPoolArrays<T>& a, const RoIPoolRegion& region, int64_t c0, const Window& window,
                 const A* pixels, A* peaks, int32_t* places) {
  constexpr int kTile = kBlock<A>, kStep = kLanes<A>;
  const int64_t width = window.right - window.left, bins = a.PH * a.PW;
  int64_t at = 0;
  for (int64_t p = 0; p < a.PH; ++p) {
    const int32_t top = region.rows[2 * p], bottom = region.rows[2 * p + 1];
    for (int64_t q = 0; q < a.PW; ++q, at += kTile) {
      const int32_t left = region.columns[2 * q], right = region.columns[2 * q + 1];
      if (top >= bottom || left >= right) {
        for (int c = 0; c < kTile; ++c) peaks[at + c] = 0, places[at + c] = -1;
        continue;
      }
      const A* first = pixels + ((top - window.top) * width + left - window.left) * kTile;
      Vec<A> most[kParts<A>];
      IndexVec<A> place[kParts<A>];
      for (int k = 0; k < kParts<A>; ++k) {
        most[k] = (Vec<A>{}) - A(__builtin_inf());
        place[k] = (IndexVec<A>{}) + (top * static_cast<int32_t>(a.W) + left);
      }
      for (int32_t h = top; h < bottom; ++h) {
        const A* pixel = first + (h - top) * width * kTile;
        IndexVec<A> here = (IndexVec<A>{}) + (h * static_cast<int32_t>(a.W) + left);
        for (int32_t w = left; w < right; ++w, pixel += kTile, here += 1) {
          for (int k = 0; k < kParts<A>; ++k) {
            const Vec<A> value = load(pixel + k * kStep);
            const auto is_better = value > most[k];
            most[k] = is_better ? value : most[k];
            place[k] = is_better ? here : place[k];
          }
        }
      }
      for (int k = 0; k < kParts<A>; ++k) {
        // Where nothing is greater than -inf the first pixel stands, be it NaN.
        const Vec<A> none = (Vec<A>{}) - A(__builtin_inf());
        store(peaks + at + k * kStep, most[k] > none ? most[k] : load(first + k * kStep));
        for (int lane = 0; lane < kStep; ++lane) places[at + k * kStep + lane] = static_cast<int32_t>(place[k][lane]);
      }
    }
  }
  const int64_t channels = a.C - c0 < kTile ? a.C - c0 : kTile;
  T* output = a.output + (region.n * a.C + c0) * bins;
  int32_t* argmax = a.argmax + (region.n * a.C + c0) * bins;
  for (int64_t c = 0; c < channels; ++c, output += bins, argmax += bins) {
    for (int64_t i = 0; i < bins; ++i) {
      from_accumulate(peaks[i * kTile + c], output[i]);
      argmax[i] = places[i * kTile + c];
    }
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                                       \
  template void lay_out_window<T, A>(const T*, int64_t, int64_t, int64_t, const Window&, A*);                          \
  template void pool_region<T, A>(const RoIPoolArrays<T>&, const RoIPoolRegion&, int64_t, const Window&, const A*, A*, \
                                  int32_t*);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "cpu/dispatch.h"
#include "roi_pool.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                                                        \
  namespace isa {                                                                                                  \
  template <typename T, typename A>                                                                                \
  void lay_out_window(const T*, int64_t, int64_t, int64_t, const Window&, A*);                                     \
  template <typename T, typename A>                                                                                \
  void pool_region(const RoIPoolArrays<T>&, const RoIPoolRegion&, int64_t, const Window&, const A*, A*, int32_t*); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// Bins of start..end, each [begin, end) within 0..size; false without extent. Multiplications and additions are kept
// apart by the volatile: see the contract.
template <typename A>
bool write_bins(A start, A end, int64_t count, int64_t size, int32_t* bins) {
  if (!(end > start)) return false;
  const A width = (end - start) / static_cast<A>(count);
  for (int64_t k = 0; k < count; ++k) {
    volatile A low = static_cast<A>(k) * width, high = static_cast<A>(k + 1) * width;
    const A limit = static_cast<A>(size), first = std::floor(low + start), last = std::ceil(high + start);
    // NaN, of a region without end, makes the bin empty.
    bins[2 * k] = static_cast<int32_t>(first < limit ? (first > 0 ? first : A(0)) : limit);
    bins[2 * k + 1] = static_cast<int32_t>(last > 0 ? (last < limit ? last : limit) : A(0));
  }
  return true;
}

// The smallest window around intervals [count, 2] of rows and of columns; empty ones do not count.
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
    const bool is_image = boxes[0] >= 0 && boxes[0] < static_cast<A>(p.B);
    const bool is_region = is_image && write_bins<A>(boxes[2] * scale, (boxes[4] + 1) * scale, p.PH, p.H, rows) &&
                           write_bins<A>(boxes[1] * scale, (boxes[3] + 1) * scale, p.PW, p.W, columns);
    if (!is_region) std::fill(rows, rows + 2 * (p.PH + p.PW), 0);
    RoIPoolRegion region{n, rows, columns, {}};
    region.window = window_of(region, p.PH, p.PW);
    images[is_region ? static_cast<int64_t>(boxes[0]) : 0].add(region);
  }
  return images;
}

std::tuple<Tensor, Tensor> roi_pool(const Tensor& input_in, const Tensor& rois_in, int64_t PH, int64_t PW,
                                    double spatial_scale) {
  const auto problem = check_roi_pool(input_in, rois_in, PH, PW);
  const Tensor input = dense(input_in), rois = dense(rois_in);
  Tensor output = new_empty(input, {problem.N, problem.C, PH, PW});
  Tensor argmax = new_empty(input, {problem.N, problem.C, PH, PW}, ScalarType::Int);
  dispatch_value_type(input.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const RoIPoolArrays<T> a{problem.B,
                             problem.C,
                             problem.H,
                             problem.W,
                             problem.N,
                             PH,
                             PW,
                             static_cast<const T*>(input.const_data_ptr()),
                             static_cast<T*>(output.mutable_data_ptr()),
                             argmax.mutable_data_ptr<int32_t>()};
    const Scratch<int32_t> intervals(problem.N * 2 * (PH + PW));
    const auto images =
        sort_regions<A>(problem, rois.const_data_ptr<A>(), static_cast<A>(spatial_scale), intervals.data());
    int64_t pixels = 0;
    for (const RoIPoolImage& image : images) pixels = std::max(pixels, image.pixels());
    const auto lay_out = VISDET_BEST_ISA(lay_out_window, T, A);
    const auto pool = VISDET_BEST_ISA(pool_region, T, A);
    const int64_t blocks = (a.C + kBlock<A> - 1) / kBlock<A>, plane = a.H * a.W;
    torch::stable::parallel_for(0, static_cast<int64_t>(images.size()) * blocks, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> laid_out(pixels * kBlock<A>), peaks(PH * PW * kBlock<A>);
      const Scratch<int32_t> places(PH * PW * kBlock<A>);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t b = task / blocks, c0 = task % blocks * kBlock<A>;
        const int64_t channels = std::min<int64_t>(a.C - c0, kBlock<A>);
        const T* maps = a.input + (b * a.C + c0) * plane;
        const RoIPoolImage& image = images[b];
        if (image.is_shared()) lay_out(maps, a.W, plane, channels, image.shared, laid_out.data());
        for (const RoIPoolRegion& region : image.regions) {
          const Window& window = image.is_shared() ? image.shared : region.window;
          if (!image.is_shared()) lay_out(maps, a.W, plane, channels, window, laid_out.data());
          pool(a, region, c0, window, laid_out.data(), peaks.data(), places.data());
        }
      }
    });
  });
  return {output, argmax};
}

Tensor roi_pool_backward(const Tensor& grad_output_in, const Tensor& rois_in, const Tensor& argmax_in, int64_t B,
                         int64_t H, int64_t W) {
  const auto problem = check_roi_pool_backward(grad_output_in, rois_in, argmax_in, B, H, W);
  const Tensor grad_output = dense(grad_output_in), rois = dense(rois_in), argmax = dense(argmax_in);
  Tensor grad_input = new_empty(rois, {B, problem.C, H, W});
  zero_(grad_input);
  const int64_t bins = problem.PH * problem.PW, pixels = H * W;
  dispatch_value_type(grad_output.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const T* gradient = static_cast<const T*>(grad_output.const_data_ptr());
    const A* boxes = rois.const_data_ptr<A>();
    const int32_t* index = argmax.const_data_ptr<int32_t>();
    A* sums = grad_input.mutable_data_ptr<A>();
    torch::stable::parallel_for(0, problem.C, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = 0; n < problem.N; ++n) {
        const A b = boxes[5 * n];
        if (!(b >= 0 && b < static_cast<A>(B))) continue;
        for (int64_t c = begin; c < end; ++c) {
          A* map = sums + (static_cast<int64_t>(b) * problem.C + c) * pixels;
          const int64_t first = (n * problem.C + c) * bins;
          for (int64_t i = first; i < first + bins; ++i) {
            if (index[i] >= 0 && index[i] < pixels) map[index[i]] += baseline::to_accumulate(gradient[i]);
          }
        }
      }
    });
  });
  return grad_input;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("roi_pool", TORCH_BOX(&visdet::roi_pool));
  m.impl("roi_pool_backward", TORCH_BOX(&visdet::roi_pool_backward));
}

#endif  // VISDET_ISA_BASELINE

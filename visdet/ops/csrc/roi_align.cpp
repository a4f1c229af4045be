// roi_align, its maxima and prroi_pool: schemas, and the functions for CPU tensors. cpu/kernels.h names the other
// parts.
#include "roi_align.h"

#include "cpu/dispatch.h"
#include "cpu/images.h"
#include "cpu/roi_align.h"
#include "roi_align_samples.h"

namespace visdet::roi_align {
namespace {

enum class Pooling { kMean, kLargest, kIntegral, kLinesAcross, kLinesDown };

// AxisTaps is the memory of a region's axis.
template <typename A>
struct AxisTaps {
  std::vector<RoIAlignTap<A>> taps;
  std::vector<int64_t> ends{0};

  // Adds a weight to a pixel of the last bin. slots [pixels] says where its tap may be.
  void add(int64_t pixel, A weight, int64_t* slots) {
    const int64_t count = static_cast<int64_t>(taps.size()), slot = slots[pixel];
    if (slot >= ends.back() && slot < count && taps[slot].index == pixel) {
      taps[slot].weight += weight;
    } else {
      slots[pixel] = count;
      taps.push_back({weight, static_cast<int32_t>(pixel)});
    }
  }
  void end_bin() { ends.push_back(static_cast<int64_t>(taps.size())); }
  RoIAlignAxis<A> view() const { return {taps.data(), ends.data()}; }

  // The first pixel and the one after the last.
  std::pair<int32_t, int32_t> range() const {
    int32_t low = INT32_MAX, high = 0;
    for (const auto& tap : taps) low = std::min(low, tap.index), high = std::max(high, tap.index + 1);
    return {low, high};
  }
};

// RegionTaps is the memory of a region. It has no samples at first.
template <typename A>
struct RegionTaps {
  AxisTaps<A> rows, columns;
  int64_t image = 0, down = 0, across = 0;
  bool is_listed = false;

  RoIAlignRegion<A> view(int64_t n, const RoIAlignProblem& p) const {
    const auto [top, bottom] = rows.range();
    const auto [left, right] = columns.range();
    const Window window = bottom > 0 && right > 0 ? Window{top, bottom, left, right} : Window{0, 0, 0, 0};
    const int64_t PH = is_listed ? p.PH * p.PW : p.PH, PW = is_listed ? 1 : p.PW;
    return {n, rows.view(), columns.view(), window, PH, PW, down, across, is_listed};
  }
};

// Weighs the pixels of an axis in its bins or, for the largest sample, in its samples.
template <typename A>
void weigh_axis(const RoIAlignProblem& p, Pooling pooling, A start, const Bins<A>& of, int64_t bins, int64_t size,
                int64_t* slots, AxisTaps<A>& axis) {
  const A share = pooling == Pooling::kLargest ? A(1) : A(1) / static_cast<A>(of.samples);
  for (int64_t k = 0; k < bins; ++k) {
    for (int64_t i = 0; i < of.samples; ++i) {
      int low;
      A fraction;
      const A position = Frame<A>::at(start, of, static_cast<int>(k), static_cast<int>(i));
      if (locate_on_axis(position, static_cast<int>(size), low, fraction)) {
        axis.add(low, share * (1 - fraction), slots);
        if (low + 1 < size) axis.add(low + 1, share * fraction, slots);
      }
      if (pooling == Pooling::kLargest) axis.end_bin();
    }
    if (pooling != Pooling::kLargest) axis.end_bin();
  }
}

// Returns the integral up to `position` of the weight that a pixel at 0 has in linear interpolation.
template <typename A>
A integral(A position) {
  position = clamped(position, A(-1), A(1));
  return A(0.5) + position - position * std::abs(position) / 2;
}

// Weighs the pixels of an axis in the means of its bins or on the lines at their edges.
template <typename A>
void weigh_integrals(A low, A step, int64_t bins, bool are_lines, int64_t size, int64_t* slots, AxisTaps<A>& axis) {
  for (int64_t k = 0; k < bins; ++k) {
    const A begin = low + step * static_cast<A>(k), end = are_lines ? begin : low + step * static_cast<A>(k + 1);
    const A last = static_cast<A>(size - 1), after = clamped(std::ceil(end), A(0), last);
    for (int64_t i = static_cast<int64_t>(clamped(std::floor(begin), A(0), last)); i <= after; ++i) {
      const A at = static_cast<A>(i);
      const A weight = are_lines ? 1 - std::abs(begin - at) : (integral(end - at) - integral(begin - at)) / step;
      if (weight > 0) axis.add(i, weight, slots);  // A pixel that does not count may be NaN.
    }
    axis.end_bin();
  }
}

// Writes the taps of a region.
template <typename A>
void weigh_region(const RoIAlignProblem& p, Pooling pooling, const Bounds<A>& bounds, const A* roi, int64_t* slots,
                  RegionTaps<A>& taps) {
  A box[4];
  if (p.H == 0 || p.W == 0 || !bounded_region(roi, p, bounds, box)) return;
  taps.image = static_cast<int64_t>(roi[0]), taps.down = taps.across = 1;
  if (pooling >= Pooling::kIntegral) {
    const bool across = pooling == Pooling::kLinesAcross, down = pooling == Pooling::kLinesDown;
    const A scale = static_cast<A>(p.scale), x = roi[1] * scale, y = roi[2] * scale;
    const A width = (roi[3] * scale - x) / static_cast<A>(p.PW - across);
    const A height = (roi[4] * scale - y) / static_cast<A>(p.PH - down);
    taps.down = width > 0 && height > 0 && std::isfinite(x + y + width + height);
    if (taps.down == 0) return;
    weigh_integrals(y, height, p.PH, down, p.H, slots, taps.rows);
    weigh_integrals(x, width, p.PW, across, p.W, slots, taps.columns);
  } else if (!p.is_rotated) {
    Upright<A> region;
    region.start(roi, box, p);
    if (pooling == Pooling::kLargest) taps.down = region.down.samples, taps.across = region.across.samples;
    weigh_axis(p, pooling, region.y, region.down, p.PH, p.H, slots, taps.rows);
    weigh_axis(p, pooling, region.x, region.across, p.PW, p.W, slots, taps.columns);
  } else {
    Rotated<A> region;
    region.start(roi, box, p);
    const A share = 1 / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    for (int bin = 0; bin < p.PH * p.PW; ++bin) {
      for (int64_t i = 0; i < region.down.samples * region.across.samples; ++i) {
        Corners<A> corners;
        const int across = static_cast<int>(region.across.samples), PW = static_cast<int>(p.PW);
        if (!corners_of(region, p, bin / PW, bin % PW, i / across, i % across, corners)) continue;
        for (int k = 0; k < 4; ++k) taps.rows.add(corners.at[k], share * corners.weight[k], slots);
      }
      taps.rows.end_bin();
    }
    taps.is_listed = true;
    for (auto& tap : taps.rows.taps) {
      taps.columns.taps.push_back({A(1), static_cast<int32_t>(tap.index % p.W)});
      tap.index = static_cast<int32_t>(tap.index / p.W);
    }
  }
}

// Calls use(images) with the regions by image, in order, those of each image in `parts` parts; several times where
// their taps would take much memory.
template <typename A, typename F>
void weigh_regions(const RoIAlignProblem& p, Pooling pooling, const Tensor& rois, int64_t parts, const F& use) {
  constexpr int64_t kGroup = 128, kGrain = 8, kTaps = 1 << 22;
  const Bounds<A> bounds = bounds_of<A>(p);
  const A* boxes = data_of(rois);
  for (int64_t begin = 0, end = 0, count = 0; end < p.N; begin = end, count = 0) {
    std::vector<RegionTaps<A>> taps;
    while (end < p.N && count < kTaps) {
      const int64_t first = end;
      end = std::min(end + kGroup, p.N);
      taps.resize(end - begin);
      torch::stable::parallel_for(first, end, kGrain, [&](int64_t from, int64_t to) {
        std::vector<int64_t> slots(p.is_rotated ? p.H * p.W : std::max(p.H, p.W));
        for (int64_t n = from; n < to; ++n) {
          weigh_region(p, pooling, bounds, boxes + n * rois.size(1), slots.data(), taps[n - begin]);
        }
      });
      for (int64_t n = first; n < end; ++n) count += static_cast<int64_t>(taps[n - begin].rows.taps.size());
    }
    std::vector<RegionsOfImage<RoIAlignRegion<A>>> images(std::max<int64_t>(p.B, 1) * parts);
    for (int64_t n = begin; n < end; ++n) {
      const RegionTaps<A>& region = taps[n - begin];
      images[region.image * parts + (n - begin) * parts / (end - begin)].add(region.view(n, p));
    }
    use(images);
  }
}

Tensor pool(const RoIAlignProblem& p, Pooling pooling, const Tensor& input_in, const Tensor& rois_in) {
  const Tensor input = dense(input_in), rois = dense(rois_in);
  if (pooling != Pooling::kMean) check_shape("roi_align", "rois", rois, {"N", 5});
  Tensor output = new_empty(input, {p.N, p.C, p.PH, p.PW});
  if (output.numel() == 0) return output;
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    T* results = data_of(output);
    const int64_t tasks = std::max<int64_t>(p.B, 1) * ceil_of(p.C, kBlock<A>), bins = p.PH * p.PW;
    const int64_t parts = std::min<int64_t>(ceil_of(torch::stable::get_num_threads(), tasks), p.N);
    const auto& kernels = best_kernels<RoIAlignKernels<T, A>>();
    weigh_regions<A>(p, pooling, rois, parts, [&](const auto& images) {
      pool_regions<A>(images, parts, data_of<T>(input), p.C, p.H, p.W, kernels.lay_out, [&] {
        return [&, scratch = Scratch<A>(bins * kBlock<A>)](const RoIAlignRegion<A>& region, int64_t c0,
                                                           int64_t channels, const Window& window, const A* pixels) {
          kernels.pool(region, channels, window, pixels, scratch.data(), results + (region.n * p.C + c0) * bins);
        };
      });
    });
  });
  return output;
}

// input: that of the largest samples, which says where they are.
Tensor spread(const RoIAlignProblem& p, Pooling pooling, const Tensor& grad_output_in, const Tensor& rois_in,
              const Tensor* input) {
  const Tensor grad_output = dense(grad_output_in), rois = dense(rois_in);
  if (pooling != Pooling::kMean) check_shape("roi_align_backward", "rois", rois, {"N", 5});
  Tensor grad_input = new_empty(grad_output, {p.B, p.C, p.H, p.W});
  zero_(grad_input);
  if (grad_output.numel() == 0 || grad_input.numel() == 0) return grad_input;
  dispatch_value_type(grad_output.scalar_type(), [&]<typename T, typename A>(T, A) {
    const T *gradient = data_of(grad_output), *maps = data_of(input);
    T* values = data_of(grad_input);
    const auto& kernels = best_kernels<RoIAlignKernels<T, A>>();
    const int64_t blocks = ceil_of(p.C, kBlock<A>), plane = p.H * p.W, bins = p.PH * p.PW;
    weigh_regions<A>(p, pooling, rois, 1, [&](const auto& images) {
      int64_t pixels = 0;
      for (const auto& image : images) pixels = std::max(pixels, image.own_areas > 0 ? area(image.shared) : 0);
      torch::stable::parallel_for(0, p.B * blocks, 1, [&](int64_t begin, int64_t end) {
        const Scratch<A> sums(pixels * kBlock<A>), scratch(bins * kBlock<A>), laid_out(maps ? pixels * kBlock<A> : 0);
        for (int64_t task = begin; task < end; ++task) {
          const auto& image = images[task / blocks];
          if (image.own_areas == 0) continue;
          const int64_t c0 = task % blocks * kBlock<A>, channels = std::min<int64_t>(p.C - c0, kBlock<A>);
          const int64_t first = (task / blocks * p.C + c0) * plane;
          std::fill_n(sums.data(), area(image.shared) * kBlock<A>, A(0));
          if (maps) kernels.lay_out(maps + first, p.W, plane, channels, image.shared, laid_out.data());
          for (const RoIAlignRegion<A>& region : image.regions) {
            kernels.spread(region, channels, image.shared, maps ? laid_out.data() : nullptr,
                           gradient + (region.n * p.C + c0) * bins, scratch.data(), sums.data());
          }
          kernels.add_window(sums.data(), p.W, plane, channels, image.shared, values + first);
        }
      });
    });
  });
  return grad_input;
}

Tensor mean(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW, double scale, int64_t sampling_ratio,
            bool aligned) {
  return pool(check_roi_align(input, rois, PH, PW, scale, sampling_ratio, aligned), Pooling::kMean, input, rois);
}

Tensor mean_backward(const Tensor& grad_output, const Tensor& rois, int64_t B, int64_t H, int64_t W, double scale,
                     int64_t sampling_ratio, bool aligned, bool) {
  const auto p = check_roi_align_backward(grad_output, rois, B, H, W, scale, sampling_ratio, aligned);
  return spread(p, Pooling::kMean, grad_output, rois, nullptr);
}

Tensor largest(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW, double scale, int64_t sampling_ratio,
               bool aligned) {
  return pool(check_roi_align(input, rois, PH, PW, scale, sampling_ratio, aligned), Pooling::kLargest, input, rois);
}

Tensor largest_backward(const Tensor& grad_output, const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW,
                        double scale, int64_t sampling_ratio, bool aligned) {
  const auto p = check_roi_align(input, rois, PH, PW, scale, sampling_ratio, aligned);
  check_like("roi_align_backward", "grad_output", grad_output, {p.N, p.C, PH, PW}, "input", input);
  const Tensor maps = dense(input);
  return spread(p, Pooling::kLargest, grad_output, rois, &maps);
}

Pooling integrals(int64_t lines) {
  return lines == 1 ? Pooling::kLinesAcross : lines == 2 ? Pooling::kLinesDown : Pooling::kIntegral;
}

Tensor integral_mean(const Tensor& input, const Tensor& rois, int64_t PH, int64_t PW, double scale, int64_t lines) {
  auto p = check_roi_align(input, rois, PH, PW, scale, 1, true);
  p.PH += lines == 2, p.PW += lines == 1;
  return pool(p, integrals(lines), input, rois);
}

Tensor integral_mean_backward(const Tensor& grad_output, const Tensor& rois, int64_t B, int64_t H, int64_t W,
                              double scale) {
  const auto p = check_roi_align_backward(grad_output, rois, B, H, W, scale, 1, true);
  return spread(p, Pooling::kIntegral, grad_output, rois, nullptr);
}

}  // namespace
}  // namespace visdet::roi_align

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "roi_align(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale,"
      " int sampling_ratio, bool aligned) -> Tensor output");
  m.def(
      "roi_align_backward(Tensor grad_output, Tensor rois, int B, int H, int W, float spatial_scale,"
      " int sampling_ratio, bool aligned, bool deterministic) -> Tensor grad_input");
  m.def(
      "roi_align_max(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale,"
      " int sampling_ratio, bool aligned) -> Tensor output");
  m.def(
      "roi_align_max_backward(Tensor grad_output, Tensor input, Tensor rois, int pooled_height, int pooled_width,"
      " float spatial_scale, int sampling_ratio, bool aligned) -> Tensor grad_input");
  m.def(
      "prroi_pool(Tensor features, Tensor rois, int pooled_height, int pooled_width, float spatial_scale, int lines)"
      " -> Tensor output");
  m.def(
      "prroi_pool_backward(Tensor grad_output, Tensor rois, int B, int H, int W, float spatial_scale)"
      " -> Tensor grad_input");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("roi_align", TORCH_BOX(&visdet::roi_align::mean));
  m.impl("roi_align_backward", TORCH_BOX(&visdet::roi_align::mean_backward));
  m.impl("roi_align_max", TORCH_BOX(&visdet::roi_align::largest));
  m.impl("roi_align_max_backward", TORCH_BOX(&visdet::roi_align::largest_backward));
  m.impl("prroi_pool", TORCH_BOX(&visdet::roi_align::integral_mean));
  m.impl("prroi_pool_backward", TORCH_BOX(&visdet::roi_align::integral_mean_backward));
}

// roi_align: schemas, and the functions for CPU tensors. cpu/kernels.h names the other parts.
#include "cpu/roi_align.h"

#include <cmath>

#include "cpu/dispatch.h"
#include "cpu/images.h"
#include "roi_align.h"

namespace visdet {
namespace {

// AxisTaps is the memory of a region's axis.
template <typename A>
struct AxisTaps {
  std::vector<RoIAlignTap<A>> taps;
  std::vector<int64_t> ends;
  int32_t first = INT32_MAX, last = -1;

  RoIAlignAxis<A> view() const { return {taps.data(), ends.data(), static_cast<int64_t>(ends.size())}; }
};

// Weighs the pixels of a bin. slots [size of the axis] says where in the bin a pixel's tap is, -1 without one.
template <typename A>
class BinTaps {
 public:
  BinTaps(AxisTaps<A>& axis, int64_t size, int32_t* slots)
      : axis_(axis), size_(size), slots_(slots), begin_(static_cast<int64_t>(axis.taps.size())) {}

  void add_sample(A position, A weight) {
    if (!(position >= -1 && position <= static_cast<A>(size_))) return;
    position = std::max(position, A(0));
    const int64_t low = std::min(static_cast<int64_t>(position), size_ - 1);
    if (low + 1 < size_) {
      const A fraction = position - static_cast<A>(low);
      add(low, weight * (1 - fraction));
      add(low + 1, weight * fraction);
    } else {
      add(low, weight);
    }
  }

  void finish() {
    for (auto tap = axis_.taps.begin() + begin_; tap != axis_.taps.end(); ++tap) {
      axis_.first = std::min(axis_.first, tap->index);
      axis_.last = std::max(axis_.last, tap->index);
      slots_[tap->index] = -1;
    }
    axis_.ends.push_back(static_cast<int64_t>(axis_.taps.size()));
  }

 private:
  void add(int64_t pixel, A weight) {
    int32_t& slot = slots_[pixel];
    if (slot < 0) {
      slot = static_cast<int32_t>(static_cast<int64_t>(axis_.taps.size()) - begin_);
      axis_.taps.push_back({weight, static_cast<int32_t>(pixel)});
    } else {
      axis_.taps[begin_ + slot].weight += weight;
    }
  }

  AxisTaps<A>& axis_;
  int64_t size_;
  int32_t* slots_;
  int64_t begin_;
};

// Weighs the pixels of `bins` bins between two corners of a map of `size` pixels, which it has.
template <typename A>
void weigh(const RoIAlignProblem& p, A low, A high, int64_t bins, int64_t size, int32_t* slots, AxisTaps<A>& axis) {
  const A scale = static_cast<A>(p.scale), shift = p.aligned ? A(0.5) : A(0);
  const A start = low * scale - shift;
  const A difference = (high * scale - shift) - start;
  const auto [bin_size, samples] = bins_of(p, difference, bins);
  axis.ends.reserve(bins);
  for (int64_t k = 0; k < bins; ++k) {
    BinTaps<A> bin(axis, size, slots);
    const A origin = start + static_cast<A>(k) * bin_size;
    for (int64_t i = 0; i < samples; ++i) {
      const A offset = (static_cast<A>(i) + A(0.5)) * bin_size / static_cast<A>(samples);
      bin.add_sample(origin + offset, A(1) / static_cast<A>(samples));
    }
    bin.finish();
  }
}

// RegionsOfBatch has the regions of a batch and the memory that they point to.
template <typename A>
struct RegionsOfBatch {
  std::vector<AxisTaps<A>> axes;  // [N, 2]: rows and columns
  std::vector<RoIAlignRegion<A>> regions;
  std::vector<int64_t> images;
};

template <typename A>
RegionsOfBatch<A> weigh_regions(const RoIAlignProblem& p, const A* boxes) {
  constexpr int64_t kGrain = 16;
  RegionsOfBatch<A> batch{std::vector<AxisTaps<A>>(2 * p.N), std::vector<RoIAlignRegion<A>>(p.N),
                          std::vector<int64_t>(p.N)};
  const int64_t size = std::max(p.H, p.W);
  const Bounds<A> bounds = bounds_of<A>(p);
  torch::stable::parallel_for(0, p.N, kGrain, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> slots(size, -1);
    for (int64_t n = begin; n < end; ++n) {
      const A* roi = boxes + 5 * n;
      A box[4];
      AxisTaps<A>&rows = batch.axes[2 * n], &columns = batch.axes[2 * n + 1];
      if (p.H > 0 && p.W > 0 && bounded_region(roi, p, bounds, box)) {
        weigh(p, box[1], box[3], p.PH, p.H, slots.data(), rows);
        weigh(p, box[0], box[2], p.PW, p.W, slots.data(), columns);
        batch.images[n] = static_cast<int64_t>(roi[0]);
      } else {
        rows.ends.assign(p.PH, 0);
        columns.ends.assign(p.PW, 0);
      }
      const bool is_seen = rows.last >= 0 && columns.last >= 0;
      const Window window{rows.first, rows.last + 1, columns.first, columns.last + 1};
      batch.regions[n] = {n, rows.view(), columns.view(), is_seen ? window : Window{0, 0, 0, 0}};
    }
  });
  return batch;
}

// Returns the regions by image, in order; those of each image in `parts` parts.
template <typename A>
std::vector<RegionsOfImage<RoIAlignRegion<A>>> sort_regions(const RoIAlignProblem& p, const RegionsOfBatch<A>& batch,
                                                            int64_t parts) {
  std::vector<RegionsOfImage<RoIAlignRegion<A>>> sorted(std::max<int64_t>(p.B, 1) * parts);
  for (int64_t n = 0; n < p.N; ++n) sorted[batch.images[n] * parts + n * parts / p.N].add(batch.regions[n]);
  return sorted;
}

Tensor roi_align(const Tensor& input_in, const Tensor& rois_in, int64_t PH, int64_t PW, double spatial_scale,
                 int64_t sampling_ratio, bool aligned) {
  const auto p = check_roi_align(input_in, rois_in, PH, PW, spatial_scale, sampling_ratio, aligned, Regions::kUpright);
  const Tensor input = dense(input_in), rois = dense(rois_in);
  Tensor output = new_empty(input, {p.N, p.C, PH, PW});
  if (output.numel() == 0) return output;
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    T* averages = mutable_data_of<T>(output);
    const RegionsOfBatch<A> batch = weigh_regions(p, data_of<A>(rois));
    const int64_t tasks = std::max<int64_t>(p.B, 1) * ceil_of(p.C, kBlock<A>),
                  threads = torch::stable::get_num_threads();
    const int64_t parts = std::min(ceil_of(threads, tasks), p.N), bins = PH * PW;
    const auto& kernels = best_kernels<RoIAlignKernels<T, A>>();
    pool_regions<A>(sort_regions(p, batch, parts), parts, data_of<T>(input), p.C, p.H, p.W, kernels.lay_out, [&] {
      return [&, means = Scratch<A>(bins * kBlock<A>)](const RoIAlignRegion<A>& region, int64_t c0, int64_t channels,
                                                       const Window& window, const A* pixels) {
        kernels.average(region, channels, window, pixels, means.data(), averages + (region.n * p.C + c0) * bins);
      };
    });
  });
  return output;
}

Tensor roi_align_backward(const Tensor& grad_output_in, const Tensor& rois_in, int64_t B, int64_t H, int64_t W,
                          double spatial_scale, int64_t sampling_ratio, bool aligned, bool) {
  const auto p = check_roi_align_backward(grad_output_in, rois_in, B, H, W, spatial_scale, sampling_ratio, aligned,
                                          Regions::kUpright);
  const Tensor grad_output = dense(grad_output_in), rois = dense(rois_in);
  Tensor grad_input = new_empty(grad_output, {B, p.C, H, W});
  zero_(grad_input);
  if (grad_output.numel() == 0 || grad_input.numel() == 0) return grad_input;
  dispatch_value_type(grad_output.scalar_type(), [&]<typename T, typename A>(T, A) {
    const T* gradient = data_of<T>(grad_output);
    T* values = mutable_data_of<T>(grad_input);
    const RegionsOfBatch<A> batch = weigh_regions(p, data_of<A>(rois));
    const auto sorted = sort_regions(p, batch, 1);
    int64_t pixels = 0;
    for (const auto& image : sorted) pixels = std::max(pixels, image.own_areas > 0 ? area(image.shared) : 0);
    const auto& kernels = best_kernels<RoIAlignKernels<T, A>>();
    const int64_t blocks = (p.C + kBlock<A> - 1) / kBlock<A>, plane = H * W, bins = p.PH * p.PW;
    torch::stable::parallel_for(0, B * blocks, 1, [&](int64_t begin, int64_t end) {
      const Scratch<A> sums(pixels * kBlock<A>), gradients(bins * kBlock<A>);
      for (int64_t task = begin; task < end; ++task) {
        const auto& image = sorted[task / blocks];
        if (image.own_areas == 0) continue;
        const int64_t c0 = task % blocks * kBlock<A>, channels = std::min<int64_t>(p.C - c0, kBlock<A>);
        std::fill_n(sums.data(), area(image.shared) * kBlock<A>, A(0));
        for (const RoIAlignRegion<A>& region : image.regions) {
          kernels.spread(region, channels, image.shared, gradient + (region.n * p.C + c0) * bins, gradients.data(),
                         sums.data());
        }
        kernels.take_back(sums.data(), W, plane, channels, image.shared, values + (task / blocks * p.C + c0) * plane);
      }
    });
  });
  return grad_input;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "roi_align(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale,"
      " int sampling_ratio, bool aligned) -> Tensor output");
  m.def(
      "roi_align_backward(Tensor grad_output, Tensor rois, int B, int H, int W, float spatial_scale,"
      " int sampling_ratio, bool aligned, bool deterministic) -> Tensor grad_input");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("roi_align", TORCH_BOX(&visdet::roi_align));
  m.impl("roi_align_backward", TORCH_BOX(&visdet::roi_align_backward));
}

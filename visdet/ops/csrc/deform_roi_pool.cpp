// deform_roi_pool: schemas, and the functions for CPU tensors.
#include "deform_roi_pool.h"

namespace visdet::deform_roi_pool {

template <typename A>
struct InOrder {
  A* sums;

  VISDET_HOST_DEVICE void begin() const {}
  VISDET_HOST_DEVICE void add(int64_t at, A value) const { sums[at] += value; }
};

// The maps of up to kTogether channels of an image, one bin after another.
template <typename A>
struct SpreadToMaps {
  Spread<A, InOrder<A>> spread;
  int64_t parts;

  VISDET_HOST_DEVICE void operator()(int64_t i) const {
    const Arrays<A>& a = spread.a;
    for (int64_t n = 0; n < a.N; ++n) {
      if (a.rois[5 * n] != static_cast<A>(i / parts)) continue;
      for (int64_t bin = 0; bin < a.bins(); ++bin) spread((i % parts * a.N + n) * a.bins() + bin);
    }
  }
};

template <typename A>
void spread(const OnDevice& device, const Arrays<A>& a, const Tensor&, Tensor& grad_input, bool) {
  const int64_t parts = a.parts(kTogether);
  device.each(a.B * parts, 64 * kTogether * a.N * a.bins(), SpreadToMaps<A>{{a, {data_of(grad_input)}}, parts});
}

}  // namespace visdet::deform_roi_pool

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "deform_roi_pool(Tensor input, Tensor rois, Tensor offset, int pooled_height, int pooled_width,"
      " float spatial_scale, int sampling_ratio, float gamma) -> Tensor output");
  m.def(
      "deform_roi_pool_backward(Tensor grad_output, Tensor input, Tensor rois, Tensor offset, int pooled_height,"
      " int pooled_width, float spatial_scale, int sampling_ratio, float gamma, bool needs_input, bool needs_offset,"
      " bool deterministic) -> (Tensor grad_input, Tensor grad_offset)");
}

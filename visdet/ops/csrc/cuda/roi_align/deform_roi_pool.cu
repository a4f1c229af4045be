// deform_roi_pool on CUDA. The contract is in ../../deform_roi_pool.h.
#include "cuda/roi_align/sums.cuh"
#include "deform_roi_pool.h"

namespace visdet::deform_roi_pool {

template <typename A>
void spread(const OnDevice& device, const Arrays<A>& a, const Tensor& grad_output, Tensor& grad_input,
            bool deterministic) {
  const auto add = [&](const auto& sums) {
    device.each(a.N * a.parts(kTogether) * a.bins(), 0, Spread<A, std::decay_t<decltype(sums)>>{a, sums});
  };
  if (!deterministic) return add(roi_align::InAnyOrder<A>{data_of(grad_input)});
  const DeviceScope scope(grad_output);
  roi_align::add_whole_numbers<A, A>(kBackward, scope, grad_output, a.N * a.bins(), grad_input, add);
}

}  // namespace visdet::deform_roi_pool

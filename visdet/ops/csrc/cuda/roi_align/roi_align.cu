// roi_align on CUDA. The contract is in ../../roi_align.h.
#include <type_traits>

#include "common/launch.h"
#include "cuda/roi_align/sums.cuh"
#include "cuda/roi_align/windows.cuh"

namespace visdet::roi_align {
namespace {

// A block owns `slab` channels of a region. Upright regions of at most kBins bins each way lie in its shared memory as
// a Window; others, and those too large for that, are loops over samples. Windows of regions overlap, and are read
// through the caches.
struct Part {
  int64_t n, channel;
  int channels;

  __device__ __forceinline__ Part(const RoIAlignProblem& p, int slab) {
    const int64_t slabs = (p.C + slab - 1) / slab;
    n = blockIdx.x / slabs, channel = (blockIdx.x - n * slabs) * slab;
    channels = static_cast<int>(p.C - channel < slab ? p.C - channel : slab);
  }
};

template <typename T, typename A, typename Geometry, bool kWindows>
__global__ void __launch_bounds__(kThreads<A>)
    average_kernel(const T* __restrict__ input, const A* __restrict__ rois, T* __restrict__ output,
                   const RoIAlignProblem p, const Bounds<A> bounds, int slab) {
  const Part part(p, slab);
  const A* roi = rois + part.n * Geometry::kColumns;
  T* to = output + (part.n * p.C + part.channel) * p.PH * p.PW;
  A box[4];
  if (!bounded_region(roi, p, bounds, box)) {
    for (int64_t i = threadIdx.x; i < part.channels * p.PH * p.PW; i += kThreads<A>) to[i] = from_accumulate<T>(A(0));
    return;
  }
  const T* maps = input + (static_cast<int64_t>(roi[0]) * p.C + part.channel) * p.H * p.W;
  Geometry region;
  region.start(roi, box, p);
  if constexpr (kWindows) {
    __shared__ Window<A> window;
    if (window.lay_out(region, p)) return average_window(window, p, part.channels, maps, to);
  }
  average_by_samples<T, A>(region, p, part.channels, maps, to);
}

// The same parts; other blocks add to the same pixels.
template <typename T, typename A, typename Geometry, bool kWindows, typename Sums>
__global__ void __launch_bounds__(kThreads<A>)
    spread_kernel(const T* __restrict__ grad_output, const A* __restrict__ rois, Sums sums, const RoIAlignProblem p,
                  const Bounds<A> bounds, int slab) {
  const Part part(p, slab);
  const A* roi = rois + part.n * Geometry::kColumns;
  A box[4];
  if (!bounded_region(roi, p, bounds, box)) return;
  const T* from = grad_output + (part.n * p.C + part.channel) * p.PH * p.PW;
  const int64_t first = (static_cast<int64_t>(roi[0]) * p.C + part.channel) * p.H * p.W;
  Geometry region;
  region.start(roi, box, p);
  sums.begin();
  if constexpr (kWindows) {
    __shared__ Window<A> window;
    if (window.lay_out(region, p)) {
      find_bins(window.rows, static_cast<int>(p.PH)), find_bins(window.columns, static_cast<int>(p.PW));
      __syncthreads();  // the bins of all slots are known
      return spread_window(window, p, part.channels, from, sums, first);
    }
  }
  spread_by_samples<T, A>(region, p, part.channels, from, sums, first);
}

// Calls f(Geometry{}, whether regions are windows) for the regions of a problem.
template <typename A, typename F>
void dispatch_geometry(const RoIAlignProblem& p, const F& f) {
  if (p.is_rotated) {
    f(Rotated<A>{}, std::false_type{});
  } else if (p.PH > kBins || p.PW > kBins) {
    f(Upright<A>{}, std::false_type{});
  } else {
    f(Upright<A>{}, std::true_type{});
  }
}

// As many channels as keep every warp busy several times, but fewer where the GPU would otherwise be idle.
int slab_of(const DeviceScope& scope, const RoIAlignProblem& p) {
  int slab = 64;
  while (slab > 16 && p.N * ceil_div(p.C, slab) < 8 * scope.device().multiprocessors) slab /= 2;
  return slab;
}

void check_bins(const char* op, const RoIAlignProblem& p) {
  VISDET_CHECK(op, p.PH <= (1 << 26) / p.PW, "a region must have at most 2^26 bins on CUDA, got ", p.PH, " x ", p.PW);
}

Tensor forward(const Tensor& input_in, const Tensor& rois_in, int64_t PH, int64_t PW, double spatial_scale,
               int64_t sampling_ratio, bool aligned) {
  constexpr const char* op = "roi_align";
  const auto p = check_roi_align(input_in, rois_in, PH, PW, spatial_scale, sampling_ratio, aligned);
  check_bins(op, p);
  const DeviceScope scope(input_in);
  const Tensor input = dense(input_in), rois = dense(rois_in);
  Tensor output = new_empty(input, {p.N, p.C, PH, PW});
  if (output.numel() == 0) return output;
  if (input.numel() == 0) return zero_(output);
  const int slab = slab_of(scope, p);
  dispatch_value_type(input.scalar_type(), [&]<typename T, typename A>(T, A) {
    dispatch_geometry<A>(p, [&](auto geometry, auto windows) {
      launch({op, "average_kernel", scope, p.N * ceil_div(p.C, slab), kThreads<A>},
             average_kernel<T, A, decltype(geometry), decltype(windows)::value>, data_of(input), data_of(rois),
             data_of(output), p, bounds_of<A>(p), slab);
    });
  });
  return output;
}

constexpr const char* kBackward = "roi_align_backward";

template <typename T, typename A, typename Sums>
void spread(const DeviceScope& scope, const RoIAlignProblem& p, const Tensor& grad_output, const Tensor& rois,
            const Sums& sums) {
  const int slab = slab_of(scope, p);
  dispatch_geometry<A>(p, [&](auto geometry, auto windows) {
    launch({kBackward, "spread_kernel", scope, p.N * ceil_div(p.C, slab), kThreads<A>},
           spread_kernel<T, A, decltype(geometry), decltype(windows)::value, Sums>, data_of(grad_output), data_of(rois),
           sums, p, bounds_of<A>(p), slab);
  });
}

Tensor backward(const Tensor& grad_output_in, const Tensor& rois_in, int64_t B, int64_t H, int64_t W,
                double spatial_scale, int64_t sampling_ratio, bool aligned, bool deterministic) {
  const auto p = check_roi_align_backward(grad_output_in, rois_in, B, H, W, spatial_scale, sampling_ratio, aligned);
  check_bins(kBackward, p);
  const DeviceScope scope(grad_output_in);
  const Tensor grad_output = dense(grad_output_in), rois = dense(rois_in);
  Tensor grad_input = new_empty(grad_output, {B, p.C, H, W});
  if (grad_input.numel() == 0) return grad_input;
  if (grad_output.numel() == 0) return zero_(grad_input);
  dispatch_value_type(grad_output.scalar_type(), [&]<typename T, typename A>(T, A) {
    const auto add = [&](const auto& sums) { spread<T, A>(scope, p, grad_output, rois, sums); };
    if (deterministic) {
      return add_whole_numbers<T, A>(kBackward, scope, grad_output, p.N * p.PH * p.PW, grad_input, add);
    }
    Tensor sums = sizeof(T) == sizeof(A) ? grad_input : new_empty(rois, {B, p.C, H, W});
    zero_(sums);
    add(InAnyOrder<A>{data_of(sums)});
    if (sizeof(T) != sizeof(A)) grad_input = converted(sums, grad_output.scalar_type());
  });
  return grad_input;
}

}  // namespace
}  // namespace visdet::roi_align

VISDET_CUDA_OPERATORS(roi_align, m) {
  m.impl("roi_align", TORCH_BOX(&visdet::roi_align::forward));
  m.impl("roi_align_backward", TORCH_BOX(&visdet::roi_align::backward));
}

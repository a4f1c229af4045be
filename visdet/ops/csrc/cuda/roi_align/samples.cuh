// Bins as loops over samples, for regions of any shape.
#pragma once

#include "common/values.cuh"
#include "roi_align_samples.h"

namespace visdet::roi_align {

// Calls f(bin, channel, count) for every bin and every run of up to kTogether of the `channels` channels, one after
// another in the threads of a block.
template <typename F>
__device__ __forceinline__ void for_each_run(int bins, int channels, const F& f) {
  const int items = (channels + kTogether - 1) / kTogether * bins;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int run = item / bins, channel = run * kTogether;
    f(item - run * bins, channel, min(kTogether, channels - channel));
  }
}

// For all threads of a block: writes the bins of a region. maps, output: those of the first of `channels` channels.
template <typename T, typename A, typename Geometry>
__device__ void average_by_samples(const Geometry& region, const RoIAlignProblem& p, int channels, const T* maps,
                                   T* output) {
  const int bins = static_cast<int>(p.PH * p.PW);
  const int64_t plane = p.H * p.W;
  for_each_run(bins, channels, [&](int bin, int channel, int count) {
    const T* from = maps + channel * plane;
    const int bin_p = bin / static_cast<int>(p.PW), bin_q = bin % static_cast<int>(p.PW);
    A sum[kTogether] = {};
    // The weight of each sample, rather than one division behind, so that sums of large values do not overflow.
    const A share = A(1) / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    for (int i = 0; i < region.down.samples; ++i) {
      for (int j = 0; j < region.across.samples; ++j) {
        Corners<A> corners;
        if (!corners_of(region, p, bin_p, bin_q, i, j, corners)) continue;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (k >= count) break;
#pragma unroll
          for (int corner = 0; corner < 4; ++corner) {
            sum[k] += corners.weight[corner] * share * to_accumulate(from[k * plane + corners.at[corner]]);
          }
        }
      }
    }
    for (int k = 0; k < count; ++k) {
      output[(channel + k) * static_cast<int64_t>(bins) + bin] = from_accumulate<T>(sum[k]);
    }
  });
}

// For all threads of a block: adds the gradient of a region to `sums` from the index `first` on.
template <typename T, typename A, typename Geometry, typename Sums>
__device__ void spread_by_samples(const Geometry& region, const RoIAlignProblem& p, int channels, const T* grad_output,
                                  const Sums& sums, int64_t first) {
  const int bins = static_cast<int>(p.PH * p.PW);
  const int64_t plane = p.H * p.W;
  for_each_run(bins, channels, [&](int bin, int channel, int count) {
    const int bin_p = bin / static_cast<int>(p.PW), bin_q = bin % static_cast<int>(p.PW);
    A gradient[kTogether];
    for (int k = 0; k < count; ++k) {
      gradient[k] = to_accumulate(grad_output[(channel + k) * static_cast<int64_t>(bins) + bin]);
    }
    const A share = A(1) / (static_cast<A>(region.down.samples) * static_cast<A>(region.across.samples));
    for (int i = 0; i < region.down.samples; ++i) {
      for (int j = 0; j < region.across.samples; ++j) {
        Corners<A> corners;
        if (!corners_of(region, p, bin_p, bin_q, i, j, corners)) continue;
        for (int k = 0; k < count; ++k) {
          for (int corner = 0; corner < 4; ++corner) {
            sums.add(first + (channel + k) * plane + corners.at[corner], corners.weight[corner] * share * gradient[k]);
          }
        }
      }
    }
  });
}

}  // namespace visdet::roi_align

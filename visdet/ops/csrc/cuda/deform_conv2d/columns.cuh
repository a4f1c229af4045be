// Columns.
#pragma once

#include "cuda/deform_conv2d/samples.cuh"

namespace visdet::deform_conv2d {
namespace {

template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                   T* __restrict__ columns, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPlaces];
  const Tile tile(z);
  const T* image = images + tile.image * z.H * z.W * z.C;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps), here = count * kPlaces;
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int u = unit; u < here * z.slices; u += units) {
      const int slice = z.slices == 1 ? 0 : u / here;
      const Sample<A> sample = samples[u - slice * here];
      if (sample.row < 0) continue;
      A weight[4];
      sample.corner_weights(weight);
      const int first = tile.g * z.per_offset + slice * z.slice;
      T* to = columns + tile.column(z, first) + static_cast<int64_t>(sample.row) * z.per_group;
      for (int c = lane * VEC; c < z.slice; c += lanes * VEC) {
        A corner[4][VEC], value[VEC];
        load_corners<T, VEC>(image, sample, z, first + c, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          value[v] = corner[0][v] * weight[0];
#pragma unroll
          for (int n = 1; n < 4; ++n) value[v] += corner[n][v] * weight[n];
          value[v] *= sample.mask;
        }
        store_pack<T, VEC>(to + c, value);
      }
    }
    __syncthreads();  // samples may be written again
  }
}

}  // namespace
}  // namespace visdet::deform_conv2d

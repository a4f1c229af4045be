// Columns. A block has a tile. It locates the samples of all taps, then 2^lanes_log2 threads make a slice of a sample's
// column, each VEC channels at a time; the threads next to them have the next tap, whose column lies behind. A pixel is
// read by every sample around it, mostly from the first-level cache.
#pragma once

#include "cuda/deform_conv2d/samples.cuh"

namespace visdet::deform_conv2d {
namespace {

template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                   T* __restrict__ columns, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPositions];
  const Tile tile(z);
  const T* image = images + tile.image * z.H * z.W * z.C;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps), here = count * kPositions;
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
        load_corners_inside<T, VEC>(image, sample, z, first + c, corner);
        interpolate(corner, weight, value);
#pragma unroll
        for (int v = 0; v < VEC; ++v) value[v] *= sample.mask;
        store_pack<T, VEC>(to + c, value);
      }
    }
    __syncthreads();  // samples may be written again
  }
}

}  // namespace
}  // namespace visdet::deform_conv2d

// The gradients of images, offsets and masks, given the gradient of the columns. A block has a tile. 2^lanes_log2
// threads work on a sample with all of its channels, so that what they add to pixels lies in whole lines. grad_columns
// is read once. Where the gradient of the weight is wanted, the thread that has read a number of it writes the column's
// number, which may be to the same place. Samples of several blocks add to a pixel of the images' gradient, hence by
// atomics: the last bits depend on their order. The gradients of a sample's offset and mask are summed over its lanes,
// kept with the samples, and written position by position.
#pragma once

#include "common/warp.cuh"
#include "cuda/deform_conv2d/samples.cuh"

namespace visdet::deform_conv2d {
namespace {

// What a backward pass writes. Null is what is not wanted.
template <typename T, typename A>
struct Gradients {
  A* images;  // zeros before
  T* offsets;
  T* masks;    // only with offsets
  T* columns;  // the columns themselves; their gradient may lie in the same memory
};

template <typename T, typename G, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    gradients_kernel(const T* __restrict__ images, const T* __restrict__ offsets, const T* __restrict__ masks,
                     const G* grad_columns, const Gradients<T, A> grads, const Sizes z) {
  __shared__ Sample<A> samples[kTaps * kPositions];
  const Tile tile(z);
  const int64_t pixels = tile.image * z.H * z.W * z.C;
  const T* image = images + pixels;
  const int lanes = 1 << z.lanes_log2, lane = threadIdx.x & (lanes - 1);
  const int unit = threadIdx.x >> z.lanes_log2, units = kThreads >> z.lanes_log2;
  const int first = tile.g * z.per_offset, last = first + z.per_offset;
  for (int k0 = 0; k0 < z.taps; k0 += kTaps) {
    const int count = min(z.taps - k0, kTaps), here = count * kPositions;
    locate_samples(offsets, masks, tile, k0, count, z, samples);
    __syncthreads();
    for (int s0 = 0; s0 < here; s0 += units) {  // whole warps: their lanes are summed
      const int s = s0 + unit;
      A dot[4] = {};  // of the gradient with each corner
      Sample<A> sample{};
      sample.row = -1;
      if (s < here) sample = samples[s];
      const bool works = sample.row >= 0;
      if (works) {
        A weight[4];
        sample.corner_weights(weight);
        for (int c = first + lane * VEC; c < last; c += lanes * VEC) {
          const int64_t column = tile.column(z, c) + static_cast<int64_t>(sample.row) * z.per_group;
          A grad[VEC], corner[4][VEC], value[VEC] = {};
          load_pack<G, VEC>(grad_columns + column, grad);
          load_corners_inside<T, VEC>(image, sample, z, c, corner);
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (sample.pixel[n] < 0) continue;
            const A factor = weight[n] * sample.mask;
            A add[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
              dot[n] += grad[v] * corner[n][v];
              value[v] += corner[n][v] * weight[n];
              add[v] = factor * grad[v];
            }
            if (grads.images && factor != 0) {
              add_pack<VEC>(grads.images + pixels + static_cast<int64_t>(sample.pixel[n]) * z.C + c, add);
            }
          }
          if (grads.columns) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) value[v] *= sample.mask;
            store_pack<T, VEC>(grads.columns + column, value);
          }
        }
      }
      if (!grads.offsets) continue;
      A weight[4];
      sample.corner_weights(weight);
      A of_mask = weight[0] * dot[0] + weight[1] * dot[1] + weight[2] * dot[2] + weight[3] * dot[3];
      A of_y = (1 - sample.fx) * (dot[2] - dot[0]) + sample.fx * (dot[3] - dot[1]);
      A of_x = (1 - sample.fy) * (dot[1] - dot[0]) + sample.fy * (dot[3] - dot[2]);
      of_y = of_y == 0 ? A(0) : of_y * sample.mask;  // outside the map 0, whatever the mask
      of_x = of_x == 0 ? A(0) : of_x * sample.mask;
      A sums[3] = {of_x, of_y, of_mask};
      sum_lanes(sums, 1, lanes);
      __syncwarp();  // the sample was read by all of its lanes
      if (lane == 0 && works) samples[s].fx = sums[0], samples[s].fy = sums[1], samples[s].mask = sums[2];
    }
    __syncthreads();
    for (int n = threadIdx.x; grads.offsets && n < here; n += kThreads) {
      const int p = tile.first + n % kPositions;
      if (p >= z.positions) continue;
      const Sample<A>& sums = samples[n % kPositions * count + n / kPositions];
      const int64_t tap = tile.tap(z, k0 + n / kPositions);
      T* to = grads.offsets + 2 * tap * z.positions + p;
      to[0] = from_accumulate<T>(sums.fy), to[z.positions] = from_accumulate<T>(sums.fx);
      if (grads.masks) grads.masks[tap * z.positions + p] = from_accumulate<T>(sums.mask);
    }
    __syncthreads();  // samples may be written again
  }
}

}  // namespace
}  // namespace visdet::deform_conv2d

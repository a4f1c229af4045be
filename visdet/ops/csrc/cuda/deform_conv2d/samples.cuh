// Which samples a block has, and how it reads them. An image is read as [H, W, C] and the columns are [groups, B * H' *
// W', KH * KW, C / groups]: the channels of a sample lie next to each other. So reading a corner, writing a column and
// adding to a pixel move whole lines, and a sample is located once for all of its channels.
#pragma once

#include "common/bilinear.h"
#include "common/corners.cuh"
#include "common/values.cuh"

namespace visdet::deform_conv2d {
namespace {

constexpr int kThreads = 256;
constexpr int kPositions = 8;  // of the output, in a tile
constexpr int kTaps = 16;      // whose samples a block keeps at a time

struct Sizes {
  int32_t C, H, W, KW, taps;
  int32_t width, positions;   // of the output
  int32_t groups, per_group;  // groups of the weight, and the channels of one
  int32_t G, per_offset;      // groups of offsets, and the channels of one
  int32_t slice, slices;  // channels that are of one group of both kinds; how many such slices a group of offsets has
  int32_t stride[2], padding[2], dilation[2];
  int32_t images;      // of the part of the batch that a pass is over
  int32_t tiles;       // of an image
  int32_t lanes_log2;  // 2^lanes_log2 threads work on a sample
};

// What a block works on: kPositions positions of an image's output, for the channels of one group of offsets.
struct Tile {
  int64_t image;
  int32_t g, first;

  __device__ __forceinline__ explicit Tile(const Sizes& z) {
    const unsigned of_image = blockIdx.x / z.tiles;
    first = static_cast<int32_t>(blockIdx.x - of_image * z.tiles) * kPositions;
    image = of_image / z.G, g = static_cast<int32_t>(of_image % z.G);
  }
  // The number of tap k among those of all images and groups: offsets and masks have a map for each.
  __device__ __forceinline__ int64_t tap(const Sizes& z, int k) const { return (image * z.G + g) * z.taps + k; }
  // Where channel c of the input begins among columns; those of a sample begin `row` * per_group further on.
  __device__ __forceinline__ int64_t column(const Sizes& z, int c) const {
    const int group = z.groups == 1 ? 0 : c / z.per_group;
    return ((group * static_cast<int64_t>(z.images) + image) * z.positions + first) * z.taps * z.per_group + c -
           group * z.per_group;
  }
};

template <typename A>
struct alignas(16) Sample {
  int32_t pixel[4];  // of each corner, -1 outside the map
  A fx, fy, mask;
  int32_t row;  // position in the tile * taps + tap, -1 past the last position

  __device__ __forceinline__ void corner_weights(A (&weight)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) weight[k] = corner_factors(k, fx, fy).weight;
  }
};

// Called by all threads of a block: locates the samples of taps k0 .. k0 + count at the positions of its tile, and
// writes them position by position.
template <typename T, typename A>
__device__ __forceinline__ void locate_samples(const T* __restrict__ offsets, const T* __restrict__ masks,
                                               const Tile& tile, int k0, int count, const Sizes& z,
                                               Sample<A>* samples) {
  for (int n = threadIdx.x; n < count * kPositions; n += kThreads) {
    const int k = k0 + n / kPositions, p = tile.first + n % kPositions;
    Bilinear<A> at{};
    Sample<A> sample{};
    sample.row = -1, sample.mask = 1;
    if (p < z.positions) {
      const int row = p / z.width, column = p - row * z.width, i = k / z.KW, j = k - i * z.KW;
      const int64_t tap = tile.tap(z, k);
      const T* offset = offsets + 2 * tap * z.positions + p;
      const A y = A(row * z.stride[0] - z.padding[0] + i * z.dilation[0]) + to_accumulate(offset[0]);
      const A x = A(column * z.stride[1] - z.padding[1] + j * z.dilation[1]) + to_accumulate(offset[z.positions]);
      locate(x, y, z.H, z.W, at);
      if (masks) sample.mask = to_accumulate(masks[tap * z.positions + p]);
      sample.row = n % kPositions * z.taps + k;
    }
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) sample.pixel[corner] = at.is_inside[corner] ? at.index[corner] : -1;
    sample.fx = at.fx, sample.fy = at.fy;
    samples[n % kPositions * count + n / kPositions] = sample;
  }
}

// Reads the corners of a sample at VEC channels from c on, zeros outside the map. All loads are under way at once.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_corners_inside(const T* __restrict__ image, const Sample<A>& sample,
                                                    const Sizes& z, int c, A (&corner)[4][VEC]) {
  Pack<T, VEC> pack[4] = {};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (sample.pixel[n] >= 0) {
      pack[n] = *reinterpret_cast<const Pack<T, VEC>*>(image + static_cast<int64_t>(sample.pixel[n]) * z.C + c);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) unpack(pack[n], corner[n]);
}

}  // namespace
}  // namespace visdet::deform_conv2d

// The samples of a tile of the output.
#pragma once

#include "common/bilinear.h"
#include "common/cuda_utils.cuh"

namespace visdet::deform_conv2d {
namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 8;  // of the output, in a tile
constexpr int kTaps = 16;   // whose samples a block keeps at a time

struct Sizes {
  int32_t C, H, W, KW, taps, width, places;
  int32_t groups, per_group;  // channels of a group of the weight
  int32_t G, per_offset;      // channels that share an offset
  int32_t slice, slices;      // channels that share both; such slices of per_offset
  int32_t stride[2], padding[2], dilation[2];
  int32_t images;      // at a time
  int32_t tiles;       // of an image
  int32_t lanes_log2;  // threads that share a sample
};

// A block's part: kPlaces places of the output, for the channels of one group of offsets.
struct Tile {
  int64_t image;
  int32_t g, first;

  __device__ __forceinline__ explicit Tile(const Sizes& z) {
    const unsigned of_image = blockIdx.x / z.tiles;
    first = static_cast<int32_t>(blockIdx.x - of_image * z.tiles) * kPlaces;
    image = of_image / z.G, g = static_cast<int32_t>(of_image % z.G);
  }
  // Among offsets and masks.
  __device__ __forceinline__ int64_t tap(const Sizes& z, int k) const { return (image * z.G + g) * z.taps + k; }
  // The first column of channel c of the input, those of a sample being `row` * per_group further.
  __device__ __forceinline__ int64_t column(const Sizes& z, int c) const {
    const int group = z.groups == 1 ? 0 : c / z.per_group;
    return ((group * static_cast<int64_t>(z.images) + image) * z.places + first) * z.taps * z.per_group + c -
           group * z.per_group;
  }
};

template <typename A>
struct alignas(16) Sample {
  int32_t pixel[4];  // of each corner, -1 outside the map
  A fx, fy, mask;
  int32_t row;  // place in the tile * taps + tap, -1 past the last place

  __device__ __forceinline__ void corner_weights(A (&w)[4]) const {
    w[0] = (1 - fy) * (1 - fx), w[1] = (1 - fy) * fx, w[2] = fy * (1 - fx), w[3] = fy * fx;
  }
};

// All threads of a block: the samples of taps k0 .. k0 + count at the places of its tile, place by place.
template <typename T, typename A>
__device__ __forceinline__ void locate_samples(const T* __restrict__ offsets, const T* __restrict__ masks,
                                               const Tile& tile, int k0, int count, const Sizes& z,
                                               Sample<A>* samples) {
  for (int n = threadIdx.x; n < count * kPlaces; n += kThreads) {
    const int k = k0 + n / kPlaces, p = tile.first + n % kPlaces;
    Bilinear<A> at{};
    Sample<A> sample{};
    sample.row = -1, sample.mask = 1;
    if (p < z.places) {
      const int row = p / z.width, column = p - row * z.width, i = k / z.KW, j = k - i * z.KW;
      const int64_t tap = tile.tap(z, k);
      const T* offset = offsets + 2 * tap * z.places + p;
      const A y = A(row * z.stride[0] - z.padding[0] + i * z.dilation[0]) + to_accumulate(offset[0]);
      const A x = A(column * z.stride[1] - z.padding[1] + j * z.dilation[1]) + to_accumulate(offset[z.places]);
      locate(x, y, z.H, z.W, at);
      if (masks) sample.mask = to_accumulate(masks[tap * z.places + p]);
      sample.row = n % kPlaces * z.taps + k;
    }
#pragma unroll
    for (int corner = 0; corner < 4; ++corner) sample.pixel[corner] = at.is_inside[corner] ? at.index[corner] : -1;
    sample.fx = at.fx, sample.fy = at.fy;
    samples[n % kPlaces * count + n / kPlaces] = sample;
  }
}

// The corners of a sample at VEC channels, zeros outside the map. All four are on their way at once.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_corners(const T* __restrict__ image, const Sample<A>& sample, const Sizes& z,
                                             int c, A (&corner)[4][VEC]) {
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

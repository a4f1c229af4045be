// carafe on CUDA. The contract is in ../carafe.h. Every number of every result is written once, by the thread that sums
// it.
#include <tuple>

#include "carafe.h"
#include "common/launch.h"
#include "common/values.cuh"

namespace visdet::carafe {
namespace {

constexpr int kThreads = 256;
constexpr int kChannels = 8;  // of a thread, which reads a mask's number once for all of them
constexpr int kTaps = 8;      // of a thread of the gradient of masks

struct CarafeSizes {
  int C, H, W, G, K, s;
  int chunks;       // of channels or taps, per image and group
  unsigned blocks;  // of pixels of the output or of the map, per chunk
};

// What a block works on: kThreads pixels of one chunk of a group of an image.
struct Part {
  int64_t b, g;
  int chunk;
  int pixel;  // of this thread

  __device__ __forceinline__ explicit Part(const CarafeSizes& z) {
    const unsigned row = blockIdx.x / z.blocks, of_image = row / z.chunks;
    b = of_image / z.G, g = of_image % z.G;
    chunk = row - of_image * z.chunks, pixel = (blockIdx.x - row * z.blocks) * kThreads + threadIdx.x;
  }
};

// Forward. A thread owns kChannels channels of a pixel of the output, the next thread the next pixel of the row. The
// masks of a pixel are read once for each chunk of channels, a feature K * K * s * s times, from the first-level cache.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads) upsample_kernel(const T* __restrict__ features, const T* __restrict__ masks,
                                                            T* __restrict__ output, const CarafeSizes z) {
  const Part part(z);
  const int64_t b = part.b, g = part.g;
  const int columns = z.W * z.s, pixels = z.H * z.s * columns, pixel = part.pixel;
  if (pixel >= pixels) return;
  const int y = pixel / columns, x = pixel - y * columns, h = y / z.s, w = x / z.s, edge = z.K / 2;
  const int per_group = z.C / z.G, first = part.chunk * kChannels, count = min(per_group - first, kChannels);
  const int64_t map = z.H * z.W;
  const T* from = features + (b * z.C + g * per_group + first) * map;
  const T* mask = masks + (b * z.G + g) * z.K * z.K * static_cast<int64_t>(pixels) + pixel;
  A sum[kChannels] = {};
  for (int i = 0; i < z.K; ++i) {
    const int row = h + i - edge;
    for (int j = 0; j < z.K; ++j, mask += pixels) {
      const int column = w + j - edge;
      const bool is_inside = row >= 0 && row < z.H && column >= 0 && column < z.W;
      const A weight = to_accumulate(*mask);
      const T* value = from + row * z.W + column;
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        sum[k] += weight * (is_inside && k < count ? to_accumulate(value[k * map]) : A(0));
      }
    }
  }
  T* to = output + (b * z.C + g * per_group + first) * static_cast<int64_t>(pixels) + pixel;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    if (k < count) to[k * static_cast<int64_t>(pixels)] = from_accumulate<T>(sum[k]);
  }
}

// The gradient of masks. A thread owns kTaps taps of a pixel of the output and sums over the channels of the group.
// grad_output is read once for each chunk of taps.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    grad_masks_kernel(const T* __restrict__ grad_output, const T* __restrict__ features, T* __restrict__ grad_masks,
                      const CarafeSizes z) {
  const Part part(z);
  const int64_t b = part.b, g = part.g;
  const int columns = z.W * z.s, pixels = z.H * z.s * columns, pixel = part.pixel;
  if (pixel >= pixels) return;
  const int y = pixel / columns, x = pixel - y * columns, h = y / z.s, w = x / z.s, edge = z.K / 2, taps = z.K * z.K;
  const int per_group = z.C / z.G, first = part.chunk * kTaps;
  const int64_t map = z.H * z.W;
  int at[kTaps];  // pixel of the map that each tap reads, or -1
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const int tap = first + k, row = h + tap / z.K - edge, column = w + tap % z.K - edge;
    at[k] = tap < taps && row >= 0 && row < z.H && column >= 0 && column < z.W ? row * z.W + column : -1;
  }
  const T* from = features + (b * z.C + g * per_group) * map;
  const T* grad = grad_output + (b * z.C + g * per_group) * static_cast<int64_t>(pixels) + pixel;
  A sum[kTaps] = {};
  for (int c = 0; c < per_group; ++c, from += map, grad += pixels) {
    const A of_pixel = to_accumulate(*grad);
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      sum[k] += of_pixel * (at[k] >= 0 ? to_accumulate(from[at[k]]) : A(0));
    }
  }
  T* to = grad_masks + ((b * z.G + g) * taps + first) * static_cast<int64_t>(pixels) + pixel;
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    if (first + k < taps) to[k * static_cast<int64_t>(pixels)] = from_accumulate<T>(sum[k]);
  }
}

// The gradient of features. A thread owns kChannels channels of a pixel of the map and sums over the K * K * s * s
// pixels of the output that read it.
template <typename T, typename A>
__global__ void __launch_bounds__(kThreads)
    grad_features_kernel(const T* __restrict__ grad_output, const T* __restrict__ masks, T* __restrict__ grad_features,
                         const CarafeSizes z) {
  const Part part(z);
  const int64_t b = part.b, g = part.g, map = z.H * z.W;
  const int columns = z.W * z.s, pixels = z.H * z.s * columns, target = part.pixel;
  if (target >= z.H * z.W) return;
  const int h = target / z.W, w = target - h * z.W, edge = z.K / 2;
  const int per_group = z.C / z.G, first = part.chunk * kChannels, count = min(per_group - first, kChannels);
  const T* grad = grad_output + (b * z.C + g * per_group + first) * static_cast<int64_t>(pixels);
  const T* mask = masks + (b * z.G + g) * z.K * z.K * static_cast<int64_t>(pixels);
  A sum[kChannels] = {};
  for (int i = 0; i < z.K; ++i) {
    const int row = h - i + edge;
    for (int j = 0; j < z.K; ++j, mask += pixels) {
      const int column = w - j + edge;
      if (row < 0 || row >= z.H || column < 0 || column >= z.W) continue;
      for (int y = row * z.s; y < (row + 1) * z.s; ++y) {
        for (int x = column * z.s; x < (column + 1) * z.s; ++x) {
          const int pixel = y * columns + x;
          const A weight = to_accumulate(mask[pixel]);
#pragma unroll
          for (int k = 0; k < kChannels; ++k) {
            if (k < count) sum[k] += weight * to_accumulate(grad[k * static_cast<int64_t>(pixels) + pixel]);
          }
        }
      }
    }
  }
  T* to = grad_features + (b * z.C + g * per_group + first) * map + target;
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
    if (k < count) to[k * map] = from_accumulate<T>(sum[k]);
  }
}

// The sizes for threads that each own one of `pixels` pixels, and `each` of the `count` channels or taps. The tensors
// must not be empty.
CarafeSizes sizes_of(const char* op, const CarafeProblem& p, int64_t pixels, int64_t count, int64_t each) {
  VISDET_CHECK(op, p.H <= (INT32_MAX - kThreads) / p.s / p.s / p.W,
               "the output must have fewer than 2^31 - 256 pixels, got ", p.H * p.s, " x ", p.W * p.s);
  VISDET_CHECK(op, p.C <= INT32_MAX, "features must have fewer than 2^31 channels, got ", p.C);
  CarafeSizes z{};
  z.chunks = static_cast<int>(ceil_div(count, each)), z.blocks = static_cast<unsigned>(ceil_div(pixels, kThreads));
  z.C = static_cast<int>(p.C), z.H = static_cast<int>(p.H), z.W = static_cast<int>(p.W);
  z.G = static_cast<int>(p.G), z.K = static_cast<int>(p.K), z.s = static_cast<int>(p.s);
  return z;
}

int64_t blocks_of(const CarafeProblem& p, const CarafeSizes& z) { return p.B * p.G * z.chunks * z.blocks; }

}  // namespace
}  // namespace visdet::carafe

namespace visdet {

template <typename T, typename A>
void carafe_upsample(const OnDevice& device, CarafeArrays<T, A>& a) {
  using namespace carafe;
  const CarafeSizes sizes = sizes_of(device.op, a, a.H * a.W * a.s * a.s, a.C / a.G, kChannels);
  launch({device.op, "upsample_kernel", device.scope, blocks_of(a, sizes), kThreads}, upsample_kernel<T, A>, a.features,
         a.masks, a.output, sizes);
}

template <typename T, typename A>
void carafe_gradients(const OnDevice& device, CarafeArrays<T, A>& a) {
  using namespace carafe;
  const int64_t map = a.H * a.W;
  const CarafeSizes by_channels = sizes_of(device.op, a, map, a.C / a.G, kChannels),
                    by_taps = sizes_of(device.op, a, map * a.s * a.s, a.K * a.K, kTaps);
  launch({device.op, "grad_features_kernel", device.scope, blocks_of(a, by_channels), kThreads},
         grad_features_kernel<T, A>, a.grad_output, a.masks, a.grad_features, by_channels);
  launch({device.op, "grad_masks_kernel", device.scope, blocks_of(a, by_taps), kThreads}, grad_masks_kernel<T, A>,
         a.grad_output, a.features, a.grad_masks, by_taps);
}

}  // namespace visdet

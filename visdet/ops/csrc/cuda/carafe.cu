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

Tensor forward(const Tensor& features_in, const Tensor& masks_in, int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  const DeviceScope scope(features_in);
  const Tensor features = dense(features_in), masks = dense(masks_in);
  Tensor output = new_empty(features, {problem.B, problem.C, problem.H * s, problem.W * s});
  if (output.numel() == 0) return output;
  const int64_t pixels = problem.H * problem.W * s * s;
  const CarafeSizes sizes = sizes_of(op, problem, pixels, problem.C / G, kChannels);
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    launch({op, "upsample_kernel", scope, blocks_of(problem, sizes), kThreads}, upsample_kernel<T, A>,
           data_of<T>(features), data_of<T>(masks), mutable_data_of<T>(output), sizes);
  });
  return output;
}

std::tuple<Tensor, Tensor> backward(const Tensor& grad_output_in, const Tensor& features_in, const Tensor& masks_in,
                                    int64_t K, int64_t G, int64_t s) {
  constexpr const char* op = "carafe_backward";
  const auto problem = check_carafe(op, features_in, masks_in, K, G, s);
  check_carafe_shape(op, "grad_output", grad_output_in, features_in, problem.C, s);
  const DeviceScope scope(features_in);
  const Tensor grad_output = dense(grad_output_in), features = dense(features_in), masks = dense(masks_in);
  Tensor grad_features = new_like(features), grad_masks = new_like(masks);
  if (grad_output.numel() == 0) return {zero_(grad_features), zero_(grad_masks)};
  const int64_t map = problem.H * problem.W;
  const CarafeSizes by_channels = sizes_of(op, problem, map, problem.C / G, kChannels),
                    by_taps = sizes_of(op, problem, map * s * s, K * K, kTaps);
  dispatch_value_type(features.scalar_type(), [&]<typename T, typename A>(T, A) {
    const T* grad = data_of<T>(grad_output);
    launch({op, "grad_features_kernel", scope, blocks_of(problem, by_channels), kThreads}, grad_features_kernel<T, A>,
           grad, data_of<T>(masks), mutable_data_of<T>(grad_features), by_channels);
    launch({op, "grad_masks_kernel", scope, blocks_of(problem, by_taps), kThreads}, grad_masks_kernel<T, A>, grad,
           data_of<T>(features), mutable_data_of<T>(grad_masks), by_taps);
  });
  return {grad_features, grad_masks};
}

}  // namespace
}  // namespace visdet::carafe

VISDET_CUDA_OPERATORS(carafe, m) {
  m.impl("carafe", TORCH_BOX(&visdet::carafe::forward));
  m.impl("carafe_backward", TORCH_BOX(&visdet::carafe::backward));
}

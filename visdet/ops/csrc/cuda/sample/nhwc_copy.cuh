// Images in the order that the passes of sample_sum and sample_dot read: [B, H, W, C]. Channels-last images have this
// order; NCHW images are copied into it.
//
// A block copies kCopyPixels neighbouring pixels of an image with all their channels. It reads whole lines of each
// channel into shared memory, asynchronously where the GPU can; then each thread takes squares of N x N numbers,
// transposes them in registers, and writes N channels of N pixels.
#pragma once

#include <cuda_pipeline.h>

#include <algorithm>
#include <type_traits>

#include "common/overlap.cuh"
#include "cuda/sample/samples.cuh"

namespace visdet::sample {
namespace {

template <typename T>
struct Copying {
  const T* from;
  T* to;
  uint32_t blocks;  // of an image
  bool in_packs;    // whether kCopyPack<T> numbers can be read at once wherever a block reads
};

constexpr int kCopyThreads = 256;
constexpr int kCopyPixels = 32;

template <typename T>
constexpr int kCopyPack = sizeof(T) == 8 ? 1 : 4;
template <typename T>
constexpr int kCopyChannels = sizeof(T) == 8 ? 96 : 160;  // at a time

template <typename T>
struct CopyTile {
  alignas(16) T at[kCopyChannels<T> * kCopyPixels];
};

// Copies from global to shared memory. From sm_80 on, the numbers do not pass through registers, so that a thread
// starts all its copies before the first number has arrived. The source is read only once: its lines are marked as the
// first that leave the second-level cache, which is to keep the copy. Older GPUs have no such instruction.
template <typename P>
__device__ __forceinline__ void copy_async(P* to, const P* from) {
#if __CUDA_ARCH__ >= 800
  constexpr bool kHasAsync = true;
#else
  constexpr bool kHasAsync = false;
#endif
  if constexpr (sizeof(P) < 4 || !kHasAsync) {
    *to = *from;
  } else {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (sizeof(P) == 16) {
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "l"(policy)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(sizeof(P)),
                   "l"(policy)
                   : "memory");
    }
  }
}

// For all threads of a block: copies the block's part of an image. Packs of N pixels lie in the tile in an order in
// which neither the writes nor the reads of a warp meet bank conflicts.
template <int N, typename T>
__device__ __forceinline__ void copy_pixels(const Copying<T>& copying, int64_t image, int64_t block, const Sizes& sizes,
                                            CopyTile<T>& tile) {
  constexpr int kPacks = kCopyPixels / N, kChannels = kCopyChannels<T>;
  auto* packs = reinterpret_cast<Pack<T, N>*>(tile.at);
  const auto index_of = [&](int c, int pack) { return c * kPacks + (pack ^ (c / N % kPacks)); };
  const int64_t pixels = static_cast<int64_t>(sizes.H) * sizes.W, first = block * kCopyPixels, rest = pixels - first;
  const int count = static_cast<int>(rest < kCopyPixels ? rest : kCopyPixels) / N;
  const T* from = copying.from + image * sizes.C * pixels + first;
  T* to = copying.to + (image * pixels + first) * sizes.C;
  for (int c0 = 0; c0 < sizes.C; c0 += kChannels) {
    const int here = min(kChannels, sizes.C - c0), pack = threadIdx.x % kPacks;
    for (int c = threadIdx.x / kPacks; pack < count && c < here; c += kCopyThreads / kPacks) {
      copy_async(packs + index_of(c, pack), reinterpret_cast<const Pack<T, N>*>(from + (c0 + c) * pixels + pack * N));
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();  // the tile is complete
    const int across = here / N;
    int down = threadIdx.x / across, c = threadIdx.x - down * across;
    const int step_down = kCopyThreads / across, step_c = kCopyThreads - step_down * across;
#pragma unroll(N == 1 ? 4 : 1)
    while (down < count) {
      Pack<T, N> in[N];
#pragma unroll
      for (int i = 0; i < N; ++i) in[i] = packs[index_of(c * N + i, down)];
      T* pixel = to + static_cast<int64_t>(down) * N * sizes.C + c0 + c * N;
#pragma unroll
      for (int i = 0; i < N; ++i, pixel += sizes.C) {
        Pack<T, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) out.at[j] = in[j].at[i];
        if constexpr (N == 1) {
          *pixel = out.at[0];
        } else {
          using Word = std::conditional_t<sizeof(out) == 16, int4, int2>;
          __stcg(reinterpret_cast<Word*>(pixel), *reinterpret_cast<const Word*>(&out));  // one store
        }
      }
      down += step_down, c += step_c;
      if (c >= across) c -= across, ++down;
    }
    __syncthreads();  // the tile may be written again
  }
}

template <typename T>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const Copying<T> copying, const Sizes sizes) {
  __shared__ CopyTile<T> tile;
  allow_next_launch();
  const uint32_t image = blockIdx.x / copying.blocks, block = blockIdx.x - image * copying.blocks;
  if (copying.in_packs) {
    copy_pixels<kCopyPack<T>>(copying, image, block, sizes, tile);
  } else {
    copy_pixels<1>(copying, image, block, sizes, tile);
  }
  if (blockIdx.x == 0) await_previous_launch();
}

// How many images are copied, and then read, at a time by passes whose launches overlap: few enough that the copies are
// still in the second-level cache when they are read. Where launches cannot overlap, more launches cost more than that
// gains.
inline int64_t images_at_once(const Device& device, int64_t B, int64_t image_bytes) {
  if (device.capability < kOverlapCapability) return B;
  const int64_t most = std::max<int64_t>(1, device.l2_bytes / 4 * 3 / std::max<int64_t>(1, image_bytes));
  return ceil_div(B, ceil_div(B, most));
}

constexpr int kPackChannels = 4;  // that a thread loads at once
inline bool has_packs(int64_t C, int64_t K) { return C % kPackChannels == 0 && K % kPackChannels == 0; }

// Returns the images, in float32 if they have 16 bit and cannot be read in packs. No published model has such images,
// so that there is no kernel for them.
inline Tensor readable(const Tensor& images, const SampleProblem& problem) {
  const bool packed =
      has_packs(problem.C, problem.K) && (!problem.channels_last || aligned(images, kPackChannels * sizeof(uint16_t)));
  return !is_16_bit(images) || packed ? images : in_float32(images);
}

// Images as [B, H, W, C] in memory: themselves if they are channels last, else a copy, which start_copy() makes.
template <typename T>
struct Images {
  Tensor given, copy;
  const T* data;
  bool is_copy;

  Images(const Tensor& images, const SampleProblem& problem)
      : given(images), copy(images), is_copy(!problem.channels_last && images.numel() > 0) {
    if (is_copy) given = dense(images), copy = new_empty(images, {problem.B, problem.H, problem.W, problem.C});
    data = data_of(copy);
  }

  // Copies `count` images from `first` on. overlaps: whether the launch may overlap the one before it.
  void start_copy(const char* op, const DeviceScope& scope, const Sizes& sizes, int64_t first, int64_t count,
                  bool overlaps) const {
    const int64_t pixels = int64_t{sizes.H} * sizes.W, offset = first * pixels * sizes.C;
    const int64_t blocks = ceil_div(pixels, kCopyPixels);
    const bool in_packs =
        sizes.C % kCopyPack<T> == 0 && pixels % kCopyPack<T> == 0 && aligned(given, sizeof(Pack<T, kCopyPack<T>>));
    const Copying<T> copying{data_of<T>(given) + offset, mutable_data_of<T>(copy) + offset,
                             static_cast<uint32_t>(blocks), in_packs};
    launch({op, "copy_kernel", scope, count * blocks, kCopyThreads, 0, 0, overlaps}, copy_kernel<T>, copying, sizes);
  }
};

}  // namespace
}  // namespace visdet::sample

// Images in the order that the passes of sample_sum and sample_dot read: [B, H, W, C]. Channels-last images are so
// already; NCHW ones are copied, either by a kernel of its own or by blocks of the first pass.
//
// A block copies kCopyPixels neighbouring pixels of an image with all their channels. It reads whole lines of each
// channel into shared memory, asynchronously where the GPU can; then each thread takes squares of N x N numbers,
// transposes them in registers, and writes N channels of N pixels.
#pragma once

#include <cuda_pipeline.h>

#include <type_traits>

#include "cuda/sample/samples.cuh"

namespace visdet::sample {
namespace {

template <typename T>
struct Copying {
  const T* from;  // null: there is nothing to copy
  T* to;
  int32_t* done;    // [B] blocks that have copied their part of an image; not counted if null
  uint32_t blocks;  // of an image
  bool in_packs;    // sizes and addresses allow packs of kCopyPack<T>
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

// Copies to shared memory without registers, so that all copies are under way at once. What is read will not be read
// again: it is the first to leave the second-level cache, where the copy is to stay. Before sm_80 there is no such
// instruction, and the copy goes through registers.
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
template <int THREADS, int N, typename T>
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
    for (int c = threadIdx.x / kPacks; pack < count && c < here; c += THREADS / kPacks) {
      copy_async(packs + index_of(c, pack), reinterpret_cast<const Pack<T, N>*>(from + (c0 + c) * pixels + pack * N));
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();  // the tile is complete
    const int across = here / N;
    int down = threadIdx.x / across, c = threadIdx.x - down * across;
    const int step_down = THREADS / across, step_c = THREADS - step_down * across;
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
    __syncthreads();  // the tile may be written again, and all is written
  }
  if (copying.done != nullptr && threadIdx.x == 0) {
    __threadfence();
    atomicAdd(copying.done + image, 1);
  }
}

template <int THREADS, typename T>
__device__ __forceinline__ void copy_block(const Copying<T>& copying, int64_t image, int64_t block, const Sizes& sizes,
                                           CopyTile<T>& tile) {
  if (copying.in_packs) {
    copy_pixels<THREADS, kCopyPack<T>>(copying, image, block, sizes, tile);
  } else {
    copy_pixels<THREADS, 1>(copying, image, block, sizes, tile);
  }
}

template <typename T>
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const Copying<T> copying, const Sizes sizes) {
  __shared__ CopyTile<T> tile;
  const uint32_t image = blockIdx.x / copying.blocks;
  copy_block<kCopyThreads>(copying, image, blockIdx.x - image * copying.blocks, sizes, tile);
}

// What a block of the sum or dots pass does: it owns a query, or, if COPIES, it may copy a part of an image. The
// queries of an image alternate with the copies of the next, so that they read what has just been copied from the
// second-level cache, and wait until all blocks that copy their image are done. This rests on GPUs starting blocks in
// the order of their numbers, which they do although CUDA does not promise it: the awaited blocks have lower numbers,
// so they are running already, and they wait for nobody. Should that ever fail, a wait without end becomes an error of
// the launch.
struct Role {
  bool copies;
  uint32_t image, index;  // index: of the query, or of the part of the image
};

// For all threads of a block.
template <bool COPIES, typename T>
__device__ __forceinline__ Role role_of_block(const Copying<T>& copying, const Sizes& sizes) {
  const auto Q = static_cast<uint32_t>(sizes.Q), B = static_cast<uint32_t>(sizes.B), blocks = copying.blocks;
  if (!COPIES || copying.from == nullptr) {
    const uint32_t i = gridDim.x - 1 - blockIdx.x;  // what was copied last is still in the second-level cache
    return {false, i / Q, i % Q};
  }
  const uint32_t number = blockIdx.x;
  if (number < blocks) return {true, 0, number};
  const uint32_t i = number - blocks, both = blocks + Q, image = i / both, n = i - image * both;
  if (image == B - 1) return {false, image, n};
  const uint32_t alternating = 2 * min(blocks, Q);
  if (n < alternating) return {n % 2 == 1, n % 2 == 1 ? image + 1 : image, n / 2};
  return blocks > Q ? Role{true, image + 1, n - Q} : Role{false, image, n - blocks};
}

constexpr int kMaxLooks = 1 << 25;  // at the counter before await_image() gives up, after some 20 s

// For all threads of a block: returns when the image is copied.
template <typename T>
__device__ __forceinline__ void await_image(const Copying<T>& copying, int64_t image) {
  if (threadIdx.x == 0) {
    uint32_t done;
    int looks = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(copying.done + image) : "memory");
      if (++looks == kMaxLooks) __trap();
    } while (done < copying.blocks);
  }
  __syncthreads();
}

inline int64_t copying_blocks(const SampleProblem& problem) { return ceil_div(problem.H * problem.W, kCopyPixels); }

// Images as [B, H, W, C] in memory: themselves, or a copy, which is made at once or by the first pass.
template <typename T>
struct Images {
  Tensor given, copy, done;
  const T* data;
  Copying<T> copying{};

  Images(const char* op, const Tensor& images, const SampleProblem& problem, const Sizes& sizes,
         const DeviceScope& scope, bool at_once)
      : given(images), copy(images), done(images), data(data_of<T>(images)) {
    if (problem.channels_last || images.numel() == 0) return;
    given = dense(images), copy = new_empty(images, {problem.B, problem.H, problem.W, problem.C});
    const int64_t pixels = problem.H * problem.W, blocks = copying_blocks(problem);
    copying.from = data_of<T>(given), copying.to = mutable_data_of<T>(copy);
    copying.blocks = static_cast<uint32_t>(blocks);
    copying.in_packs =
        problem.C % kCopyPack<T> == 0 && pixels % kCopyPack<T> == 0 && aligned(given, sizeof(Pack<T, kCopyPack<T>>));
    data = copying.to;
    if (at_once) {
      launch({op, "copy_kernel", scope, problem.B * blocks, kCopyThreads}, copy_kernel<T>, copying, sizes);
      copying = {};
    } else {
      done = new_empty(images, {problem.B}, ScalarType::Int);
      copying.done = mutable_data_of<int32_t>(done);
      fill_bytes(op, scope, copying.done, 0, problem.B * static_cast<int64_t>(sizeof(int32_t)));
    }
  }
};

// What every pass reads. T: of images; A: of everything else, and of sums.
template <typename T, typename A>
struct Inputs {
  using Value = T;
  using Sum = A;

  const char* op;
  const DeviceScope& scope;
  Sizes sizes;
  const Images<T>& images;
  const Tensor& samples;

  const Pack<A, 2>* sample_data() const { return data_of<Pack<A, 2>>(samples); }
  int64_t queries() const { return sizes.B * sizes.Q; }
  // Of a pass that owns a query with each block, and those that copy.
  int64_t blocks() const { return queries() + sizes.B * images.copying.blocks; }

  // Calls f(VEC) with 4 channels a load where types, sizes and addresses, `other` among them, allow it, else 1.
  template <typename F>
  void with_vec(const void* other, const F& f) const {
    if constexpr (sizeof(A) == 4) {
      constexpr int kVec = 4;
      if (sizes.C % kVec == 0 && sizes.K % kVec == 0 && aligned(images.data, kVec * sizeof(T)) && aligned(other, 16)) {
        return f(std::integral_constant<int, kVec>{});
      }
    }
    f(std::integral_constant<int, 1>{});
  }
};

}  // namespace
}  // namespace visdet::sample

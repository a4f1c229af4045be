// sample_sum and sample_dot on CUDA. The contract, and the three passes, are in ../sample_ops.h; how the work is laid
// out, above each kernel. Images are read as [B, H, W, C]: NCHW ones are copied into that order.
#include <cuda_pipeline.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <type_traits>

#include "common/bilinear.h"
#include "common/block_scan.cuh"
#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "common/order_records.cuh"
#include "common/paths.h"
#include "sample_ops.h"

namespace visdet {
namespace {

constexpr unsigned kAll = 0xffffffffu;

struct Sizes {
  int64_t B, Q;
  int32_t C, H, W, D, G, K;
  int64_t cells;  // of an image, and one more
};

template <typename A>
__device__ __forceinline__ bool locate_sample(const Pack<A, 2>& sample, const Sizes& sizes, A& x, A& y,
                                              Bilinear<A>& at) {
  x = fma(sample.at[0] + 1, A(sizes.W) / 2, A(-0.5)), y = fma(sample.at[1] + 1, A(sizes.H) / 2, A(-0.5));
  return locate(x, y, sizes.H, sizes.W, at);
}

// The square between four pixel centres that a sample falls into, border squares included.
template <typename A>
__device__ __forceinline__ int64_t cell_of(A x, A y, const Sizes& sizes) {
  return (static_cast<int64_t>(floor(y)) + 1) * (sizes.W + 1) + static_cast<int32_t>(floor(x)) + 1;
}

// Channel j of the encoding of a depth.
template <typename A>
__device__ __forceinline__ A encode(A depth, int j) {
  A sine, cosine;
  sincospi(scalbn(depth, j / 2 + 1), &sine, &cosine);
  return j % 2 ? cosine : sine;
}

// Calls keep(place, d, x, y, at) for those among the samples [d0, d0 + THREADS) of a query that count, place being
// their rank in order, and skip(d) for the others; returns how many count. For all threads of the block, of which each
// looks at one.
template <int THREADS, typename A, typename Keep, typename Skip>
__device__ __forceinline__ int compact_samples(const Pack<A, 2>* __restrict__ samples, int d0, const Sizes& sizes,
                                               const Keep& keep, const Skip& skip) {
  constexpr int kWarps = THREADS / 32;
  __shared__ int32_t counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = d0 + threadIdx.x;
  A x, y;
  Bilinear<A> at;
  const bool counts_too = d < sizes.D && locate_sample(samples[d], sizes, x, y, at);
  const unsigned ballot = __ballot_sync(kAll, counts_too);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  int place = __popc(ballot & ((1u << lane) - 1)), total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) place += counts[w];
    total += counts[w];
  }
  if (counts_too) {
    keep(place, d, x, y, at);
  } else if (d < sizes.D) {
    skip(d);
  }
  __syncthreads();
  return total;
}

template <typename A>
struct alignas(16) Sample {
  uint32_t row[4];  // pixel of each corner, clamped into the image
  A weight[4];

  Sample() = default;
  __device__ __forceinline__ explicit Sample(const Bilinear<A>& at) {
    at.corner_weights(weight);
#pragma unroll
    for (int k = 0; k < 4; ++k) row[k] = at.index[k];
  }
};

// VEC channels, `image` pointing at the first of pixel 0, of the four corners.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_corners(const char* image, const Sample<A>& sample, uint32_t pixel_bytes,
                                             A (&corner)[4][VEC]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    load_pack<T, VEC>(image + static_cast<uint64_t>(sample.row[k]) * pixel_bytes, corner[k]);
  }
}

template <int VEC, typename A>
__device__ __forceinline__ void interpolate(const A (&corner)[4][VEC], const Sample<A>& sample, A (&s)[VEC]) {
#pragma unroll
  for (int v = 0; v < VEC; ++v) {
    s[v] = corner[0][v] * sample.weight[0];
#pragma unroll
    for (int k = 1; k < 4; ++k) s[v] += corner[k][v] * sample.weight[k];
  }
}

// Coefficients of sample d for GROUPS groups from g0 on, zero past the last.
template <int GROUPS, typename A>
__device__ __forceinline__ Pack<A, GROUPS> load_coefficients(const A* __restrict__ coefficients, int64_t b, int64_t q,
                                                             int g0, int d, const Sizes& sizes) {
  Pack<A, GROUPS> out = {};
  if (d >= sizes.D) return out;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    if (g0 + g < sizes.G) out.at[g] = coefficients[((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.D + d];
  }
  return out;
}

// [B, C, H, W] to [B, H, W, C].
template <typename T>
struct Copying {
  const T* from;  // null: nothing is to be copied
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

// To shared memory without registers, so that all copies are on their way at once. What is read will not be again: it
// is the first to leave the second-level cache, where the copy shall stay. Before sm_80 there is no such instruction:
// the copy goes through registers.
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

// A block's part of an image: kCopyPixels neighbouring pixels with all their channels, from whole lines to whole lines.
// Squares of N x N numbers are transposed in registers. Packs of N pixels lie in the tile such that neither side meets
// bank conflicts.
template <int THREADS, int N, typename T>
__device__ __forceinline__ void copy_pixels(const Copying<T>& copying, int64_t image, int64_t block, const Sizes& sizes,
                                            CopyTile<T>& tile) {
  constexpr int kPacks = kCopyPixels / N, kChannels = kCopyChannels<T>;
  auto* packs = reinterpret_cast<Pack<T, N>*>(tile.at);
  const auto place = [&](int c, int pack) { return c * kPacks + (pack ^ (c / N % kPacks)); };
  const int64_t pixels = static_cast<int64_t>(sizes.H) * sizes.W, first = block * kCopyPixels, left = pixels - first;
  const int count = static_cast<int>(left < kCopyPixels ? left : kCopyPixels) / N;
  const T* from = copying.from + image * sizes.C * pixels + first;
  T* to = copying.to + (image * pixels + first) * sizes.C;
  for (int c0 = 0; c0 < sizes.C; c0 += kChannels) {
    const int here = min(kChannels, sizes.C - c0), pack = threadIdx.x % kPacks;
    for (int c = threadIdx.x / kPacks; pack < count && c < here; c += THREADS / kPacks) {
      copy_async(packs + place(c, pack), reinterpret_cast<const Pack<T, N>*>(from + (c0 + c) * pixels + pack * N));
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    const int across = here / N;
    int down = threadIdx.x / across, c = threadIdx.x - down * across;
    const int step_down = THREADS / across, step_c = THREADS - step_down * across;
#pragma unroll(N == 1 ? 4 : 1)
    while (down < count) {
      Pack<T, N> in[N];
#pragma unroll
      for (int i = 0; i < N; ++i) in[i] = packs[place(c * N + i, down)];
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
// so they are running already, and they wait for nobody. Numbers taken from a counter in memory would need no such
// order, but cost 8 % of the time; instead a wait without end becomes an error of the launch.
struct Role {
  bool copies;
  uint32_t image, index;
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

// All threads of a block: returns when the image is copied.
constexpr int kMostLooks = 1 << 25;  // some 20 s
template <typename T>
__device__ __forceinline__ void await_image(const Copying<T>& copying, int64_t image) {
  if (threadIdx.x == 0) {
    uint32_t done;
    int looks = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(copying.done + image) : "memory");
      if (++looks == kMostLooks) __trap();
    } while (done < copying.blocks);
  }
  __syncthreads();
}

// The sum pass. A block owns a query: its threads are split into slots of as many as there are packs of VEC channels;
// the slots take samples in turn, and a thread keeps the sums of its pack for GROUPS groups in registers, so that each
// corner is read once for them. The slots' sums are added in order.
constexpr int kSumThreads = 256;

template <typename T, typename TO, typename A, int VEC, int GROUPS>
__global__ void __launch_bounds__(kSumThreads, sizeof(A) == 4 ? 4 : 2)
    sum_kernel(const T* images, const Copying<T> copying, const Pack<A, 2>* __restrict__ samples,
               const A* __restrict__ coefficients, TO* __restrict__ sums, const Sizes sizes) {
  struct Lists {
    Sample<A> samples[kSumThreads];
    Pack<A, GROUPS> coefficients[kSumThreads];
  };
  __shared__ union Shared {
    Lists lists;
    A planes[GROUPS * VEC][kSumThreads];
    CopyTile<T> tile;
    __device__ Shared() {}
  } shared;
  const Role role = role_of_block<true>(copying, sizes);
  if (role.copies) return copy_block<kSumThreads>(copying, role.image, role.index, sizes, shared.tile);
  bool waits = copying.from != nullptr;
  const int64_t b = role.image, q = role.index, query = b * sizes.Q + q;
  const auto* image = reinterpret_cast<const char*>(images + b * sizes.H * sizes.W * sizes.C);
  const uint32_t pixel_bytes = sizes.C * sizeof(T);
  const int packs = (sizes.K + VEC - 1) / VEC, in_slot = min(packs, kSumThreads), slots = kSumThreads / in_slot;
  const int slot = threadIdx.x / in_slot, pack_in_slot = threadIdx.x - slot * in_slot;
  for (int g0 = 0; g0 < sizes.G; g0 += GROUPS) {
    for (int p0 = 0; p0 < packs; p0 += in_slot) {
      const int pack = p0 + pack_in_slot;
      const bool works = slot < slots && pack < packs;
      const int c = works ? pack * VEC : 0;
      A sum[GROUPS][VEC] = {};
      for (int d0 = 0; d0 < sizes.D; d0 += kSumThreads) {
        const auto mine = load_coefficients<GROUPS>(coefficients, b, q, g0, d0 + threadIdx.x, sizes);
        const int count = compact_samples<kSumThreads>(
            samples + query * sizes.D, d0, sizes,
            [&](int place, int, A, A, const Bilinear<A>& at) {
              shared.lists.samples[place] = Sample<A>(at);
              shared.lists.coefficients[place] = mine;
            },
            [](int) {});
        if (waits) await_image(copying, b);
        waits = false;
        if (works) {
#pragma unroll 1
          for (int i = slot; i < count; i += slots) {
            const Sample<A> sample = shared.lists.samples[i];
            A corner[4][VEC], s[VEC];
            load_corners<T, VEC>(image + c * sizeof(T), sample, pixel_bytes, corner);
            interpolate(corner, sample, s);
            const Pack<A, GROUPS> coefficient = shared.lists.coefficients[i];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) sum[g][v] += s[v] * coefficient.at[g];
            }
          }
        }
        __syncthreads();  // the lists have been read
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) shared.planes[g * VEC + v][threadIdx.x] = sum[g][v];
      }
      __syncthreads();
      // Each slot finishes some of the groups.
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        if (!works || g0 + g >= sizes.G || g % slots != slot) continue;
        A total[VEC] = {};
        for (int other = 0; other < slots; ++other) {
#pragma unroll
          for (int v = 0; v < VEC; ++v) total[v] += shared.planes[g * VEC + v][other * in_slot + pack_in_slot];
        }
        store_pack<TO, VEC>(sums + ((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.K + c, total);
      }
      __syncthreads();  // planes may be written again
    }
  }
}

// Sums N values, a power of two, over a warp: lane j returns the sum of value j % N.
template <int STEP = 1, int N, typename A>
__device__ __forceinline__ A sum_over_warp(const A (&value)[N], int lane) {
  if constexpr (N > 1) {
    A half[N / 2];
#pragma unroll
    for (int v = 0; v < N / 2; ++v) half[v] = exchange(kAll, lane & STEP, value[2 * v], value[2 * v + 1], STEP);
    return sum_over_warp<2 * STEP>(half, lane);
  } else {
    A sum = value[0];
#pragma unroll
    for (int step = STEP; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    return sum;
  }
}

// The dots pass: DOTS, dots of samples with rows and their encoding; GRAD, the gradients of samples and depths. Both
// together only without an encoding, K = C. A block owns a query; it lists the samples that count and works out their
// encodings. Warps take samples in turn, lanes share the channels. HELD: packs of channels that a lane has of the
// query's rows in registers, and with TAIL one channel more, enough for all channels; 0: rows are read again for every
// sample. Groups are done GROUPS at a time, and the gradients of those after the first are added to what the same lane
// wrote before. GRAD also counts the samples of each cell; the count is the sample's rank there. A block lists as many
// samples at a time as it has threads: so few that the encodings of 30 octaves fit the 64 KB of every GPU.
template <typename A>
constexpr int kDotThreads = sizeof(A) == 8 ? 64 : 128;
constexpr int kMostOctaves = 30;  // that check_sample_dot lets through

template <typename A>
struct Position {
  A fx, fy;
  int32_t d, inside;  // inside: a bit a corner
};

template <typename T, typename A, int GROUPS, bool GRAD>
union DotsShared {
  struct {
    Sample<A> samples[kDotThreads<A>];
    Position<A> positions[kDotThreads<A>];
    Pack<A, GROUPS> coefficients[GRAD ? kDotThreads<A> : 1];
  } lists;
  std::conditional_t<GRAD, char, CopyTile<T>> tile;
  __device__ DotsShared() {}
};
constexpr int kDotsOtherShared = 64;  // bytes, at most, that compact_samples declares

template <typename T, typename TO, typename A, int VEC, int GROUPS, int HELD, bool TAIL, bool DOTS, bool GRAD>
__global__ void __launch_bounds__(kDotThreads<A>, GRAD&& HELD == 2 ? 3 : 4)
    dots_kernel(const T* images, const Copying<T> copying, const Pack<A, 2>* __restrict__ samples,
                const A* __restrict__ coefficients, const A* __restrict__ rows, const A* __restrict__ depths,
                TO* __restrict__ dots, Pack<A, 2>* __restrict__ grad_samples, A* __restrict__ grad_depths,
                int32_t* __restrict__ counts, int32_t* __restrict__ ranks, const Sizes sizes) {
  constexpr int kValues = GRAD ? 8 : GROUPS, kDots = GRAD ? 4 : 0, kPack = 32 * VEC, kBatch = sizeof(A) == 4 ? 2 : 1,
                kTail = HELD * kPack, kThreads = kDotThreads<A>, kWarps = kThreads / 32;
  extern __shared__ __align__(16) char dynamic_shared[];
  __shared__ DotsShared<T, A, GROUPS, GRAD> shared;
  auto& list = shared.lists.samples;
  auto& positions = shared.lists.positions;
  auto& listed_coefficients = shared.lists.coefficients;
  A* encodings = reinterpret_cast<A*>(dynamic_shared);  // [kThreads][C - K]
  const Role role = role_of_block<!GRAD>(copying, sizes);
  if constexpr (!GRAD) {
    if (role.copies) return copy_block<kThreads>(copying, role.image, role.index, sizes, shared.tile);
  }
  bool waits = !GRAD && copying.from != nullptr;
  const int64_t b = role.image, q = role.index, query = b * sizes.Q + q, first = query * sizes.D;
  const auto* image = reinterpret_cast<const char*>(images + b * sizes.H * sizes.W * sizes.C);
  const uint32_t pixel_bytes = sizes.C * sizeof(T);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, encoded = sizes.C - sizes.K;
  for (int g0 = 0; g0 < sizes.G; g0 += GROUPS) {
    const int groups = min(GROUPS, sizes.G - g0);
    const int64_t group_rows = sizes.Q * sizes.K, group_dots = sizes.Q * sizes.D;
    const A* my_rows = rows + ((b * sizes.G + g0) * sizes.Q + q) * sizes.K;
    TO* my_dots = DOTS ? dots + ((b * sizes.G + g0) * sizes.Q + q) * sizes.D : nullptr;
    const auto load_rows = [&](int c, auto& row) {  // [GROUPS][channels]
      constexpr int kVec = sizeof(row[0]) / sizeof(A);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) load_pack<A, kVec>(my_rows + min(g, groups - 1) * group_rows + c, row[g]);
    };
    A held[greatest(HELD, 1)][GROUPS][VEC], held_tail[GROUPS][1];
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      if (n * kPack + lane * VEC < sizes.K) load_rows(n * kPack + lane * VEC, held[n]);
    }
    if (TAIL && kTail + lane < sizes.K) load_rows(kTail + lane, held_tail);
    for (int d0 = 0; d0 < sizes.D; d0 += kThreads) {
      const int mine = d0 + threadIdx.x;
      Pack<A, GROUPS> my_coefficients = {};
      if (GRAD) my_coefficients = load_coefficients<GROUPS>(coefficients, b, q, g0, mine, sizes);
      const A my_depth = encoded > 0 && mine < sizes.D ? depths[first + mine] : A(0);
      const int count = compact_samples<kThreads>(
          samples + first, d0, sizes,
          [&](int place, int d, A x, A y, const Bilinear<A>& at) {
            list[place] = Sample<A>(at);
            Position<A> position{at.fx, at.fy, d, 0};
#pragma unroll
            for (int k = 0; k < 4; ++k) position.inside |= at.is_inside[k] << k;
            positions[place] = position;
            if (GRAD) listed_coefficients[place] = my_coefficients;
            if (GRAD && g0 == 0) ranks[first + d] = atomicAdd(counts + b * sizes.cells + cell_of(x, y, sizes), 1);
            for (int octave = 0; 2 * octave < encoded; ++octave) {
              A* to = encodings + place * encoded + 2 * octave;
              sincospi(scalbn(my_depth, octave + 1), to, to + 1);
            }
          },
          [&](int d) {
            for (int g = 0; DOTS && g < groups; ++g) my_dots[g * group_dots + d] = from_accumulate<TO>(A(0));
            if (GRAD && g0 == 0) {
              ranks[first + d] = -1;
              grad_samples[first + d] = {0, 0};
              if (!DOTS) grad_depths[first + d] = 0;
            }
          });
      if (waits) await_image(copying, b);
      waits = false;
      // Several samples at once keep more loads in flight; past the last one, that one again.
#pragma unroll 1
      for (int i0 = warp * kBatch; i0 < count; i0 += kWarps * kBatch) {
        A value[kBatch * kValues] = {};  // GRAD: of the corners with h; then dots, or the derivative
        A corner[kBatch][greatest(HELD, 1)][4][VEC], corner_tail[kBatch][4][1];
        const int tail = kTail + lane;
        if constexpr (HELD > 0) {
#pragma unroll
          for (int s = 0; s < kBatch; ++s) {
            const Sample<A>& sample = list[min(i0 + s, count - 1)];
#pragma unroll
            for (int n = 0; n < HELD; ++n) {
              const int c = n * kPack + lane * VEC;
              if (c < sizes.C) load_corners<T, VEC>(image + c * sizeof(T), sample, pixel_bytes, corner[s][n]);
            }
            if (TAIL && tail < sizes.C) {
              load_corners<T, 1>(image + tail * sizeof(T), sample, pixel_bytes, corner_tail[s]);
            }
          }
        }
#pragma unroll
        for (int s = 0; s < kBatch; ++s) {
          const int i = min(i0 + s, count - 1);
          const Sample<A>& sample = list[i];
          A* values = value + s * kValues;
          Pack<A, GROUPS> coefficient = {};
          A of_encoding = 0, all = 0;
          if constexpr (GRAD) {
            coefficient = listed_coefficients[i];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) all += coefficient.at[g];
          }
          const auto add = [&](int c, const auto& corners, const auto& row) {
            constexpr int kVec = sizeof(row[0]) / sizeof(A);
            A sampled[kVec], h[kVec] = {};
            interpolate(corners, sample, sampled);
            if (c < sizes.K) {
#pragma unroll
              for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
                for (int v = 0; v < kVec; ++v) {
                  if (DOTS) values[kDots + g] += sampled[v] * row[g][v];
                  if (GRAD) h[v] += coefficient.at[g] * row[g][v];
                }
              }
            } else if constexpr (!(DOTS && GRAD)) {
              const A* encoding = encodings + i * encoded;
#pragma unroll
              for (int v = 0; v < kVec; ++v) {
                const int j = c + v - sizes.K;
                if (DOTS) of_encoding += sampled[v] * encoding[j];
                if constexpr (GRAD) {
                  const A rate = all * scalbn(A(6.283185307179586476925286766559), j / 2);
                  h[v] = all * encoding[j], values[4] += sampled[v] * (j % 2 ? -rate : rate) * encoding[j ^ 1];
                }
              }
            }
            if constexpr (GRAD) {
#pragma unroll
              for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int v = 0; v < kVec; ++v) values[k] += corners[k][v] * h[v];
              }
            }
          };
          if constexpr (HELD > 0) {
#pragma unroll
            for (int n = 0; n < HELD; ++n) {
              const int c = n * kPack + lane * VEC;
              if (c < sizes.C) add(c, corner[s][n], held[n]);
            }
            if (TAIL && tail < sizes.C) add(tail, corner_tail[s], held_tail);
          } else {
            for (int c = lane * VEC; c < sizes.C; c += kPack) {
              A row[GROUPS][VEC];
              load_corners<T, VEC>(image + c * sizeof(T), sample, pixel_bytes, corner[s][0]);
              if (c < sizes.K) load_rows(c, row);
              add(c, corner[s][0], row);
            }
          }
#pragma unroll
          for (int g = 0; DOTS && !GRAD && g < GROUPS; ++g) values[g] += of_encoding;
        }
        // Lane s * kValues + j has sum j of sample s.
        const A sum = sum_over_warp(value, lane);
        const int of_sample = lane / kValues, j = lane % kValues, g = j - kDots;
        const bool works = of_sample < kBatch && i0 + of_sample < count;
        const Position<A> position = positions[works ? i0 + of_sample : i0];
        if (DOTS && works && g >= 0 && g < groups) my_dots[g * group_dots + position.d] = from_accumulate<TO>(sum);
        if constexpr (GRAD) {
          const A wx = j & 1 ? position.fx : 1 - position.fx, wy = j & 2 ? position.fy : 1 - position.fy;
          const A of_corner = j < 4 && position.inside >> j & 1 ? sum : A(0);
          A grad_x = (j & 1 ? of_corner : -of_corner) * wy, grad_y = (j & 2 ? of_corner : -of_corner) * wx;
#pragma unroll
          for (int step = 1; step < 4; step *= 2) {
            grad_x += __shfl_xor_sync(kAll, grad_x, step);
            grad_y += __shfl_xor_sync(kAll, grad_y, step);
          }
          if (works && j == 0) {
            Pack<A, 2> grad = {A(sizes.W) / 2 * grad_x, A(sizes.H) / 2 * grad_y};
            if (g0 > 0) {
              const Pack<A, 2> before = grad_samples[first + position.d];
              grad.at[0] += before.at[0], grad.at[1] += before.at[1];
            }
            grad_samples[first + position.d] = grad;
          }
          if (!DOTS && works && j == 4) {
            grad_depths[first + position.d] = (g0 > 0 ? grad_depths[first + position.d] : A(0)) + sum;
          }
        }
      }
      __syncthreads();  // the lists have been read
    }
  }
}

// The scatter pass, as a gather: samples are binned by cell (dots_kernel counts, scan_kernel, record_kernel), and a
// warp owns some channels of a tile of pixels and adds the samples of the cells in and around it. No floating-point
// atomics, no zero-fill; grad_images is written once, in its own type and layout. Only the ranks within a cell differ
// between runs: order_kernel sorts them.

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query * D + d
  int32_t column;  // of the cell
  A fx, fy;
};

constexpr int kSampleThreads = 256;

// starts: of each cell, the records of its image's earlier cells. A block does a piece of an image, and first adds up
// what is before it: the pieces are few.
constexpr int kScanThreads = 1024;
constexpr int kMostPieces = 16;

__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const int32_t* __restrict__ counts, int32_t* __restrict__ starts, int64_t cells, int64_t piece) {
  counts += blockIdx.y * cells, starts += blockIdx.y * cells;
  const int64_t begin = blockIdx.x * piece, end = min(begin + piece, cells);
  int32_t before = 0, carry;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < begin; i += kScanThreads) before += counts[i];
  sum_before<kScanThreads>(before, carry);
  place_counts<kScanThreads>(counts, starts, begin, end, carry);
}

template <typename A>
__global__ void __launch_bounds__(kSampleThreads)
    record_kernel(const Pack<A, 2>* __restrict__ samples, const int32_t* __restrict__ starts,
                  const int32_t* __restrict__ ranks, Record<A>* __restrict__ records, const Sizes sizes) {
  const int64_t in_image = sizes.Q * sizes.D, i = static_cast<int64_t>(blockIdx.x) * kSampleThreads + threadIdx.x;
  if (i >= sizes.B * in_image || ranks[i] < 0) return;
  A x, y;
  Bilinear<A> at;
  locate_sample(samples[i], sizes, x, y, at);
  const int64_t b = i / in_image;
  const int32_t place = starts[b * sizes.cells + cell_of(x, y, sizes)] + ranks[i];
  records[b * in_image + place] = {static_cast<int32_t>(i - b * in_image), static_cast<int32_t>(floor(x)) + 1, at.fx,
                                   at.fy};
}

constexpr int kOrderThreads = 128;
constexpr int kOrderWarps = kOrderThreads / 32;

template <typename A>
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(const int32_t* __restrict__ starts, Record<A>* __restrict__ records,  // records: scratch afterwards
                 Record<A>* __restrict__ ordered, const Sizes sizes) {
  __shared__ OrderBitmap bitmaps[kOrderWarps];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kOrderWarps, cells = sizes.B * sizes.cells;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kOrderWarps + threadIdx.x / 32; i < cells; i += warps) {
    const int64_t b = i / sizes.cells;
    if (i - b * sizes.cells == sizes.cells - 1) continue;  // the end of the last cell
    const int64_t offset = b * sizes.Q * sizes.D + starts[i];
    order_records(records + offset, ordered + offset, starts[i + 1] - starts[i], bitmaps[threadIdx.x / 32]);
  }
}

// A tile of kTileHeight x kTileWidth pixels has the samples of one row and one column of cells more. A warp owns 32
// channels of a tile, a lane a channel, and keeps their sums in shared memory, where no other lane touches them; its
// lanes first prepare 32 records at a time. A block's warps have tiles far apart. A tile with kSharedTile records or
// more is shared by the warps of its block, each adding to a tile of its own; the tiles are summed in order.
constexpr int kTileHeight = 4, kTileWidth = 8, kTilePixels = kTileHeight * kTileWidth;
constexpr int kTileRow = 33;      // numbers of a pixel in shared memory: a column of them lies in different banks
constexpr int kSharedTile = 256;  // records

template <typename A, int GROUPS>
struct alignas(4 * sizeof(A)) Prepared {
  A weight[4];
  uint16_t at[4];  // where the pixels of its corners begin in the tile; past it for those outside
  uint32_t query;
  A depth;
  Pack<A, GROUPS> coefficient;
};

// [B, G, N] to [B, G / GROUPS, N, GROUPS], the last groups filled up with zeros.
template <typename A, int GROUPS>
struct Interleaved {
  const A* from;
  Pack<A, GROUPS>* to;
  int64_t N;
};

constexpr int kInterleaveThreads = 256;

// Of the blocks of a plane the first `blocks_of_one` do one of them, the others the other.
template <typename A, int GROUPS>
__global__ void __launch_bounds__(kInterleaveThreads)
    interleave_kernel(Interleaved<A, GROUPS> one, const Interleaved<A, GROUPS> other, int64_t blocks_of_one,
                      int64_t blocks_of_both, int groups) {
  const int64_t plane = blockIdx.x / blocks_of_both, parts = (groups + GROUPS - 1) / GROUPS, b = plane / parts;
  const int64_t g0 = (plane - b * parts) * GROUPS;
  int64_t block = blockIdx.x - plane * blocks_of_both;
  if (block >= blocks_of_one) one = other, block -= blocks_of_one;
  const int64_t n = block * kInterleaveThreads + threadIdx.x;
  if (n >= one.N) return;
  Pack<A, GROUPS> out;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    out.at[g] = g0 + g < groups ? one.from[(b * groups + g0 + g) * one.N + n] : A(0);
  }
  one.to[plane * one.N + n] = out;
}

template <typename A>
constexpr int kTileWarps = 16 / static_cast<int>(sizeof(A));

struct Tiles {
  int32_t across, down, chunks;  // chunks of 32 channels
  int64_t units;                 // B * down * across * chunks
};

template <typename T, typename A, int GROUPS, bool CHANNELS_LAST>
__global__ void __launch_bounds__(32 * kTileWarps<A>, 6)
    tile_kernel(const Pack<A, GROUPS>* __restrict__ coefficients, const Pack<A, GROUPS>* __restrict__ rows,
                const A* __restrict__ depths, const int32_t* __restrict__ starts, const Record<A>* __restrict__ records,
                T* __restrict__ grad_images, const Sizes sizes, const Tiles tiles) {
  constexpr int kWarps = kTileWarps<A>, kCellRows = kTileHeight + 1, kAtOnce = 4;
  __shared__ A sums[kWarps][kTilePixels * kTileRow];
  __shared__ Prepared<A, GROUPS> prepared[kWarps][32];
  __shared__ int64_t shared_units[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t in_image = sizes.Q * sizes.D;

  struct Unit {
    int64_t b;
    int32_t x0, y0, c0;
  };
  const auto unit_of = [&](int64_t unit) {
    const int64_t tile = unit / tiles.chunks, row = tile / tiles.across, b = row / tiles.down;
    return Unit{b, static_cast<int32_t>(tile - row * tiles.across) * kTileWidth,
                static_cast<int32_t>(row - b * tiles.down) * kTileHeight,
                static_cast<int32_t>(unit - tile * tiles.chunks) * 32};
  };
  // The records of a unit are a run in each row of cells. Lane r has the r-th run: where it would begin if it were
  // placed behind the earlier ones, and where it then ends; returns how many records there are.
  struct Runs {
    int32_t shift, end;
  };
  const auto runs_of = [&](const Unit& unit) {
    int32_t begin = 0, count = 0;
    if (lane < kCellRows && unit.y0 + lane <= sizes.H) {
      const int32_t* row = starts + unit.b * sizes.cells + static_cast<int64_t>(unit.y0 + lane) * (sizes.W + 1);
      begin = row[unit.x0], count = row[min(unit.x0 + kTileWidth, sizes.W) + 1] - begin;
    }
    int32_t end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, end, step);
      if (lane >= step) end += other;
    }
    return Runs{begin - (end - count), end};
  };
  A* my_sums = sums[warp];
  // Adds the batches `part`, `part + parts`, ... of 32 records to the warp's sums.
  const auto add_records = [&](const Unit& unit, const Runs& runs, int part, int parts) {
    for (int i = lane; i < kTilePixels * kTileRow; i += 32) my_sums[i] = 0;
    const int32_t count = __shfl_sync(kAll, runs.end, 31);
    const int c = unit.c0 + lane;
    const Record<A>* my_records = records + unit.b * in_image;
    const int parts_of_groups = (sizes.G + GROUPS - 1) / GROUPS;
    for (int g0 = 0; g0 < parts_of_groups; ++g0) {
      const int64_t first_row = (unit.b * parts_of_groups + g0) * sizes.Q;
      const auto* my_rows = rows + first_row * sizes.K + c;
      const auto* my_coefficients = coefficients + first_row * sizes.D;
      for (int32_t i0 = part * 32; i0 < count; i0 += parts * 32) {
        const int32_t i = i0 + lane;
        int r = 0;
        int32_t shift = __shfl_sync(kAll, runs.shift, 0);
#pragma unroll
        for (int other = 1; other < kCellRows; ++other) {
          const int32_t end = __shfl_sync(kAll, runs.end, other - 1), next = __shfl_sync(kAll, runs.shift, other);
          if (i >= end) r = other, shift = next;
        }
        Prepared<A, GROUPS> mine = {};
#pragma unroll
        for (int k = 0; k < 4; ++k) mine.at[k] = kTilePixels * kTileRow;
        if (i < count) {
          const Record<A> record = my_records[shift + i];
          mine.query = record.sample / sizes.D;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int x = record.column - 1 - unit.x0 + k % 2, y = r - 1 + k / 2;
            if (x >= 0 && x < kTileWidth && y >= 0 && y < kTileHeight) mine.at[k] = (y * kTileWidth + x) * kTileRow;
            mine.weight[k] = (k % 2 ? record.fx : 1 - record.fx) * (k / 2 ? record.fy : 1 - record.fy);
          }
          mine.coefficient = my_coefficients[record.sample];
          if (unit.c0 + 32 > sizes.K) mine.depth = depths == nullptr ? A(0) : depths[unit.b * in_image + record.sample];
        }
        prepared[warp][lane] = mine;
        __syncwarp();
        const int here = min(32, count - i0);
#pragma unroll 1
        for (int j0 = 0; j0 < here; j0 += kAtOnce) {
          A h[kAtOnce] = {};
          if (c < sizes.K) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              const Prepared<A, GROUPS>& record = prepared[warp][j0 + j];
              const Pack<A, GROUPS> row = my_rows[static_cast<uint64_t>(record.query) * static_cast<uint32_t>(sizes.K)];
              const Pack<A, GROUPS> coefficient = record.coefficient;
#pragma unroll
              for (int g = 0; g < GROUPS; ++g) h[j] += coefficient.at[g] * row.at[g];
            }
          } else if (c < sizes.C) {
#pragma unroll 1
            for (int j = 0; j < kAtOnce; ++j) {
              const Prepared<A, GROUPS>& record = prepared[warp][j0 + j];
              A all = 0;
#pragma unroll
              for (int g = 0; g < GROUPS; ++g) all += record.coefficient.at[g];
              const A product = all * encode(record.depth, c - sizes.K);
#pragma unroll
              for (int other = 0; other < kAtOnce; ++other) h[other] = other == j ? product : h[other];
            }
          }
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const Prepared<A, GROUPS> record = prepared[warp][j0 + j];
            A sum[4];  // all read before one is written: else each would wait for the one before it
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (record.at[k] < kTilePixels * kTileRow) sum[k] = my_sums[record.at[k] + lane];
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (record.at[k] < kTilePixels * kTileRow)
                my_sums[record.at[k] + lane] = sum[k] + record.weight[k] * h[j];
            }
          }
        }
        __syncwarp();  // the records have been read
      }
    }
  };
  // Writes part `part` of `parts` of a unit, value(i) being the sum at place i.
  const auto write = [&](const Unit& unit, int part, int parts, const auto& value) {
    const int rows_here = min(kTileHeight, sizes.H - unit.y0);
    if constexpr (CHANNELS_LAST) {
      T* to = grad_images + ((unit.b * sizes.H + unit.y0) * sizes.W + unit.x0) * sizes.C + unit.c0 + lane;
      if (unit.c0 + lane >= sizes.C) return;
      for (int y = 0; y < rows_here; ++y, to += static_cast<int64_t>(sizes.W) * sizes.C) {
#pragma unroll 4
        for (int x = part; x < kTileWidth; x += parts) {
          if (unit.x0 + x < sizes.W)
            to[x * sizes.C] = from_accumulate<T>(value((y * kTileWidth + x) * kTileRow + lane));
        }
      }
    } else {
      // Lanes take the pixels of a row in some channels, as far apart as keeps them in different banks.
      constexpr int kStep = kTileWidth;
      const int x = lane % kTileWidth, channel = lane / kTileWidth * kStep;
      const int64_t plane = static_cast<int64_t>(sizes.H) * sizes.W;
      T* to = grad_images + (unit.b * sizes.C + unit.c0 + channel) * plane + static_cast<int64_t>(unit.y0) * sizes.W +
              unit.x0 + x;
      if (unit.x0 + x >= sizes.W) return;
      for (int y = 0; y < rows_here; ++y, to += sizes.W) {
#pragma unroll 4
        for (int c = part; c < kStep; c += parts) {
          if (unit.c0 + channel + c < sizes.C) {
            to[c * plane] = from_accumulate<T>(value((y * kTileWidth + x) * kTileRow + channel + c));
          }
        }
      }
    }
  };

  const int64_t index = static_cast<int64_t>(warp) * gridDim.x + blockIdx.x;
  const bool is_mine = index < tiles.units;
  bool is_long = false;
  if (is_mine) {
    const Unit unit = unit_of(index);
    const Runs runs = runs_of(unit);
    is_long = __shfl_sync(kAll, runs.end, 31) >= kSharedTile;
    if (!is_long) {
      add_records(unit, runs, 0, 1);
      __syncwarp();
      write(unit, 0, 1, [&](int i) { return my_sums[i]; });
    }
  }
  if (lane == 0) shared_units[warp] = is_long ? index : -1;
  if (!__syncthreads_or(is_long)) return;
  for (int w = 0; w < kWarps; ++w) {
    if (shared_units[w] < 0) continue;
    const Unit unit = unit_of(shared_units[w]);
    add_records(unit, runs_of(unit), warp, kWarps);
    __syncthreads();
    write(unit, warp, kWarps, [&](int i) {
      A sum = 0;
      for (int other = 0; other < kWarps; ++other) sum += sums[other][i];
      return sum;
    });
    __syncthreads();  // the sums have been read
  }
}

void check_sizes(const char* op, const SampleProblem& problem) {
  VISDET_CHECK(op, 1.0 * problem.Q * problem.D <= INT32_MAX - 1024 && problem.D <= INT32_MAX - 1024,
               "Q * D must be under 2^31 - 1024 on CUDA, got ", problem.Q, " * ", problem.D);
  VISDET_CHECK(op, problem.B <= 65535, "images must be at most 65535 on CUDA, got ", problem.B);
  VISDET_CHECK(op, problem.C < (1 << 20), "images must have fewer than 2^20 channels on CUDA, got ", problem.C);
  VISDET_CHECK(op, 1.0 * problem.H * problem.W < INT32_MAX - problem.H - problem.W - 2.0,
               "images must have fewer than 2^31 pixels on CUDA, got ", problem.H, " x ", problem.W);
  VISDET_CHECK(op, problem.G < (1 << 30), "there must be fewer than 2^30 groups on CUDA, got ", problem.G);
}

Sizes sizes_of(const SampleProblem& problem) {
  const auto number = [](int64_t x) { return static_cast<int32_t>(x); };
  return {problem.B,         problem.Q,         number(problem.C),
          number(problem.H), number(problem.W), number(problem.D),
          number(problem.G), number(problem.K), (problem.H + 1) * (problem.W + 1) + 1};
}

template <typename A>
const A* data_of(const Tensor& tensor) {
  return static_cast<const A*>(tensor.const_data_ptr());
}

int64_t copying_blocks(const SampleProblem& problem) { return ceil_div(problem.H * problem.W, kCopyPixels); }

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
    copying.from = data_of<T>(given), copying.to = static_cast<T*>(copy.mutable_data_ptr());
    copying.blocks = static_cast<uint32_t>(blocks);
    copying.in_packs =
        problem.C % kCopyPack<T> == 0 && pixels % kCopyPack<T> == 0 && aligned(given, sizeof(Pack<T, kCopyPack<T>>));
    data = copying.to;
    if (at_once) {
      launch({op, "copy_kernel", scope, problem.B * blocks, kCopyThreads}, copy_kernel<T>, copying, sizes);
      copying = {};
    } else {
      done = new_empty(images, {problem.B}, ScalarType::Int);
      copying.done = static_cast<int32_t*>(done.mutable_data_ptr());
      fill_bytes(op, scope, copying.done, 0, problem.B * static_cast<int64_t>(sizeof(int32_t)));
    }
  }
};

// The three passes over the images of one call.
template <typename T, typename A>
struct Passes {
  using Value = T;
  using Sum = A;

  const char* op;
  const DeviceScope& scope;
  Sizes sizes;
  const Images<T>& images;
  const Tensor& samples;
  Tensor counts, ranks;  // of the samples of each cell, and of each sample in its cell; dots fills them for scatter

  const Pack<A, 2>* sample_data() const { return data_of<Pack<A, 2>>(samples); }
  int64_t queries() const { return sizes.B * sizes.Q; }
  int64_t blocks() const { return queries() + sizes.B * images.copying.blocks; }

  // Calls f(VEC) with 4 channels a load where types, sizes and addresses allow it, else 1.
  template <typename F>
  void with_vec(std::initializer_list<const void*> others, const F& f) const {
    if constexpr (sizeof(A) == 4) {
      constexpr int kVec = 4;
      bool fits = sizes.C % kVec == 0 && sizes.K % kVec == 0 &&
                  reinterpret_cast<uintptr_t>(images.data) % (kVec * sizeof(T)) == 0;
      for (const void* other : others) fits = fits && reinterpret_cast<uintptr_t>(other) % 16 == 0;
      if (fits) return f(std::integral_constant<int, kVec>{});
    }
    f(std::integral_constant<int, 1>{});
  }

  // Calls f(GROUPS) with the groups that kernels do at once.
  template <typename F>
  void with_groups(const F& f) const {
    if (sizes.G == 1) {
      f(std::integral_constant<int, 1>{});
    } else {
      f(std::integral_constant<int, 4>{});
    }
  }

  template <typename TO>
  void sum(const A* coefficients, TO* sums) const {
    if (queries() == 0 || sizes.G == 0 || sizes.K == 0) return;
    with_vec({sums}, [&](auto vec) {
      with_groups([&](auto groups) {
        launch({op, "sum_kernel", scope, blocks(), kSumThreads},
               sum_kernel<T, TO, A, decltype(vec)::value, decltype(groups)::value>, images.data, images.copying,
               sample_data(), coefficients, sums, sizes);
      });
    });
  }

  // With the gradients of samples it counts the samples of each cell for `scatter`.
  template <bool DOTS, bool GRAD, typename TO>
  void dots(const A* coefficients, const A* rows, const A* depths, TO* to, A* grad_samples, A* grad_depths) {
    if (queries() == 0 || sizes.D == 0 || sizes.G == 0) return;  // with no group, gradients are zero already
    if (GRAD) {
      counts = new_zeros(samples, {sizes.B * sizes.cells}, ScalarType::Int);
      ranks = new_empty(samples, {queries() * sizes.D}, ScalarType::Int);
    }
    with_vec({rows}, [&](auto vec) {
      with_groups([&](auto groups) {
        constexpr int kVec = decltype(vec)::value, kGroups = decltype(groups)::value;
        constexpr int64_t kOctave = 2 * sizeof(A) * kDotThreads<A>;  // bytes of encodings
        constexpr int64_t kStatic = sizeof(DotsShared<T, A, kGroups, GRAD>) + kDotsOtherShared;
        static_assert(kStatic + kMostOctaves * kOctave <= 64 << 10, "every GPU must have so much shared memory");
        const auto run = [&](auto kernel) {
          launch({op, "dots_kernel", scope, blocks(), kDotThreads<A>, (sizes.C - sizes.K) / 2 * kOctave, kStatic},
                 kernel, images.data, images.copying, sample_data(), coefficients, rows, depths, to,
                 reinterpret_cast<Pack<A, 2>*>(grad_samples), grad_depths,
                 GRAD ? static_cast<int32_t*>(counts.mutable_data_ptr()) : nullptr,
                 GRAD ? static_cast<int32_t*>(ranks.mutable_data_ptr()) : nullptr, sizes);
        };
        if constexpr (sizeof(A) == 4) {
          if (sizes.C <= 32 * kVec) return run(dots_kernel<T, TO, A, kVec, kGroups, 1, false, DOTS, GRAD>);
          if (sizes.C <= 32 * (kVec + 1)) return run(dots_kernel<T, TO, A, kVec, kGroups, 1, true, DOTS, GRAD>);
          if (sizes.C <= 64 * kVec) return run(dots_kernel<T, TO, A, kVec, kGroups, 2, false, DOTS, GRAD>);
        }
        run(dots_kernel<T, TO, A, kVec, kGroups, 0, false, DOTS, GRAD>);
      });
    });
  }

  // Records of the samples that count, by cell, in the order of the samples if `deterministic`.
  Tensor records_by_cell(int32_t* starts, bool deterministic) const {
    const int64_t all = queries() * sizes.D;
    Tensor records = new_empty(samples, {all * static_cast<int64_t>(sizeof(Record<A>))}, ScalarType::Byte);
    auto* data = static_cast<Record<A>*>(records.mutable_data_ptr());
    const int64_t piece = std::max<int64_t>(kScanThreads * kScanEach, ceil_div(sizes.cells, kMostPieces));
    launch({op, "scan_kernel", scope, {ceil_div(sizes.cells, piece), sizes.B}, kScanThreads}, scan_kernel,
           data_of<int32_t>(counts), starts, sizes.cells, piece);
    launch({op, "record_kernel", scope, ceil_div(all, kSampleThreads), kSampleThreads}, record_kernel<A>, sample_data(),
           starts, data_of<int32_t>(ranks), data, sizes);
    if (!deterministic) return records;
    Tensor ordered = new_empty(samples, records.sizes(), ScalarType::Byte);
    const int64_t blocks =
        std::min(ceil_div(sizes.B * sizes.cells, kOrderWarps * 4), 64 * scope.device().multiprocessors);
    launch({op, "order_kernel", scope, blocks, kOrderThreads}, order_kernel<A>, starts, data,
           static_cast<Record<A>*>(ordered.mutable_data_ptr()), sizes);
    return ordered;
  }

  // After `dots` with the gradients of samples.
  void scatter(const A* coefficients, const A* rows, const A* depths, Tensor& grad_images, bool channels_last,
               bool deterministic) const {
    if (grad_images.numel() == 0) return;
    const int64_t in_image = sizes.Q * sizes.D;
    if (sizes.B * in_image == 0 || sizes.G == 0) {
      zero_(grad_images);
      return;
    }
    Tensor starts = new_empty(samples, {sizes.B * sizes.cells}, ScalarType::Int);
    auto* start_data = static_cast<int32_t*>(starts.mutable_data_ptr());
    const Tensor records = records_by_cell(start_data, deterministic);
    Tiles tiles{static_cast<int32_t>(ceil_div(sizes.W, kTileWidth)),
                static_cast<int32_t>(ceil_div(sizes.H, kTileHeight)), static_cast<int32_t>(ceil_div(sizes.C, 32))};
    tiles.units = sizes.B * tiles.down * tiles.across * tiles.chunks;
    with_groups([&](auto groups) {
      constexpr int kGroups = decltype(groups)::value;
      using Group = Pack<A, kGroups>;
      const int64_t planes = sizes.B * ceil_div(sizes.G, kGroups), in_rows = sizes.Q * sizes.K;
      const auto *grouped_coefficients = reinterpret_cast<const Group*>(coefficients),
                 *grouped_rows = reinterpret_cast<const Group*>(rows);
      Tensor grouped = samples;  // both, if interleaved
      if (kGroups > 1) {
        grouped = new_empty(samples, {planes * (in_image + in_rows) * kGroups});
        auto* to = static_cast<Group*>(grouped.mutable_data_ptr());
        const int64_t of_one = ceil_div(in_image, kInterleaveThreads),
                      of_both = of_one + ceil_div(in_rows, kInterleaveThreads);
        launch({op, "interleave_kernel", scope, planes * of_both, kInterleaveThreads}, interleave_kernel<A, kGroups>,
               Interleaved<A, kGroups>{coefficients, to, in_image},
               Interleaved<A, kGroups>{rows, to + planes * in_image, in_rows}, of_one, of_both, sizes.G);
        grouped_coefficients = to, grouped_rows = to + planes * in_image;
      }
      const auto kernel = channels_last ? tile_kernel<T, A, kGroups, true> : tile_kernel<T, A, kGroups, false>;
      launch({op, "tile_kernel", scope, ceil_div(tiles.units, kTileWarps<A>), 32 * kTileWarps<A>}, kernel,
             grouped_coefficients, grouped_rows, depths, start_data, data_of<Record<A>>(records),
             static_cast<T*>(grad_images.mutable_data_ptr()), sizes, tiles);
    });
  }
};

// A call of an operator. work(passes) runs the passes it needs.
template <typename Work>
struct Call {
  const char* op;
  const SampleProblem& problem;
  const DeviceScope& scope;
  const Tensor &images, &samples;
  const Work& work;

  void run(bool copies_at_once) const {
    dispatch_value_type(images.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      using T = decltype(value_tag);
      using A = decltype(accumulate_tag);
      const Sizes sizes = sizes_of(problem);
      const Images<T> in_order(op, images, problem, sizes, scope, copies_at_once);
      Passes<T, A> passes{op, scope, sizes, in_order, samples, samples, samples};
      work(passes);
    });
  }
};

template <typename Work>
const char* in_place_declines(const Call<Work>& call) {
  return call.problem.channels_last ? nullptr : "images are not channels last";
}
template <typename Work>
const char* alternating_declines(const Call<Work>& call) {
  const SampleProblem& problem = call.problem;
  return problem.Q + copying_blocks(problem) <= INT32_MAX / std::max<int64_t>(1, problem.B)
             ? nullptr
             : "queries and copies are more blocks than a launch has";
}
template <typename Work>
void copy_first(const Call<Work>& call) {
  call.run(true);
}
template <typename Work>
void alternating(const Call<Work>& call) {
  call.run(false);
}

// In forwards, one launch copies the images and reads the copies; backwards have several passes that read them.
template <typename Work>
constexpr Path<Call<Work>> kForwardPaths[] = {
    {"in_place", in_place_declines<Work>, copy_first<Work>},
    {"alternating", alternating_declines<Work>, alternating<Work>},
    {"copy_first", nullptr, copy_first<Work>},
};
template <typename Work>
constexpr Path<Call<Work>> kBackwardPaths[] = {
    {"in_place", in_place_declines<Work>, copy_first<Work>},
    {"copy_first", nullptr, copy_first<Work>},
};

// An empty tensor in the layout of images: channels last, or contiguous.
Tensor like_images(const Tensor& images, const SampleProblem& problem) {
  return problem.channels_last ? empty_like(images) : new_empty(images, images.sizes());
}

Tensor sample_sum(const Tensor& images, const Tensor& samples_in, const Tensor& weights_in) {
  constexpr const char* op = "sample_sum";
  const auto problem = check_sample_sum(op, images, samples_in, weights_in);
  check_sizes(op, problem);
  const DeviceScope scope(images);
  const Tensor samples = contiguous_pairs(samples_in), weights = dense(weights_in);
  Tensor output = new_empty(images, {problem.B, problem.G, problem.Q, problem.C});
  const auto work = [&](auto& passes) {
    using P = std::decay_t<decltype(passes)>;
    passes.sum(data_of<typename P::Sum>(weights), static_cast<typename P::Value*>(output.mutable_data_ptr()));
  };
  run_first(op, kForwardPaths<decltype(work)>, {op, problem, scope, images, samples, work});
  return output;
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool deterministic) {
  constexpr const char* op = "sample_sum_backward";
  auto problem = check_sample_sum(op, images, samples_in, weights_in);
  check_grouped(op, "grad_output", "C", grad_output_in, problem.C, samples_in, problem, false);
  check_sizes(op, problem);
  const DeviceScope scope(images);
  const Tensor grad_output = dense(grad_output_in), samples = contiguous_pairs(samples_in), weights = dense(weights_in);
  Tensor grad_images = like_images(images, problem), grad_samples = new_empty(samples, samples.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.G == 0) zero_(grad_samples);
  const auto work = [&](auto& passes) {
    using A = typename std::decay_t<decltype(passes)>::Sum;
    passes.template dots<true, true>(data_of<A>(weights), data_of<A>(grad_output), static_cast<const A*>(nullptr),
                                     static_cast<A*>(grad_weights.mutable_data_ptr()),
                                     static_cast<A*>(grad_samples.mutable_data_ptr()), static_cast<A*>(nullptr));
    passes.scatter(data_of<A>(weights), data_of<A>(grad_output), nullptr, grad_images, problem.channels_last,
                   deterministic);
  };
  run_first(op, kBackwardPaths<decltype(work)>, {op, problem, scope, images, samples, work});
  return {grad_images, grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  constexpr const char* op = "sample_dot";
  const auto problem = check_sample_dot(op, images, samples_in, queries_in, depths_in, num_octaves);
  check_sizes(op, problem);
  const DeviceScope scope(images);
  const Tensor samples = contiguous_pairs(samples_in), queries = dense(queries_in), depths = dense(depths_in);
  Tensor output = new_empty(images, {problem.B, problem.G, problem.Q, problem.D});
  const auto work = [&](auto& passes) {
    using P = std::decay_t<decltype(passes)>;
    using A = typename P::Sum;
    passes.template dots<true, false>(static_cast<const A*>(nullptr), data_of<A>(queries), data_of<A>(depths),
                                      static_cast<typename P::Value*>(output.mutable_data_ptr()),
                                      static_cast<A*>(nullptr), static_cast<A*>(nullptr));
  };
  run_first(op, kForwardPaths<decltype(work)>, {op, problem, scope, images, samples, work});
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool deterministic) {
  constexpr const char* op = "sample_dot_backward";
  auto problem = check_sample_dot(op, images, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", "D", grad_output_in, problem.D, samples_in, problem, false);
  check_sizes(op, problem);
  const DeviceScope scope(images);
  const Tensor grad_output = dense(grad_output_in), samples = contiguous_pairs(samples_in), queries = dense(queries_in),
               depths = dense(depths_in);
  Tensor grad_images = like_images(images, problem), grad_samples = new_empty(samples, samples.sizes()),
         grad_queries = new_empty(queries, queries.sizes()), grad_depths = new_empty(depths, depths.sizes());
  if (problem.G == 0) zero_(grad_samples), zero_(grad_depths);
  const auto work = [&](auto& passes) {
    using A = typename std::decay_t<decltype(passes)>::Sum;
    const A *coefficients = data_of<A>(grad_output), *rows = data_of<A>(queries), *depth_data = data_of<A>(depths);
    passes.sum(coefficients, static_cast<A*>(grad_queries.mutable_data_ptr()));
    passes.template dots<false, true>(coefficients, rows, depth_data, static_cast<A*>(nullptr),
                                      static_cast<A*>(grad_samples.mutable_data_ptr()),
                                      static_cast<A*>(grad_depths.mutable_data_ptr()));
    passes.scatter(coefficients, rows, depth_data, grad_images, problem.channels_last, deterministic);
  };
  run_first(op, kBackwardPaths<decltype(work)>, {op, problem, scope, images, samples, work});
  return {grad_images, grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet

VISDET_CUDA_OPERATORS(m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample_dot_backward));
}

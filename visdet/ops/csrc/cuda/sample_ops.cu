// sample_sum and sample_dot on CUDA. The contract, and the three passes, are in ../sample_ops.h; how the work is laid
// out, above each kernel. Images are read as [B, H, W, C]: NCHW ones are first copied into that order.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "../common/bilinear.h"
#include "../common/cuda_utils.cuh"
#include "../common/order_records.cuh"
#include "../sample_ops.h"

namespace visdet {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

struct Sizes {
  int64_t B, Q;
  int32_t C, H, W, D, G, K;
  int64_t cells;  // of an image, and one more
};

template <typename A>
__device__ __forceinline__ bool locate_sample(const Pack<A, 2>& sample, const Sizes& sizes, A& x, A& y,
                                              Bilinear<A>& at) {
  x = (sample.at[0] + 1) * (A(sizes.W) / 2) - A(0.5), y = (sample.at[1] + 1) * (A(sizes.H) / 2) - A(0.5);
  return locate(x, y, sizes.H, sizes.W, at);
}

// The square between four pixel centres that a sample falls into, border squares included.
template <typename A>
__device__ __forceinline__ int64_t cell_of(A x, A y, const Sizes& sizes) {
  return (static_cast<int64_t>(floor(y)) + 1) * (sizes.W + 1) + static_cast<int32_t>(floor(x)) + 1;
}

// Channel j of the encoding of a depth, and its derivative.
template <typename A>
__device__ __forceinline__ void encode(A depth, int j, A& value, A& derivative) {
  const A turns = scalbn(depth, j / 2 + 1);  // in half turns
  A sine, cosine;
  sincospi(turns, &sine, &cosine);
  const A rate = scalbn(A(6.283185307179586476925286766559), j / 2);
  value = j % 2 ? cosine : sine;
  derivative = j % 2 ? -rate * sine : rate * cosine;
}

template <typename A>
struct alignas(16) Sample {
  uint32_t row[4];  // pixel of each corner, clamped into the image
  A weight[4];
};

// All threads of the block: the samples among [d0, d0 + kThreads) of a query that count, in order; returns how many.
template <typename A>
__device__ __forceinline__ int list_samples(const Pack<A, 2>* __restrict__ samples, int d0, const Sizes& sizes,
                                            Sample<A>* list, int32_t* which) {
  __shared__ int32_t counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = d0 + threadIdx.x;
  A x, y;
  Bilinear<A> at;
  const bool keep = d < sizes.D && locate_sample(samples[d], sizes, x, y, at);
  const unsigned ballot = __ballot_sync(kAll, keep);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  int place = __popc(ballot & ((1u << lane) - 1)), total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) place += counts[w];
    total += counts[w];
  }
  if (keep) {
    Sample<A> sample;
    at.corner_weights(sample.weight);
#pragma unroll
    for (int k = 0; k < 4; ++k) sample.row[k] = at.index[k];
    list[place] = sample;
    which[place] = d;
  }
  __syncthreads();
  return total;
}

// The sum pass. A block owns a query: its threads are split into slots of as many as there are packs of VEC channels;
// the slots take samples in turn, and a thread keeps the sums of its pack for GROUPS groups in registers. The slots'
// sums are added in order.
template <typename T, typename TO, typename A, int VEC, int GROUPS>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const T* __restrict__ images, const Pack<A, 2>* __restrict__ samples, const A* __restrict__ coefficients,
               TO* __restrict__ sums, const Sizes sizes) {
  __shared__ Sample<A> list[kThreads];
  __shared__ int32_t which[kThreads];
  __shared__ A weights[GROUPS][kThreads];
  __shared__ A planes[GROUPS * VEC][kThreads];
  const int64_t query = blockIdx.x, b = query / sizes.Q, q = query - b * sizes.Q;
  const T* image = images + b * sizes.H * sizes.W * sizes.C;
  const int packs = (sizes.K + VEC - 1) / VEC, in_slot = min(packs, kThreads), slots = kThreads / in_slot;
  const int slot = threadIdx.x / in_slot, pack_in_slot = threadIdx.x - slot * in_slot;
  for (int g0 = 0; g0 < sizes.G; g0 += GROUPS) {
    for (int p0 = 0; p0 < packs; p0 += in_slot) {
      const int pack = p0 + pack_in_slot;
      const bool works = slot < slots && pack < packs;
      const int c = works ? pack * VEC : 0;
      A sum[GROUPS][VEC] = {};
      for (int d0 = 0; d0 < sizes.D; d0 += kThreads) {
        const int count = list_samples(samples + query * sizes.D, d0, sizes, list, which);
        for (int i = threadIdx.x; i < count * GROUPS; i += kThreads) {
          const int g = i / count, s = i - g * count;
          weights[g][s] =
              g0 + g < sizes.G ? coefficients[((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.D + which[s]] : A(0);
        }
        __syncthreads();
        if (works) {
#pragma unroll 2
          for (int i = slot; i < count; i += slots) {
            const Sample<A> sample = list[i];
            A s[VEC] = {};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              A corner[VEC];
              load_pack<T, VEC>(image + static_cast<int64_t>(sample.row[k]) * sizes.C + c, corner);
#pragma unroll
              for (int v = 0; v < VEC; ++v) s[v] += corner[v] * sample.weight[k];
            }
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) sum[g][v] += s[v] * weights[g][i];
            }
          }
        }
        __syncthreads();  // the list has been read
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int v = 0; v < VEC; ++v) planes[g * VEC + v][threadIdx.x] = sum[g][v];
      }
      __syncthreads();
      if (slot == 0 && works) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          if (g0 + g >= sizes.G) break;
          for (int s = 1; s < slots; ++s) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[g][v] += planes[g * VEC + v][s * in_slot + pack_in_slot];
          }
          store_pack<TO, VEC>(sums + ((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.K + c, sum[g]);
        }
      }
      __syncthreads();  // planes may be written again
    }
  }
}

// The dots pass. A block owns a query, its warps take samples in turn, lanes share the channels. GRAD: the gradients of
// samples and depths too.
template <typename T, typename TO, typename A, int VEC, bool GRAD>
__global__ void __launch_bounds__(kThreads)
    dots_kernel(const T* __restrict__ images, const Pack<A, 2>* __restrict__ samples,
                const A* __restrict__ coefficients, const A* __restrict__ rows, const A* __restrict__ depths,
                TO* __restrict__ dots, Pack<A, 2>* __restrict__ grad_samples, A* __restrict__ grad_depths,
                const Sizes sizes) {
  constexpr int kGroups = 4;  // at once
  const int64_t query = blockIdx.x, b = query / sizes.Q, q = query - b * sizes.Q;
  const T* image = images + b * sizes.H * sizes.W * sizes.C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int d = warp; d < sizes.D; d += kWarps) {
    const int64_t index = query * sizes.D + d;
    A x, y;
    Bilinear<A> at;
    const bool counts = locate_sample(samples[index], sizes, x, y, at);
    if (!counts) {
      if (dots != nullptr) {
        for (int g = lane; g < sizes.G; g += 32) {
          dots[((b * sizes.G + g) * sizes.Q + q) * sizes.D + d] = from_accumulate<TO>(A(0));
        }
      }
      if (GRAD && lane == 0) {
        grad_samples[index] = {0, 0};
        if (grad_depths != nullptr) grad_depths[index] = 0;
      }
      continue;
    }
    A weight[4];
    at.corner_weights(weight);
    const A depth = sizes.K < sizes.C ? depths[index] : A(0);
    A corner_dots[4] = {}, of_derivative = 0, total = 0;
    for (int g0 = 0; g0 < sizes.G; g0 += kGroups) {
      A coefficient[kGroups], dot[kGroups] = {}, all = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        coefficient[g] = 0;
        if (GRAD && g0 + g < sizes.G) {
          coefficient[g] = coefficients[((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.D + d];
        }
        all += coefficient[g];
      }
      total += all;
      for (int c = lane * VEC; c < sizes.C; c += 32 * VEC) {
        A corner[4][VEC];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_pack<T, VEC>(image + static_cast<int64_t>(at.index[k]) * sizes.C + c, corner[k]);
        }
        A s[VEC], h[VEC] = {};
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          s[v] = 0;
#pragma unroll
          for (int k = 0; k < 4; ++k) s[v] += at.is_inside[k] ? corner[k][v] * weight[k] : A(0);
        }
        if (c < sizes.K) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if (g0 + g >= sizes.G) break;
            A row[VEC];
            load_pack<A, VEC>(rows + ((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.K + c, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) dot[g] += s[v] * row[v], h[v] += coefficient[g] * row[v];
          }
        } else {
#pragma unroll
          for (int v = 0; v < VEC; ++v) {
            A value, derivative;
            encode(depth, c + v - sizes.K, value, derivative);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) dot[g] += s[v] * value;
            h[v] = all * value;
            if (g0 == 0) of_derivative += s[v] * derivative;
          }
        }
        if (GRAD) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) corner_dots[k] += at.is_inside[k] ? corner[k][v] * h[v] : A(0);
          }
        }
      }
      if (dots != nullptr) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (g0 + g >= sizes.G) break;
#pragma unroll
          for (int step = 16; step > 0; step /= 2) dot[g] += __shfl_xor_sync(kAll, dot[g], step);
          if (lane == 0) dots[((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.D + d] = from_accumulate<TO>(dot[g]);
        }
      }
    }
    if (GRAD) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) corner_dots[k] += __shfl_xor_sync(kAll, corner_dots[k], step);
        of_derivative += __shfl_xor_sync(kAll, of_derivative, step);
      }
      if (lane == 0) {
        const A* e = corner_dots;
        grad_samples[index] = {A(sizes.W) / 2 * ((1 - at.fy) * (e[1] - e[0]) + at.fy * (e[3] - e[2])),
                               A(sizes.H) / 2 * ((1 - at.fx) * (e[2] - e[0]) + at.fx * (e[3] - e[1]))};
        if (grad_depths != nullptr) grad_depths[index] = total * of_derivative;
      }
    }
  }
}

// The scatter pass, as a gather: samples are binned by cell (count_kernel, scan_kernel, record_kernel), and a warp owns
// a pixel and adds the samples of the four cells around it. No floating-point atomics, no zero-fill; grad_images is
// written once, in its own type. Only the ranks within a cell differ between runs: order_kernel sorts them.

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query * D + d
  int32_t query;
  A fx, fy;
};

constexpr int kSampleThreads = 256;

template <typename A>
__global__ void __launch_bounds__(kSampleThreads)
    count_kernel(const Pack<A, 2>* __restrict__ samples, int32_t* __restrict__ counts, int32_t* __restrict__ ranks,
                 const Sizes sizes) {
  const int64_t in_image = sizes.Q * sizes.D, i = static_cast<int64_t>(blockIdx.x) * kSampleThreads + threadIdx.x;
  if (i >= sizes.B * in_image) return;
  A x, y;
  Bilinear<A> at;
  ranks[i] = locate_sample(samples[i], sizes, x, y, at)
                 ? atomicAdd(counts + i / in_image * sizes.cells + cell_of(x, y, sizes), 1)
                 : -1;
}

// counts -> starts, in place: one block an image.
constexpr int kScanThreads = 1024;
__global__ void __launch_bounds__(kScanThreads) scan_kernel(int32_t* __restrict__ counts, int64_t cells) {
  constexpr int kEach = 8;
  __shared__ int32_t warp_sums[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* mine = counts + blockIdx.x * cells;
  int32_t carry = 0;
  for (int64_t from = 0; from < cells; from += kScanThreads * kEach) {
    int32_t count[kEach], total = 0;
    const int64_t first = from + threadIdx.x * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) total += count[i] = first + i < cells ? mine[first + i] : 0;
    int32_t inclusive = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();  // the warps' sums are complete
    int32_t of_warp = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(kAll, of_warp, step);
      if (lane >= step) of_warp += other;
    }
    int32_t start = carry + __shfl_sync(kAll, of_warp, warp) - warp_sums[warp] + inclusive - total;
    carry += __shfl_sync(kAll, of_warp, 31);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < cells) mine[first + i] = start;
      start += count[i];
    }
    __syncthreads();  // warp_sums may be written again
  }
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
  const int32_t sample = static_cast<int32_t>(i - b * in_image);
  const int32_t place = starts[b * sizes.cells + cell_of(x, y, sizes)] + ranks[i];
  records[b * in_image + place] = {sample, sample / sizes.D, at.fx, at.fy};
}

template <typename A>
__global__ void __launch_bounds__(kThreads)
    order_kernel(const int32_t* __restrict__ starts, const Record<A>* __restrict__ records,
                 Record<A>* __restrict__ ordered, const Sizes sizes) {
  __shared__ OrderBitmap bitmaps[kWarps];
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps, cells = sizes.B * sizes.cells;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; i < cells; i += warps) {
    const int64_t b = i / sizes.cells;
    if (i - b * sizes.cells == sizes.cells - 1) continue;  // the end of the last cell
    const int64_t offset = b * sizes.Q * sizes.D + starts[i];
    order_records(records + offset, ordered + offset, starts[i + 1] - starts[i], bitmaps[threadIdx.x / 32]);
  }
}

constexpr int kPixels = 32;  // neighbouring pixels of a block: what it writes of one channel of NCHW is one line
constexpr int kPixelThreads = 256;

// CHANNELS_LAST: grad_images is [B, H, W, C], else [B, C, H, W]. A block takes kPixels pixels, NP * VEC * 32 channels
// at a time.
template <typename T, typename A, int VEC, int NP, bool CHANNELS_LAST>
__global__ void __launch_bounds__(kPixelThreads)
    pixel_kernel(const A* __restrict__ coefficients, const A* __restrict__ rows, const A* __restrict__ depths,
                 const int32_t* __restrict__ starts, const Record<A>* __restrict__ records, T* __restrict__ grad_images,
                 const Sizes sizes) {
  constexpr int kChannels = NP * VEC * 32;
  __shared__ A tile[CHANNELS_LAST ? 1 : kPixels][CHANNELS_LAST ? 1 : kChannels + 1];
  const int64_t pixels = static_cast<int64_t>(sizes.H) * sizes.W, blocks = (pixels + kPixels - 1) / kPixels;
  const int64_t b = blockIdx.x / blocks, first = (blockIdx.x - b * blocks) * kPixels;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t* my_starts = starts + b * sizes.cells;
  const Record<A>* my_records = records + b * sizes.Q * sizes.D;
  const int64_t row0 = b * sizes.G * sizes.Q;
  for (int c0 = 0; c0 < sizes.C; c0 += kChannels) {
    for (int t = warp; t < kPixels; t += kPixelThreads / 32) {
      const int64_t pixel = first + t;
      A sum[NP][VEC] = {};
      if (pixel < pixels) {
        const int64_t y = pixel / sizes.W, cell = y * (sizes.W + 1) + (pixel - y * sizes.W);
#pragma unroll 1
        for (int below = 0; below < 2; ++below) {
          const int32_t* run = my_starts + cell + below * (sizes.W + 1);
          const int32_t begin = run[0], middle = run[1], end = run[2];
#pragma unroll 1
          for (int32_t i = begin; i < end; ++i) {
            const Record<A> record = my_records[i];
            const A corner = (below ? 1 - record.fy : record.fy) * (i < middle ? record.fx : 1 - record.fx);
            const int32_t d = record.sample - record.query * sizes.D;
            A total = 0;
#pragma unroll 4
            for (int g = 0; g < sizes.G; ++g) {
              const int64_t row = row0 + static_cast<int64_t>(g) * sizes.Q + record.query;
              const A coefficient = corner * coefficients[row * sizes.D + d];
              total += coefficient;
#pragma unroll
              for (int n = 0; n < NP; ++n) {
                const int c = c0 + (n * 32 + lane) * VEC;
                if (c >= sizes.K) continue;
                A with[VEC];
                load_pack<A, VEC>(rows + row * sizes.K + c, with);
#pragma unroll
                for (int v = 0; v < VEC; ++v) sum[n][v] += with[v] * coefficient;
              }
            }
            if (sizes.K == sizes.C) continue;
#pragma unroll
            for (int n = 0; n < NP; ++n) {
              const int c = c0 + (n * 32 + lane) * VEC;
              if (c < sizes.K || c >= sizes.C) continue;
              const A depth = depths[b * sizes.Q * sizes.D + record.sample];
#pragma unroll
              for (int v = 0; v < VEC; ++v) {
                A value, derivative;
                encode(depth, c + v - sizes.K, value, derivative);
                sum[n][v] += total * value;
              }
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < NP; ++n) {
        const int c = c0 + (n * 32 + lane) * VEC;
        if constexpr (CHANNELS_LAST) {
          if (pixel < pixels && c < sizes.C)
            store_pack<T, VEC>(grad_images + (b * pixels + pixel) * sizes.C + c, sum[n]);
        } else {
#pragma unroll
          for (int v = 0; v < VEC; ++v) tile[t][(n * 32 + lane) * VEC + v] = sum[n][v];
        }
      }
    }
    if constexpr (!CHANNELS_LAST) {
      __syncthreads();
      for (int c = warp; c < kChannels && c0 + c < sizes.C; c += kPixelThreads / 32) {
        if (first + lane < pixels) {
          grad_images[(b * sizes.C + c0 + c) * pixels + first + lane] = from_accumulate<T>(tile[lane][c]);
        }
      }
      __syncthreads();  // the tile may be written again
    }
  }
}

// [planes, rows, columns] to [planes, columns, rows], a square of 32 at a time.
template <typename T>
__global__ void __launch_bounds__(256)
    transpose_kernel(const T* __restrict__ from, T* __restrict__ to, int rows, int64_t columns) {
  __shared__ T tile[32][33];
  const int64_t plane = static_cast<int64_t>(blockIdx.z) * rows * columns, c0 = static_cast<int64_t>(blockIdx.x) * 32;
  const int r0 = blockIdx.y * 32, x = threadIdx.x % 32, y = threadIdx.x / 32;
#pragma unroll
  for (int i = y; i < 32; i += 8) {
    if (r0 + i < rows && c0 + x < columns) tile[i][x] = from[plane + (r0 + i) * columns + c0 + x];
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < 32; i += 8) {
    if (c0 + i < columns && r0 + x < rows) to[plane + (c0 + i) * rows + r0 + x] = tile[x][i];
  }
}

unsigned blocks_of(const char* op, int64_t blocks) {
  VISDET_CHECK(op, blocks <= INT32_MAX, "the input is too large: ", blocks, " blocks");
  return static_cast<unsigned>(blocks);
}

void check_sizes(const char* op, const SampleProblem& problem) {
  VISDET_CHECK(op, 1.0 * problem.Q * problem.D <= INT32_MAX, "Q * D must be under 2^31 on CUDA, got ", problem.Q, " * ",
               problem.D);
  VISDET_CHECK(op, problem.B <= 65535, "images must be at most 65535 on CUDA, got ", problem.B);
  VISDET_CHECK(op, problem.C < (1 << 20), "images must have fewer than 2^20 channels on CUDA, got ", problem.C);
  VISDET_CHECK(op, problem.G <= INT32_MAX && 1.0 * problem.H * problem.W < INT32_MAX - problem.H - problem.W - 2.0,
               "images must have fewer than 2^31 pixels on CUDA, got ", problem.H, " x ", problem.W);
}

Sizes sizes_of(const SampleProblem& problem) {
  const auto number = [](int64_t x) { return static_cast<int32_t>(x); };
  return {problem.B,         problem.Q,         number(problem.C),
          number(problem.H), number(problem.W), number(problem.D),
          number(problem.G), number(problem.K), (problem.H + 1) * (problem.W + 1) + 1};
}

// images as [B, H, W, C] in memory: themselves, or a copy.
template <typename T>
Tensor in_channels_last(const char* op, const Tensor& images, const SampleProblem& problem, cudaStream_t stream) {
  if (problem.channels_last || images.numel() == 0) return images;
  const Tensor dense = contiguous(images);
  Tensor copy = new_empty(images, {problem.B, problem.H, problem.W, problem.C});
  const int64_t pixels = problem.H * problem.W;
  const dim3 grid(blocks_of(op, ceil_div(pixels, 32)), static_cast<unsigned>(ceil_div(problem.C, 32)),
                  static_cast<unsigned>(problem.B));
  transpose_kernel<T><<<grid, 256, 0, stream>>>(static_cast<const T*>(dense.const_data_ptr()),
                                                static_cast<T*>(copy.mutable_data_ptr()), static_cast<int>(problem.C),
                                                pixels);
  return copy;
}

template <typename A>
const A* data_of(const Tensor& tensor) {
  return static_cast<const A*>(tensor.const_data_ptr());
}

// What all passes of a call share.
template <typename T, typename A>
struct Call {
  const char* op;
  Sizes sizes;
  const Tensor& images;  // [B, H, W, C] in memory
  const Tensor& samples;
  cudaStream_t stream;

  const T* image_data() const { return data_of<T>(images); }
  const Pack<A, 2>* sample_data() const { return data_of<Pack<A, 2>>(samples); }
  int64_t queries() const { return sizes.B * sizes.Q; }

  // Calls f(VEC) with 4 channels a load (2 in float64) where sizes and addresses allow it, else 1.
  template <typename F>
  void with_vec(std::initializer_list<const void*> others, const F& f) const {
    constexpr int kVec = sizeof(A) == 8 ? 2 : 4;
    bool fits = sizes.C % kVec == 0 && sizes.K % kVec == 0 && aligned(images, kVec * sizeof(T));
    for (const void* other : others) fits = fits && reinterpret_cast<uintptr_t>(other) % 16 == 0;
    if (fits) {
      f(std::integral_constant<int, kVec>{});
    } else {
      f(std::integral_constant<int, 1>{});
    }
  }

  template <typename TO>
  void sum(const A* coefficients, TO* sums) const {
    if (queries() == 0 || sizes.G == 0 || sizes.K == 0) return;
    with_vec({sums}, [&](auto vec) {
      constexpr int kVec = decltype(vec)::value;
      const auto run = [&](auto groups) {
        sum_kernel<T, TO, A, kVec, decltype(groups)::value>
            <<<blocks_of(op, queries()), kThreads, 0, stream>>>(image_data(), sample_data(), coefficients, sums, sizes);
      };
      if (sizes.G == 1) {
        run(std::integral_constant<int, 1>{});
      } else {
        run(std::integral_constant<int, 4>{});
      }
    });
  }

  template <typename TO, bool GRAD>
  void dots(const A* coefficients, const A* rows, const A* depths, TO* to, A* grad_samples, A* grad_depths) const {
    if (queries() == 0 || sizes.D == 0) return;
    with_vec({rows}, [&](auto vec) {
      dots_kernel<T, TO, A, decltype(vec)::value, GRAD><<<blocks_of(op, queries()), kThreads, 0, stream>>>(
          image_data(), sample_data(), coefficients, rows, depths, to, reinterpret_cast<Pack<A, 2>*>(grad_samples),
          grad_depths, sizes);
    });
  }

  void scatter(const A* coefficients, const A* rows, const A* depths, Tensor& grad_images, bool channels_last,
               bool deterministic) const {
    if (grad_images.numel() == 0) return;
    const int64_t in_image = sizes.Q * sizes.D, all = sizes.B * in_image;
    if (all == 0 || sizes.G == 0) {
      zero_(grad_images);
      return;
    }
    Tensor starts = new_zeros(samples, {sizes.B * sizes.cells}, ScalarType::Int);
    Tensor ranks = new_empty(samples, {all}, ScalarType::Int);
    Tensor records = new_empty(samples, {all * static_cast<int64_t>(sizeof(Record<A>))}, ScalarType::Byte);
    auto* start_data = static_cast<int32_t*>(starts.mutable_data_ptr());
    auto* rank_data = static_cast<int32_t*>(ranks.mutable_data_ptr());
    const unsigned blocks = blocks_of(op, ceil_div(all, kSampleThreads));
    count_kernel<A><<<blocks, kSampleThreads, 0, stream>>>(sample_data(), start_data, rank_data, sizes);
    scan_kernel<<<blocks_of(op, sizes.B), kScanThreads, 0, stream>>>(start_data, sizes.cells);
    record_kernel<A><<<blocks, kSampleThreads, 0, stream>>>(sample_data(), start_data, rank_data,
                                                            static_cast<Record<A>*>(records.mutable_data_ptr()), sizes);
    if (deterministic) {
      Tensor ordered = new_empty(samples, records.sizes(), ScalarType::Byte);
      const int64_t most = int64_t{64} * multiprocessors(samples.get_device_index());
      order_kernel<A>
          <<<blocks_of(op, std::min(ceil_div(sizes.B * sizes.cells, kWarps * 4), most)), kThreads, 0, stream>>>(
              start_data, data_of<Record<A>>(records), static_cast<Record<A>*>(ordered.mutable_data_ptr()), sizes);
      records = ordered;
    }
    const int64_t pixels = static_cast<int64_t>(sizes.H) * sizes.W;
    with_vec({rows, grad_images.const_data_ptr()}, [&](auto vec) {
      constexpr int kVec = decltype(vec)::value, kPacks = kVec > 1 ? 2 : 4;
      const auto run = [&](auto last) {
        pixel_kernel<T, A, kVec, kPacks, decltype(last)::value>
            <<<blocks_of(op, sizes.B * ceil_div(pixels, kPixels)), kPixelThreads, 0, stream>>>(
                coefficients, rows, depths, start_data, data_of<Record<A>>(records),
                static_cast<T*>(grad_images.mutable_data_ptr()), sizes);
      };
      if (channels_last) {
        run(std::true_type{});
      } else {
        run(std::false_type{});
      }
    });
  }
};

// An empty tensor in the layout of images: channels last, or contiguous.
Tensor like_images(const Tensor& images, const SampleProblem& problem) {
  return problem.channels_last ? empty_like(images) : new_empty(images, images.sizes());
}

Tensor sample_sum(const Tensor& images_in, const Tensor& samples_in, const Tensor& weights_in) {
  constexpr const char* op = "sample_sum";
  const auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_sizes(op, problem);
  const torch::stable::accelerator::DeviceGuard guard(images_in.get_device_index());
  const cudaStream_t stream = current_stream(images_in);
  const Tensor samples = contiguous_pairs(samples_in), weights = contiguous(weights_in);
  Tensor output = new_empty(images_in, {problem.B, problem.G, problem.Q, problem.C});
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(op, images_in, problem, stream);
    const Call<T, A> call{op, sizes_of(problem), images, samples, stream};
    call.sum(data_of<A>(weights), static_cast<T*>(output.mutable_data_ptr()));
  });
  check_launch(op);
  return output;
}

std::tuple<Tensor, Tensor, Tensor> sample_sum_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                       const Tensor& samples_in, const Tensor& weights_in,
                                                       bool deterministic) {
  constexpr const char* op = "sample_sum_backward";
  auto problem = check_sample_sum(op, images_in, samples_in, weights_in);
  check_grouped(op, "grad_output", "C", grad_output_in, problem.C, samples_in, problem, false);
  check_sizes(op, problem);
  const torch::stable::accelerator::DeviceGuard guard(images_in.get_device_index());
  const cudaStream_t stream = current_stream(images_in);
  const Tensor grad_output = contiguous(grad_output_in), samples = contiguous_pairs(samples_in),
               weights = contiguous(weights_in);
  Tensor grad_images = like_images(images_in, problem), grad_samples = new_empty(samples, samples.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(op, images_in, problem, stream);
    const Call<T, A> call{op, sizes_of(problem), images, samples, stream};
    call.template dots<A, true>(data_of<A>(weights), data_of<A>(grad_output), nullptr,
                                static_cast<A*>(grad_weights.mutable_data_ptr()),
                                static_cast<A*>(grad_samples.mutable_data_ptr()), nullptr);
    call.scatter(data_of<A>(weights), data_of<A>(grad_output), nullptr, grad_images, problem.channels_last,
                 deterministic);
  });
  check_launch(op);
  return {grad_images, grad_samples, grad_weights};
}

Tensor sample_dot(const Tensor& images_in, const Tensor& samples_in, const Tensor& queries_in, const Tensor& depths_in,
                  int64_t num_octaves) {
  constexpr const char* op = "sample_dot";
  const auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_sizes(op, problem);
  const torch::stable::accelerator::DeviceGuard guard(images_in.get_device_index());
  const cudaStream_t stream = current_stream(images_in);
  const Tensor samples = contiguous_pairs(samples_in), queries = contiguous(queries_in), depths = contiguous(depths_in);
  Tensor output = new_empty(images_in, {problem.B, problem.G, problem.Q, problem.D});
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(op, images_in, problem, stream);
    const Call<T, A> call{op, sizes_of(problem), images, samples, stream};
    call.template dots<T, false>(nullptr, data_of<A>(queries), data_of<A>(depths),
                                 static_cast<T*>(output.mutable_data_ptr()), nullptr, nullptr);
  });
  check_launch(op);
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample_dot_backward(const Tensor& grad_output_in, const Tensor& images_in,
                                                               const Tensor& samples_in, const Tensor& queries_in,
                                                               const Tensor& depths_in, int64_t num_octaves,
                                                               bool deterministic) {
  constexpr const char* op = "sample_dot_backward";
  auto problem = check_sample_dot(op, images_in, samples_in, queries_in, depths_in, num_octaves);
  check_grouped(op, "grad_output", "D", grad_output_in, problem.D, samples_in, problem, false);
  check_sizes(op, problem);
  const torch::stable::accelerator::DeviceGuard guard(images_in.get_device_index());
  const cudaStream_t stream = current_stream(images_in);
  const Tensor grad_output = contiguous(grad_output_in), samples = contiguous_pairs(samples_in),
               queries = contiguous(queries_in), depths = contiguous(depths_in);
  Tensor grad_images = like_images(images_in, problem), grad_samples = new_empty(samples, samples.sizes()),
         grad_queries = new_empty(queries, queries.sizes()), grad_depths = new_empty(depths, depths.sizes());
  dispatch_value_type(images_in.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const Tensor images = in_channels_last<T>(op, images_in, problem, stream);
    const Call<T, A> call{op, sizes_of(problem), images, samples, stream};
    const A *coefficients = data_of<A>(grad_output), *rows = data_of<A>(queries), *depth_data = data_of<A>(depths);
    call.sum(coefficients, static_cast<A*>(grad_queries.mutable_data_ptr()));
    call.template dots<A, true>(coefficients, rows, depth_data, nullptr,
                                static_cast<A*>(grad_samples.mutable_data_ptr()),
                                static_cast<A*>(grad_depths.mutable_data_ptr()));
    call.scatter(coefficients, rows, depth_data, grad_images, problem.channels_last, deterministic);
  });
  check_launch(op);
  return {grad_images, grad_samples, grad_queries, grad_depths};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CUDA, m) {
  m.impl("sample_sum", TORCH_BOX(&visdet::sample_sum));
  m.impl("sample_sum_backward", TORCH_BOX(&visdet::sample_sum_backward));
  m.impl("sample_dot", TORCH_BOX(&visdet::sample_dot));
  m.impl("sample_dot_backward", TORCH_BOX(&visdet::sample_dot_backward));
}

// mahalanobis_distance and gaussian_field on CUDA. The contract is in ../gaussian_field.h.
//
// A pair costs some fifteen instructions and no memory traffic: what one side of it needs is in registers, the other
// side's is read from shared memory, a tile at a time. The forward and the gradient of points keep points in registers,
// the gradients of Gaussians keep a Gaussian and its ten sums; so each output has one owner and nothing is added
// atomically. Where the owners are too few to fill the GPU, the other side is split over blocks, whose sums a second
// kernel adds in order.
//
// With a cutoff both sides come in an order that brings neighbours together. box_kernel works out the boxes of
// Gaussians and those of kThreads neighbours; a block passes over groups outside its own box, then over what is outside
// of the groups that are left.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>

#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "common/paths.h"
#include "gaussian_field.h"

namespace visdet {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 128;

template <typename A>
struct Box {
  A low[3], high[3];
};

template <typename A>
struct Inputs {
  int64_t B, N;
  const A* points;                // [B, 3]
  const A* means;                 // [N, 3]
  const A* cholesky;              // [N, 3, 3]
  const A* weights;               // [N]
  const int64_t* point_order;     // [B], or null: as they come
  const int64_t* gaussian_order;  // [N], or null
  A cutoff;                       // tolerance / N, or 0: leave out nothing
  const Box<A>* boxes;            // [N] of Gaussians, in gaussian_order
  const Box<A>* gaussian_groups;  // of kThreads neighbours each
  const Box<A>* point_groups;
  int64_t part;  // of the split side, what a block takes
};

// The i-th of `count` points or Gaussians in an order. An order that is no permutation leads to no stray access.
__device__ __forceinline__ int64_t in_order(const int64_t* order, int64_t i, int64_t count) {
  return min(max(order[i], int64_t{0}), count - 1);
}

// exp(-distance / 2) is 2^-|v'|^2 with v' = v * kScale in float32, where 2^x is one instruction.
template <typename A>
struct Exponent;
template <>
struct Exponent<float> {
  static constexpr float kScale = 0.84932180028801907f;  // sqrt(log2(e) / 2)
  static __device__ __forceinline__ float apply(float square) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(-square));
    return result;
  }
};
template <>
struct Exponent<double> {
  static constexpr double kScale = 1.0;
  static __device__ __forceinline__ double apply(double square) { return exp(-0.5 * square); }
};

// In a field, a Gaussian thinner than this is 0 wherever floating point tells a point from its plane. Its reciprocal is
// kept within numbers whose squares are finite, so that the gradients of its zeros are zero, not zero times infinity.
template <typename A>
constexpr A kThinnest = sizeof(A) == 4 ? A(1e-18) : A(1e-150);

// A Gaussian as the inner loops want it: the factor divided by the exponent's scale, its diagonal inverted. A diagonal
// that is not positive makes everything NaN.
template <typename A>
struct alignas(16) Gaussian {
  A x, y, z, weight;
  A i00, l10, i11, l20;
  A l21, i22, reserved, reserved_too;
};

template <typename A>
__device__ __forceinline__ Gaussian<A> read_gaussian(const Inputs<A>& in, int64_t n, A scale) {
  const A *mean = in.means + 3 * n, *l = in.cholesky + 9 * n;
  const bool is_valid = l[0] > 0 && l[4] > 0 && l[8] > 0;
  const A nan = quiet_nan<A>();
  // Without weights the distance is asked for, which a thin Gaussian has, too.
  const A thinnest = in.weights ? kThinnest<A> : A(0);
  return {mean[0],
          mean[1],
          is_valid ? mean[2] : nan,
          in.weights ? in.weights[n] : A(0),
          scale / max(l[0], thinnest),
          l[3] / scale,
          scale / max(l[4], thinnest),
          l[6] / scale,
          l[7] / scale,
          scale / max(l[8], thinnest),
          A(0),
          A(0)};
}

// v = L^-1 (point - mean); returns |v|^2.
template <typename A>
__device__ __forceinline__ A whiten(const Gaussian<A>& g, A x, A y, A z, A (&v)[3]) {
  const A dx = x - g.x, dy = y - g.y, dz = z - g.z;
  v[0] = dx * g.i00;
  v[1] = (dy - g.l10 * v[0]) * g.i11;
  v[2] = (dz - g.l20 * v[0] - g.l21 * v[1]) * g.i22;
  return v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
}

// u = L^-T v.
template <typename A>
__device__ __forceinline__ void whiten_back(const Gaussian<A>& g, const A (&v)[3], A (&u)[3]) {
  u[2] = v[2] * g.i22;
  u[1] = (v[1] - g.l21 * u[2]) * g.i11;
  u[0] = (v[0] - g.l10 * u[1] - g.l20 * u[2]) * g.i00;
}

template <typename A>
__device__ __forceinline__ A infinity() {
  return static_cast<A>(__int_as_float(0x7f800000));
}
template <typename A>
__device__ __forceinline__ Box<A> nothing() {
  const A far = infinity<A>();
  return {{far, far, far}, {-far, -far, -far}};
}

// The box from `low` to `high`; everything, if one of them is NaN: NaN is never left out.
template <typename A>
__device__ __forceinline__ Box<A> box_between(const A (&low)[3], const A (&high)[3]) {
  Box<A> box;
  bool is_nan = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) is_nan |= isnan(low[d]) || isnan(high[d]);
#pragma unroll
  for (int d = 0; d < 3; ++d)
    box.low[d] = is_nan ? -infinity<A>() : low[d], box.high[d] = is_nan ? infinity<A>() : high[d];
  return box;
}

// Where Gaussian n has more to say than the cutoff.
template <typename A>
__device__ __forceinline__ Box<A> box_of_gaussian(const Inputs<A>& in, int64_t n) {
  const A *mean = in.means + 3 * n, *l = in.cholesky + 9 * n, size = abs(in.weights[n]);
  if (size <= in.cutoff) return nothing<A>();
  const bool is_valid = l[0] > 0 && l[4] > 0 && l[8] > 0;
  const A radius = is_valid ? sqrt(2 * log(size / in.cutoff)) : quiet_nan<A>();
  const A reach[3] = {radius * l[0], radius * sqrt(l[3] * l[3] + l[4] * l[4]),
                      radius * sqrt(l[6] * l[6] + l[7] * l[7] + l[8] * l[8])};
  return box_between<A>({mean[0] - reach[0], mean[1] - reach[1], mean[2] - reach[2]},
                        {mean[0] + reach[0], mean[1] + reach[1], mean[2] + reach[2]});
}

template <typename A>
__device__ __forceinline__ bool are_apart(const Box<A>& a, const Box<A>& b) {
  bool apart = false;
#pragma unroll
  for (int d = 0; d < 3; ++d) apart |= a.low[d] > b.high[d] || a.high[d] < b.low[d];
  return apart;
}

// All threads of the block: the box around theirs.
template <typename A>
__device__ __forceinline__ Box<A> box_of_block(Box<A> box) {
  __shared__ Box<A> boxes[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      box.low[d] = min(box.low[d], __shfl_xor_sync(kAll, box.low[d], step));
      box.high[d] = max(box.high[d], __shfl_xor_sync(kAll, box.high[d], step));
    }
  }
  if (lane == 0) boxes[warp] = box;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) {
    for (int d = 0; d < 3; ++d) {
      box.low[d] = min(box.low[d], boxes[w].low[d]), box.high[d] = max(box.high[d], boxes[w].high[d]);
    }
  }
  return box;
}

// All threads of the block: this thread's place in the tile if it keeps its entry, in order, and the tile's length.
__device__ __forceinline__ int place_in_tile(bool keep, int& place) {
  __shared__ int32_t counts[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned ballot = __ballot_sync(kAll, keep);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  int total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w == warp) place = total + __popc(ballot & ((1u << lane) - 1));
    total += counts[w];
  }
  return total;
}

// A block takes kThreads neighbours: the boxes of Gaussians (GAUSSIANS), and the box around them, or around points.
template <typename A, bool GAUSSIANS>
__global__ void __launch_bounds__(kThreads)
    box_kernel(const Inputs<A> in, Box<A>* __restrict__ boxes, Box<A>* __restrict__ groups) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  Box<A> box = nothing<A>();
  if (i < (GAUSSIANS ? in.N : in.B)) {
    if constexpr (GAUSSIANS) {
      boxes[i] = box = box_of_gaussian(in, in_order(in.gaussian_order, i, in.N));
    } else {
      const A* point = in.points + 3 * in_order(in.point_order, i, in.B);
      box = box_between<A>({point[0], point[1], point[2]}, {point[0], point[1], point[2]});
    }
  }
  box = box_of_block(box);
  if (threadIdx.x == 0) groups[blockIdx.x] = box;
}

// Calls f(first, end) for the tiles of kThreads entries of [begin, end) that a block must look at; begin is a multiple
// of kThreads where groups are left out.
template <typename A, bool CULL, typename F>
__device__ __forceinline__ void for_tiles(int64_t begin, int64_t end, const Box<A>& box, const Box<A>* groups,
                                          const F& f) {
  if constexpr (!CULL) {
    for (int64_t first = begin; first < end; first += kThreads) f(first, min(first + kThreads, end));
  } else {
    __shared__ int32_t kept[kThreads];
    const int64_t last = (end + kThreads - 1) / kThreads;
    for (int64_t g0 = begin / kThreads; g0 < last; g0 += kThreads) {
      const int64_t g = g0 + threadIdx.x;
      const bool keep = g < last && !are_apart(box, groups[g]);
      int place = 0;
      const int count = place_in_tile(keep, place);
      if (keep) kept[place] = threadIdx.x;
      __syncthreads();
      for (int k = 0; k < count; ++k) {
        const int64_t first = (g0 + kept[k]) * kThreads;
        f(first, min(first + kThreads, end));
      }
      __syncthreads();  // the list has been read
    }
  }
}

// A block takes kThreads * R points and a part of the Gaussians. GRAD: three sums a point, the gradient of the field
// with respect to it but for -grad_output; else one, the field.
template <typename A, int R, bool GRAD, bool CULL>
__device__ __forceinline__ void point_block(const Inputs<A>& in, int64_t owner, int64_t part,
                                            const A* __restrict__ grad_output, A* __restrict__ to, bool is_whole) {
  constexpr A kScale = Exponent<A>::kScale;
  constexpr int kSums = GRAD ? 3 : 1;
  __shared__ Gaussian<A> tile[kThreads];
  const int64_t first = owner * (kThreads * R);
  A x[R], y[R], z[R], sums[R][kSums] = {};
  int64_t at[R];
  Box<A> box = nothing<A>();
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int64_t i = first + r * kThreads + threadIdx.x;
    at[r] = i < in.B ? (CULL ? in_order(in.point_order, i, in.B) : i) : -1;
    x[r] = y[r] = z[r] = 0;
    if (at[r] < 0) continue;
    const A* point = in.points + 3 * at[r];
    x[r] = point[0], y[r] = point[1], z[r] = point[2];
    if (CULL) {
      const Box<A> there = box_between<A>({x[r], y[r], z[r]}, {x[r], y[r], z[r]});
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        box.low[d] = min(box.low[d], there.low[d]), box.high[d] = max(box.high[d], there.high[d]);
      }
    }
  }
  if (CULL) box = box_of_block(box);
  const int64_t begin = part * in.part, end = min(begin + in.part, in.N);
  for_tiles<A, CULL>(begin, end, box, in.gaussian_groups, [&](int64_t first_n, int64_t end_n) {
    const int64_t i = first_n + threadIdx.x;
    int count = static_cast<int>(end_n - first_n), place = threadIdx.x;
    bool keep = i < end_n;
    if (CULL) {
      keep = keep && !are_apart(box, in.boxes[i]);
      count = place_in_tile(keep, place);
    }
    if (keep) tile[place] = read_gaussian(in, CULL ? in_order(in.gaussian_order, i, in.N) : i, kScale);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      const Gaussian<A> g = tile[k];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        A v[3];
        const A e = Exponent<A>::apply(whiten(g, x[r], y[r], z[r], v));
        if constexpr (GRAD) {
          A u[3];
          const A s = g.weight * e;
          whiten_back(g, v, u);
#pragma unroll
          for (int d = 0; d < 3; ++d) sums[r][d] += s * u[d];
        } else {
          sums[r][0] += g.weight * e;
        }
      }
    }
    __syncthreads();  // the tile has been read
  });
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (at[r] < 0) continue;
    // u carries the scale twice.
    const A factor = GRAD ? (is_whole ? -grad_output[at[r]] : A(-1)) / (kScale * kScale) : A(1);
#pragma unroll
    for (int d = 0; d < kSums; ++d) to[(part * in.B + at[r]) * kSums + d] = sums[r][d] * factor;
  }
}

// Writes 2^-square to `result` if `always` is not 0, which holds always, unknown to ptxas: it then waits for the
// readers of what was in `result`, and cannot gather the exponentials of all points. Those would wait for one another:
// the special-function unit takes one of a warp every eight cycles.
__device__ __forceinline__ void exponential_in_turn(float square, int always, float& result) {
  asm("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ex2.approx.ftz.f32 %0, %1;}" : "+f"(result) : "f"(-square), "r"(always));
}

constexpr int kFieldPoints = 16;  // a thread
constexpr int kFieldBlocks = 4;   // a multiprocessor

// Part p of the Gaussians is [first[p], first[p + 1]).
constexpr int kMostParts = 100;
struct Parts {
  int32_t count;
  int64_t first[kMostParts + 1];
};

// The field, in float32, of so many points that they fill the GPU: point_block's task without its order and gradients.
// A block takes kThreads * kFieldPoints points and a part of the Gaussians. A thread takes two points at a time. The
// statements stand in one of the fastest of 200 orders, the slowest of which takes 7 % longer: the order decides which
// of ptxas's instructions wait for one another at the two ports of the registers.
__global__ void __launch_bounds__(kThreads, kFieldBlocks)
    field_kernel(const Inputs<float> in, const __grid_constant__ Parts parts, float* __restrict__ to, int owners,
                 int always) {
  __shared__ Gaussian<float> tile[kThreads];
  const int part = blockIdx.x / owners;
  const int64_t mine = static_cast<int64_t>(blockIdx.x % owners) * (kThreads * kFieldPoints) + threadIdx.x;
  float x[kFieldPoints], y[kFieldPoints], z[kFieldPoints], sums[kFieldPoints] = {};
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = mine + r * kThreads;
    const float* point = in.points + 3 * b;
    const bool exists = b < in.B;
    x[r] = exists ? point[0] : 0;
    y[r] = exists ? point[1] : 0;
    z[r] = exists ? point[2] : 0;
  }
  float e = 0;
  const int64_t end = parts.first[part + 1];
  for (int64_t first = parts.first[part]; first < end; first += kThreads) {
    const int count = static_cast<int>(min(end - first, int64_t{kThreads}));
    if (threadIdx.x < count) tile[threadIdx.x] = read_gaussian(in, first + threadIdx.x, Exponent<float>::kScale);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      const Gaussian<float> g = tile[k];
#pragma unroll
      for (int r = 0; r < kFieldPoints; r += 2) {
        const int s = r + 1;
        const float v0_r = (x[r] - g.x) * g.i00;
        const float v0_s = (x[s] - g.x) * g.i00;
        float v1_s = (y[s] - g.y) - g.l10 * v0_s;
        float v1_r = (y[r] - g.y) - g.l10 * v0_r;
        const float dz_r = z[r] - g.z;
        v1_r = v1_r * g.i11;
        float v2_s = (z[s] - g.z) - g.l20 * v0_s;
        float v2_r = dz_r - g.l20 * v0_r;
        float square_r = v1_r * v1_r;
        v2_r = v2_r - g.l21 * v1_r;
        square_r = v0_r * v0_r + square_r;
        v2_r = v2_r * g.i22;
        square_r = v2_r * v2_r + square_r;
        v1_s = v1_s * g.i11;
        v2_s = v2_s - g.l21 * v1_s;
        float square_s = v1_s * v1_s;
        square_s = v0_s * v0_s + square_s;
        v2_s = v2_s * g.i22;
        square_s = v2_s * v2_s + square_s;
        exponential_in_turn(square_r, always, e);
        sums[r] += g.weight * e;
        exponential_in_turn(square_s, always, e);
        sums[s] += g.weight * e;
      }
    }
    __syncthreads();  // the tile has been read
  }
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = mine + r * kThreads;
    if (b < in.B) to[part * in.B + b] = sums[r];
  }
}

// A block takes kThreads Gaussians and a part of the points. Sums over points of s, s v, s v v^T with s = grad_output *
// exp (FIELD) or grad_output[b, n].
template <typename A, bool FIELD, bool CULL>
__device__ __forceinline__ void gaussian_block(const Inputs<A>& in, int64_t owner, int64_t part,
                                               const A* __restrict__ grad_output, A* __restrict__ partial) {
  constexpr A kScale = FIELD ? Exponent<A>::kScale : A(1);
  __shared__ Pack<A, 4> tile[kThreads];
  const int64_t i = owner * kThreads + threadIdx.x;
  const int64_t n = i < in.N ? (CULL ? in_order(in.gaussian_order, i, in.N) : i) : -1;
  Gaussian<A> g{};
  Box<A> box = nothing<A>();
  if (n >= 0) {
    g = read_gaussian(in, n, kScale);
    if (CULL) box = in.boxes[i];
  }
  if (CULL) box = box_of_block(box);
  A sum = 0, sum_v[3] = {}, sum_vv[6] = {};
  const int64_t begin = part * in.part, end = min(begin + in.part, in.B);
  for_tiles<A, CULL>(begin, end, box, in.point_groups, [&](int64_t b0, int64_t end_b) {
    const int64_t j = b0 + threadIdx.x, b = j < end_b ? (CULL ? in_order(in.point_order, j, in.B) : j) : -1;
    int count = static_cast<int>(end_b - b0), place = threadIdx.x;
    bool keep = b >= 0;
    Pack<A, 4> point{};
    if (keep) {
      for (int d = 0; d < 3; ++d) point.at[d] = in.points[3 * b + d];
      if (FIELD) point.at[3] = grad_output[b];
    }
    if (CULL) {
      const Box<A> there =
          box_between<A>({point.at[0], point.at[1], point.at[2]}, {point.at[0], point.at[1], point.at[2]});
      keep = keep && !are_apart(box, there);
      count = place_in_tile(keep, place);
    }
    if (keep) tile[place] = point;
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      const Pack<A, 4> p = tile[k];
      A v[3];
      const A square = whiten(g, p.at[0], p.at[1], p.at[2], v);
      A s;
      if constexpr (FIELD) {
        s = p.at[3] * Exponent<A>::apply(square);
      } else {
        s = n >= 0 ? grad_output[(b0 + k) * in.N + n] : A(0);
      }
      sum += s;
#pragma unroll
      for (int d = 0, m = 0; d < 3; ++d) {
        const A sv = s * v[d];
        sum_v[d] += sv;
#pragma unroll
        for (int e = 0; e <= d; ++e, ++m) sum_vv[m] += sv * v[e];
      }
    }
    __syncthreads();  // the tile has been read
  });
  if (n < 0) return;
  // [10, N] of each part, so that neighbouring threads write neighbouring numbers.
  A* to = partial + part * 10 * in.N + n;
  to[0] = sum;
#pragma unroll
  for (int d = 0; d < 3; ++d) to[(1 + d) * in.N] = sum_v[d];
#pragma unroll
  for (int m = 0; m < 6; ++m) to[(4 + m) * in.N] = sum_vv[m];
}

// Blocks of points first, then blocks of Gaussians; either may be none.
template <typename A, int R, bool GRAD, bool FIELD, bool CULL>
__global__ void __launch_bounds__(kThreads)
    pair_kernel(const Inputs<A> for_points, const Inputs<A> for_gaussians, const A* __restrict__ grad_output,
                A* __restrict__ to_points, A* __restrict__ to_gaussians, int point_owners, int point_blocks,
                int gaussian_owners, bool is_whole) {
  const int block = blockIdx.x;
  if (block < point_blocks) {
    point_block<A, R, GRAD, CULL>(for_points, block % point_owners, block / point_owners, grad_output, to_points,
                                  is_whole);
  } else if constexpr (GRAD || !FIELD) {
    const int other = block - point_blocks;
    gaussian_block<A, FIELD, CULL>(for_gaussians, other % gaussian_owners, other / gaussian_owners, grad_output,
                                   to_gaussians);
  }
}

// A block takes 32 Gaussians: its warps share their ten sums and add the parts in order, the first one turns the sums
// into gradients. One thread a Gaussian would wait for ten times as many loads: 16 us instead of 3 at N = 1000.
template <typename A, bool FIELD>
__device__ __forceinline__ void finish_gaussians(const Inputs<A>& in, int64_t first, const A* __restrict__ partial,
                                                 int parts, A* __restrict__ grad_means, A* __restrict__ grad_cholesky,
                                                 A* __restrict__ grad_weights) {
  constexpr A kScale = FIELD ? Exponent<A>::kScale : A(1);
  __shared__ A added[10][32];
  const int lane = threadIdx.x % 32;
  const int64_t n = first + lane;
  if (n < in.N) {
    for (int k = threadIdx.x / 32; k < 10; k += kThreads / 32) {
      const A* from = partial + k * in.N + n;
      A sum = 0;
#pragma unroll 16
      for (int p = 0; p < parts; ++p) sum += from[p * 10 * in.N];
      added[k][lane] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x >= 32 || n >= in.N) return;
  A sums[10];
#pragma unroll
  for (int k = 0; k < 10; ++k) sums[k] = added[k][lane];
  const Gaussian<A> g = read_gaussian(in, n, kScale);
  // v carries the scale once, u twice.
  const A factor = FIELD ? g.weight / (kScale * kScale) : A(-2);
  const A v[3] = {sums[1], sums[2], sums[3]};
  A u[3];
  whiten_back(g, v, u);
#pragma unroll
  for (int d = 0; d < 3; ++d) grad_means[3 * n + d] = factor * u[d];
  const A* s = sums + 4;
  const A columns[3][3] = {{s[0], s[1], s[3]}, {s[1], s[2], s[4]}, {s[3], s[4], s[5]}};
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    whiten_back(g, columns[j], u);
#pragma unroll
    for (int d = 0; d < 3; ++d) grad_cholesky[9 * n + 3 * d + j] = j <= d ? factor / kScale * u[d] : A(0);
  }
  if (FIELD) grad_weights[n] = sums[0];
}

// to[i] = the sum over the parts; times -grad_output[i / 3] for gradients of points.
template <typename A, bool GRAD>
__device__ __forceinline__ void finish_point(const A* __restrict__ partial, const A* __restrict__ grad_output,
                                             A* __restrict__ to, int64_t i, int64_t count, int parts) {
  if (i >= count) return;
  A sum = 0;
#pragma unroll 16
  for (int p = 0; p < parts; ++p) sum += partial[p * count + i];
  to[i] = GRAD ? sum * grad_output[i / 3] : sum;
}

// Points first, where they came in parts, then Gaussians.
template <typename A, bool GRAD, bool FIELD>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const Inputs<A> in, const A* __restrict__ grad_output, const A* __restrict__ of_points,
                  int point_parts, A* __restrict__ to_points, int64_t point_count, int point_blocks,
                  const A* __restrict__ of_gaussians, int gaussian_parts, A* __restrict__ grad_means,
                  A* __restrict__ grad_cholesky, A* __restrict__ grad_weights) {
  if (blockIdx.x < point_blocks) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    finish_point<A, GRAD>(of_points, grad_output, to_points, i, point_count, point_parts);
  } else if constexpr (GRAD || !FIELD) {
    const int64_t first = static_cast<int64_t>(blockIdx.x - point_blocks) * 32;
    finish_gaussians<A, FIELD>(in, first, of_gaussians, gaussian_parts, grad_means, grad_cholesky, grad_weights);
  }
}

// A thread keeps a Gaussian, a block walks one of `parts` parts of the points: rows of the output, written side by
// side.
template <typename A>
__global__ void __launch_bounds__(kThreads) distance_kernel(const Inputs<A> in, A* __restrict__ output, int parts) {
  const int column = blockIdx.x / parts, part = blockIdx.x % parts;
  const int64_t n = static_cast<int64_t>(column) * kThreads + threadIdx.x;
  if (n >= in.N) return;
  const Gaussian<A> g = read_gaussian(in, n, A(1));
  const int64_t begin = part * in.part, end = min(begin + in.part, in.B);
#pragma unroll 4
  for (int64_t b = begin; b < end; ++b) {
    A v[3];
    output[b * in.N + n] = whiten(g, in.points[3 * b], in.points[3 * b + 1], in.points[3 * b + 2], v);
  }
}

// A warp takes a point; its lanes share the Gaussians.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    distance_point_kernel(const Inputs<A> in, const A* __restrict__ grad_output, A* __restrict__ grad_points) {
  const int64_t b = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (b >= in.B) return;
  const int lane = threadIdx.x % 32;
  const A x = in.points[3 * b], y = in.points[3 * b + 1], z = in.points[3 * b + 2];
  A sums[3] = {};
  for (int64_t n = lane; n < in.N; n += 32) {
    const Gaussian<A> g = read_gaussian(in, n, A(1));
    A v[3], u[3];
    whiten(g, x, y, z, v);
    whiten_back(g, v, u);
    const A s = grad_output[b * in.N + n];
#pragma unroll
    for (int d = 0; d < 3; ++d) sums[d] += s * u[d];
  }
#pragma unroll
  for (int d = 0; d < 3; ++d) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sums[d] += __shfl_xor_sync(kAll, sums[d], step);
    if (lane == 0) grad_points[3 * b + d] = 2 * sums[d];
  }
}

// Splits `count` into parts of whole tiles so that `owners` blocks times the parts come to about `wanted` blocks.
struct Split {
  int64_t part;
  int32_t parts;
};
Split split_of(int64_t count, int64_t owners, int64_t wanted, int64_t tile) {
  const int64_t tiles = std::max<int64_t>(1, ceil_div(count, tile));
  const int64_t parts = std::clamp<int64_t>(ceil_div(wanted, owners), 1, std::min<int64_t>(tiles, 65535));
  const int64_t part = ceil_div(tiles, parts) * tile;
  return {part, static_cast<int32_t>(std::max<int64_t>(1, ceil_div(count, part)))};
}

template <typename A>
Inputs<A> inputs_of(const GaussianProblem& problem, const Tensor& points, const Tensor& means, const Tensor& cholesky) {
  Inputs<A> in{};
  in.B = problem.B, in.N = problem.N;
  in.points = points.const_data_ptr<A>();
  in.means = means.const_data_ptr<A>();
  in.cholesky = cholesky.const_data_ptr<A>();
  return in;
}

template <typename F>
void dispatch_float(const Tensor& points, const F& f) {
  points.scalar_type() == ScalarType::Double ? f(double{}) : f(float{});
}

// Blocks of kThreads that a GPU works on at a time, twice.
int64_t wanted_blocks(const DeviceScope& scope) { return 32 * scope.device().multiprocessors; }

// Where a pass writes: the field (no grad_output), or the gradients asked for.
template <typename A>
struct Outputs {
  const A* grad_output;
  A *field, *grad_points, *grad_means, *grad_cholesky, *grad_weights;
};

// The pass over all pairs. GRAD: gradients of points and Gaussians; without FIELD, those of Gaussians alone.
template <typename A, int R, bool GRAD, bool FIELD, bool CULL>
void run_pairs(const char* op, const DeviceScope& scope, const Inputs<A>& in, const Tensor& points,
               const Outputs<A>& out) {
  // A small problem is over before a large grid has started: then parts may be a quarter of a tile.
  const bool is_small = !CULL && in.B * in.N <= int64_t{1} << 22;
  const int64_t wanted = is_small ? scope.device().multiprocessors : wanted_blocks(scope);
  const int64_t tile = is_small ? kThreads / 4 : kThreads;
  constexpr bool kPoints = FIELD, kGaussians = GRAD;
  const int64_t point_owners = kPoints ? ceil_div(in.B, kThreads * R) : 1;
  const int64_t gaussian_owners = kGaussians ? ceil_div(in.N, kThreads) : 1;
  const Split of_gaussians = split_of(in.N, point_owners, wanted, tile);
  const Split of_points = split_of(in.B, gaussian_owners, wanted, tile);
  Inputs<A> for_points = in, for_gaussians = in;
  for_points.part = of_gaussians.part, for_gaussians.part = of_points.part;
  const int64_t point_blocks = kPoints ? point_owners * of_gaussians.parts : 0;
  const int64_t gaussian_blocks = kGaussians ? gaussian_owners * of_points.parts : 0;
  const int64_t point_count = in.B * (GRAD ? 3 : 1);
  const bool is_whole = of_gaussians.parts == 1;
  A* to_points = GRAD ? out.grad_points : out.field;
  Tensor point_parts = points, gaussian_parts = points;
  A *point_data = to_points, *gaussian_data = nullptr;
  if (kPoints && !is_whole) {
    point_parts = new_empty(points, {of_gaussians.parts, point_count});
    point_data = point_parts.mutable_data_ptr<A>();
  }
  if (kGaussians) {
    gaussian_parts = new_empty(points, {of_points.parts, 10, in.N});
    gaussian_data = gaussian_parts.mutable_data_ptr<A>();
  }
  launch({op, "pair_kernel", scope, point_blocks + gaussian_blocks, kThreads}, pair_kernel<A, R, GRAD, FIELD, CULL>,
         for_points, for_gaussians, out.grad_output, point_data, gaussian_data, static_cast<int>(point_owners),
         static_cast<int>(point_blocks), static_cast<int>(gaussian_owners), is_whole);
  const int64_t point_ends = kPoints && !is_whole ? ceil_div(point_count, kThreads) : 0;
  const int64_t gaussian_ends = kGaussians ? ceil_div(in.N, 32) : 0;
  launch({op, "finish_kernel", scope, point_ends + gaussian_ends, kThreads}, finish_kernel<A, GRAD, FIELD>, in,
         out.grad_output, point_data, of_gaussians.parts, to_points, point_count, static_cast<int>(point_ends),
         gaussian_data, of_points.parts, out.grad_means, out.grad_cholesky, out.grad_weights);
}

// Parts for `owners` blocks each on a GPU that works on `places` blocks at a time: large ones first, then ever smaller
// ones. A multiprocessor serves its oldest block first, so that equal blocks end at very different times, and the last
// ones of all run on a GPU that is no longer full: the smaller they are, the shorter.
Parts decreasing_parts(int64_t count, int64_t owners, int64_t places) {
  constexpr double kTake = 0.76, kLeast = 0.03;  // of a share
  const int64_t at_once = std::max<int64_t>(1, places / owners);
  const double share = std::min(1.0, static_cast<double>(owners) / static_cast<double>(places));  // a block's
  const double least = std::max(32.0, kLeast * share * static_cast<double>(count));
  Parts parts{};
  int64_t end = 0;
  while (end < count) {
    const double wanted = std::max(least, kTake * share * static_cast<double>(count - end));
    const int64_t size = 8 * static_cast<int64_t>(std::ceil(wanted / 8));  // whole passes of the unrolled loop
    for (int64_t i = 0; i < at_once && end < count; ++i) {
      end = parts.count + 1 < kMostParts ? std::min(end + size, count) : count;
      parts.first[++parts.count] = end;
    }
  }
  return parts;
}

// The tensors and sizes of a field of at least one point and one Gaussian.
struct FieldCall {
  const char* op;
  const DeviceScope& scope;
  const GaussianProblem& problem;
  const Tensor &points, &means, &cholesky, &weights, &point_order, &gaussian_order;
  double tolerance;
};
struct ForwardCall : FieldCall {
  const Tensor& field;

  template <typename A>
  Outputs<A> outputs() const {
    return {nullptr, field.mutable_data_ptr<A>(), nullptr, nullptr, nullptr, nullptr};
  }
};
struct BackwardCall : FieldCall {
  const Tensor &grad_output, &grad_points, &grad_means, &grad_cholesky, &grad_weights;

  template <typename A>
  Outputs<A> outputs() const {
    return {grad_output.const_data_ptr<A>(),     nullptr,
            grad_points.mutable_data_ptr<A>(),   grad_means.mutable_data_ptr<A>(),
            grad_cholesky.mutable_data_ptr<A>(), grad_weights.mutable_data_ptr<A>()};
  }
};

template <typename A>
Inputs<A> inputs_of_field(const FieldCall& call) {
  auto in = inputs_of<A>(call.problem, call.points, call.means, call.cholesky);
  in.weights = call.weights.const_data_ptr<A>();
  return in;
}

template <typename Call>
const char* culled_declines(const Call& call) {
  const bool has_orders = call.point_order.numel() > 0 && call.gaussian_order.numel() > 0;
  return call.tolerance > 0 && has_orders ? nullptr : "no pair may be left out";
}

// Only pairs of points and Gaussians near each other.
template <typename Call>
void launch_culled(const Call& call) {
  dispatch_float(call.points, [&](auto tag) {
    using A = decltype(tag);
    auto in = inputs_of_field<A>(call);
    in.point_order = call.point_order.template const_data_ptr<int64_t>();
    in.gaussian_order = call.gaussian_order.template const_data_ptr<int64_t>();
    in.cutoff = static_cast<A>(call.tolerance / static_cast<double>(in.N));
    const int64_t gaussian_groups = ceil_div(in.N, kThreads), point_groups = ceil_div(in.B, kThreads);
    const int64_t bytes = static_cast<int64_t>(sizeof(Box<A>)) * (in.N + gaussian_groups + point_groups);
    const Tensor scratch = new_empty(call.points, {bytes}, ScalarType::Byte);
    auto* boxes = static_cast<Box<A>*>(scratch.mutable_data_ptr());
    auto *of_gaussians = boxes + in.N, *of_points = of_gaussians + gaussian_groups;
    in.boxes = boxes, in.gaussian_groups = of_gaussians, in.point_groups = of_points;
    launch({call.op, "box_kernel", call.scope, gaussian_groups, kThreads}, box_kernel<A, true>, in, boxes,
           of_gaussians);
    launch({call.op, "box_kernel", call.scope, point_groups, kThreads}, box_kernel<A, false>, in, nullptr, of_points);
    // One point a thread: small boxes leave out more.
    run_pairs<A, 1, std::is_same_v<Call, BackwardCall>, true, true>(call.op, call.scope, in, call.points,
                                                                    call.template outputs<A>());
  });
}

// Several points a thread share the reading of a Gaussian, once there are enough to fill the GPU.
template <typename Call>
const char* several_points_decline(const Call& call) {
  const int64_t enough = 4 * kThreads * call.scope.device().multiprocessors;
  return call.problem.B >= enough ? nullptr : "its points are too few to fill the GPU";
}

const char* many_points_decline(const ForwardCall& call) {
  if (call.points.scalar_type() == ScalarType::Double) return "points are float64";
  return several_points_decline(call);
}

const char* several_points_forward_decline(const ForwardCall& call) {
  if (call.points.scalar_type() != ScalarType::Double) return "points are float32, which many_points serves";
  return several_points_decline(call);
}

void launch_many_points(const ForwardCall& call) {
  const auto in = inputs_of_field<float>(call);
  auto* field = call.field.mutable_data_ptr<float>();
  const int64_t owners = ceil_div(in.B, kThreads * kFieldPoints);
  const Parts parts = decreasing_parts(in.N, owners, kFieldBlocks * call.scope.device().multiprocessors);
  Tensor scratch = call.points;
  float* to = field;
  if (parts.count > 1) {
    scratch = new_empty(call.points, {parts.count, in.B});
    to = scratch.mutable_data_ptr<float>();
  }
  launch({call.op, "field_kernel", call.scope, owners * parts.count, kThreads}, field_kernel, in, parts, to,
         static_cast<int>(owners), 1);
  if (parts.count == 1) return;
  const int64_t blocks = ceil_div(in.B, kThreads);
  launch({call.op, "finish_kernel", call.scope, blocks, kThreads}, finish_kernel<float, false, true>, in, nullptr, to,
         parts.count, field, in.B, static_cast<int>(blocks), nullptr, 0, nullptr, nullptr, nullptr);
}

template <typename Call, typename A, int R>
void launch_points_of(const Call& call) {
  run_pairs<A, R, std::is_same_v<Call, BackwardCall>, true, false>(call.op, call.scope, inputs_of_field<A>(call),
                                                                   call.points, call.template outputs<A>());
}

void launch_several_points_forward(const ForwardCall& call) { launch_points_of<ForwardCall, double, 2>(call); }

void launch_several_points_backward(const BackwardCall& call) {
  if (call.points.scalar_type() == ScalarType::Double) return launch_points_of<BackwardCall, double, 2>(call);
  launch_points_of<BackwardCall, float, 4>(call);
}

template <typename Call>
void launch_one_point(const Call& call) {
  dispatch_float(call.points, [&](auto tag) { launch_points_of<Call, decltype(tag), 1>(call); });
}

constexpr Path<ForwardCall> kForwardPaths[] = {
    {"culled", culled_declines<ForwardCall>, launch_culled<ForwardCall>},
    {"many_points", many_points_decline, launch_many_points},
    {"several_points", several_points_forward_decline, launch_several_points_forward},
    {"one_point", nullptr, launch_one_point<ForwardCall>},
};
constexpr Path<BackwardCall> kBackwardPaths[] = {
    {"culled", culled_declines<BackwardCall>, launch_culled<BackwardCall>},
    {"several_points", several_points_decline<BackwardCall>, launch_several_points_backward},
    {"one_point", nullptr, launch_one_point<BackwardCall>},
};

Tensor mahalanobis_distance(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in);
  Tensor output = new_empty(points, {problem.B, problem.N});
  if (output.numel() == 0) return output;
  const int64_t columns = ceil_div(problem.N, kThreads);
  dispatch_float(points, [&](auto tag) {
    using A = decltype(tag);
    auto in = inputs_of<A>(problem, points, means, cholesky);
    in.part = std::clamp<int64_t>(ceil_div(problem.B * columns, 4 * wanted_blocks(scope)), 1, 64);
    const int64_t parts = ceil_div(problem.B, in.part);
    launch({op, "distance_kernel", scope, parts * columns, kThreads}, distance_kernel<A>, in,
           output.mutable_data_ptr<A>(), static_cast<int>(parts));
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> mahalanobis_distance_backward(const Tensor& grad_output_in, const Tensor& points_in,
                                                                 const Tensor& means_in, const Tensor& cholesky_in) {
  constexpr const char* op = "mahalanobis_distance_backward";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_distance_gradient(op, grad_output_in, problem, points_in);
  const DeviceScope scope(points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in);
  Tensor grad_points = new_empty(points, points.sizes()), grad_means = new_empty(means, means.sizes()),
         grad_cholesky = new_empty(cholesky, cholesky.sizes());
  if (grad_output.numel() == 0) {
    zero_(grad_points), zero_(grad_means), zero_(grad_cholesky);
    return {grad_points, grad_means, grad_cholesky};
  }
  dispatch_float(points, [&](auto tag) {
    using A = decltype(tag);
    const auto in = inputs_of<A>(problem, points, means, cholesky);
    const A* grad = grad_output.const_data_ptr<A>();
    launch({op, "distance_point_kernel", scope, ceil_div(problem.B, kThreads / 32), kThreads}, distance_point_kernel<A>,
           in, grad, grad_points.mutable_data_ptr<A>());
    run_pairs<A, 1, true, false, false>(
        op, scope, in, points,
        {grad, nullptr, nullptr, grad_means.mutable_data_ptr<A>(), grad_cholesky.mutable_data_ptr<A>(), nullptr});
  });
  return {grad_points, grad_means, grad_cholesky};
}

Tensor gaussian_field(const Tensor& points_in, const Tensor& means_in, const Tensor& cholesky_in,
                      const Tensor& weights_in, const Tensor& point_order_in, const Tensor& gaussian_order_in,
                      double tolerance) {
  constexpr const char* op = "gaussian_field";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_vector(op, "weights", weights_in, problem.N, points_in);
  check_order(op, "point_order", point_order_in, problem.B, points_in);
  check_order(op, "gaussian_order", gaussian_order_in, problem.N, points_in);
  const DeviceScope scope(points_in);
  const Tensor points = dense(points_in), means = dense(means_in), cholesky = dense(cholesky_in),
               weights = dense(weights_in), point_order = dense(point_order_in),
               gaussian_order = dense(gaussian_order_in);
  Tensor output = new_empty(points, {problem.B});
  if (problem.B == 0) return output;
  if (problem.N == 0) return zero_(output);
  run_first(op, kForwardPaths,
            ForwardCall{{op, scope, problem, points, means, cholesky, weights, point_order, gaussian_order, tolerance},
                        output});
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_field_backward(const Tensor& grad_output_in,
                                                                   const Tensor& points_in, const Tensor& means_in,
                                                                   const Tensor& cholesky_in, const Tensor& weights_in,
                                                                   const Tensor& point_order_in,
                                                                   const Tensor& gaussian_order_in, double tolerance) {
  constexpr const char* op = "gaussian_field_backward";
  const auto problem = check_gaussians(op, points_in, means_in, cholesky_in);
  check_vector(op, "weights", weights_in, problem.N, points_in);
  check_vector(op, "grad_output", grad_output_in, problem.B, points_in);
  check_order(op, "point_order", point_order_in, problem.B, points_in);
  check_order(op, "gaussian_order", gaussian_order_in, problem.N, points_in);
  const DeviceScope scope(points_in);
  const Tensor grad_output = dense(grad_output_in), points = dense(points_in), means = dense(means_in),
               cholesky = dense(cholesky_in), weights = dense(weights_in), point_order = dense(point_order_in),
               gaussian_order = dense(gaussian_order_in);
  Tensor grad_points = new_empty(points, points.sizes()), grad_means = new_empty(means, means.sizes()),
         grad_cholesky = new_empty(cholesky, cholesky.sizes()), grad_weights = new_empty(weights, weights.sizes());
  if (problem.B == 0 || problem.N == 0) {
    zero_(grad_points), zero_(grad_means), zero_(grad_cholesky), zero_(grad_weights);
    return {grad_points, grad_means, grad_cholesky, grad_weights};
  }
  run_first(op, kBackwardPaths,
            BackwardCall{{op, scope, problem, points, means, cholesky, weights, point_order, gaussian_order, tolerance},
                         grad_output,
                         grad_points,
                         grad_means,
                         grad_cholesky,
                         grad_weights});
  return {grad_points, grad_means, grad_cholesky, grad_weights};
}

}  // namespace
}  // namespace visdet

VISDET_CUDA_OPERATORS(m) {
  m.impl("mahalanobis_distance", TORCH_BOX(&visdet::mahalanobis_distance));
  m.impl("mahalanobis_distance_backward", TORCH_BOX(&visdet::mahalanobis_distance_backward));
  m.impl("gaussian_field", TORCH_BOX(&visdet::gaussian_field));
  m.impl("gaussian_field_backward", TORCH_BOX(&visdet::gaussian_field_backward));
}

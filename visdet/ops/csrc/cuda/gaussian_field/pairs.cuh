// All pairs of points and Gaussians, or those near each other.
#pragma once

#include <algorithm>

#include "common/launch.h"
#include "cuda/gaussian_field/boxes.cuh"
#include "cuda/gaussian_field/finish.cuh"
#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

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

}  // namespace
}  // namespace visdet::gaussian_field

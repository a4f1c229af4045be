// The pass over all pairs of points and Gaussians, or over those that are near each other. A pair costs some fifteen
// instructions and no memory traffic: what one side of it needs is in registers, and the other side is read from shared
// memory, a tile at a time. The field and the gradients of points keep a point in the registers of a thread, the
// gradients of Gaussians a Gaussian and its ten sums. So each result has one owner, and nothing is added atomically.
// Where the owners are too few to fill the GPU, the other side is divided among blocks, whose sums finish_kernel adds
// in order.
#pragma once

#include <algorithm>

#include "common/compact.cuh"
#include "cuda/gaussian_field/boxes.cuh"
#include "cuda/gaussian_field/finish.cuh"
#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

// Called by all threads of a block: calls f(first, end) for tiles of at most kThreads of the points or Gaussians
// [begin, end). With CULL the tiles are groups of neighbours, and those that are apart from the block's box are
// skipped.
template <bool CULL, typename F>
__device__ __forceinline__ void for_tiles(int64_t begin, int64_t end, const Box& box, const Box* groups, const F& f) {
  if constexpr (CULL) {
    for_near_groups(begin, end, box, groups, f);
  } else {
    for (int64_t first = begin; first < end; first += kThreads) f(first, min(first + kThreads, end));
  }
}

// A block owns kThreads points, one a thread, and a part of the Gaussians. A thread writes the field at its point, or
// three sums, the gradient of the point. `is_whole` says that the part is all Gaussians: the sums are then the whole
// gradient. Otherwise finish_kernel adds the parts and multiplies them by grad_output.
template <typename A, bool GRAD, bool CULL>
__device__ __forceinline__ void point_block(const Inputs<A>& in, int64_t owner, int64_t part,
                                            const A* __restrict__ grad_output, A* __restrict__ to, bool is_whole) {
  constexpr A kScale = Exponential<A>::kScale;
  constexpr int kSums = GRAD ? 3 : 1;
  __shared__ Gaussian<A> tile[kThreads];
  const int64_t i = owner * kThreads + threadIdx.x;
  const int64_t b = i < in.B ? (CULL ? in_order(in.point_order, i, in.B) : i) : -1;
  A x = 0, y = 0, z = 0, sums[kSums] = {};
  Box box = empty_box();
  bool has_wild = false;  // this thread's point
  if (b >= 0) {
    x = in.points[3 * b], y = in.points[3 * b + 1], z = in.points[3 * b + 2];
    has_wild = is_wild(x, y, z);
    if constexpr (CULL) box = box_of_point(x, y, z);
  }
  if constexpr (CULL) box = box_of_block(box);
  const int64_t begin = part * in.part, end = min(begin + in.part, in.N);
  for_tiles<CULL>(begin, end, box, in.gaussian_groups, [&](int64_t first_n, int64_t end_n) {
    const int64_t n = first_n + threadIdx.x;
    int count = static_cast<int>(end_n - first_n);
    bool reads_wild = has_wild;
    const auto read = [&](int position, int64_t m) {
      tile[position] = read_gaussian(in, m, kScale);
      reads_wild |= is_wild(tile[position]);
    };
    if constexpr (CULL) {
      count = compact_block<kThreads>(
          1, [&](int) { return n < end_n && !are_apart(box, in.boxes[n]); },
          [&](int, int position) { read(position, in_order(in.gaussian_order, n, in.N)); });
    } else {
      if (n < end_n) read(threadIdx.x, n);
    }
    for_tile(reads_wild, [&](auto wild) {
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const Gaussian<A> g = tile[k];
        A v[3];
        const A e = Exponential<A>::of(whiten<decltype(wild)::value>(g, x, y, z, v));
        if constexpr (GRAD) {
          A u[3];
          const A s = g.weight * e;
          whiten_back(g, v, u);
#pragma unroll
          for (int d = 0; d < 3; ++d) sums[d] += s * u[d];
        } else {
          sums[0] += g.weight * e;
        }
      }
    });
    __syncthreads();  // the tile has been read
  });
  if (b < 0) return;
  // u carries the scale twice.
  const A factor = GRAD ? (is_whole ? -grad_output[b] : A(-1)) / (kScale * kScale) : A(1);
#pragma unroll
  for (int d = 0; d < kSums; ++d) to[(part * in.B + b) * kSums + d] = sums[d] * factor;
}

// A block owns kThreads Gaussians, one a thread, and a part of the points. A thread writes the sums over these points
// of s, s v and s v v^T, where s is grad_output[b, n], or for a field grad_output[b] times the exponential.
template <typename A, bool IS_FIELD, bool CULL>
__device__ __forceinline__ void gaussian_block(const Inputs<A>& in, int64_t owner, int64_t part,
                                               const A* __restrict__ grad_output, A* __restrict__ partial) {
  constexpr A kScale = IS_FIELD ? Exponential<A>::kScale : A(1);
  __shared__ Pack<A, 4> tile[kThreads];  // points and their gradients
  const int64_t i = owner * kThreads + threadIdx.x;
  const int64_t n = i < in.N ? (CULL ? in_order(in.gaussian_order, i, in.N) : i) : -1;
  Gaussian<A> g{};
  Box box = empty_box();
  if (n >= 0) {
    g = read_gaussian(in, n, kScale);
    if constexpr (CULL) box = in.boxes[i];
  }
  if constexpr (CULL) box = box_of_block(box);
  const bool has_wild = !IS_FIELD || is_wild(g);  // distances are also compared with the largest number
  A sum = 0, sum_v[3] = {}, sum_vv[6] = {};
  const int64_t begin = part * in.part, end = min(begin + in.part, in.B);
  for_tiles<CULL>(begin, end, box, in.point_groups, [&](int64_t first_b, int64_t end_b) {
    const int64_t j = first_b + threadIdx.x, b = j < end_b ? (CULL ? in_order(in.point_order, j, in.B) : j) : -1;
    int count = static_cast<int>(end_b - first_b);
    Pack<A, 4> point{};
    if (b >= 0) {
      for (int d = 0; d < 3; ++d) point.at[d] = in.points[3 * b + d];
      if (IS_FIELD) point.at[3] = grad_output[b];
    }
    const bool reads_wild = has_wild || is_wild(point.at[0], point.at[1], point.at[2]);
    if constexpr (CULL) {
      count = compact_block<kThreads>(
          1, [&](int) { return b >= 0 && !are_apart(box, box_of_point(point.at[0], point.at[1], point.at[2])); },
          [&](int, int position) { tile[position] = point; });
    } else {
      if (b >= 0) tile[threadIdx.x] = point;
    }
    for_tile(reads_wild, [&](auto wild) {
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const Pack<A, 4> p = tile[k];
        A v[3];
        const A square = whiten<decltype(wild)::value>(g, p.at[0], p.at[1], p.at[2], v);
        A s;
        if constexpr (IS_FIELD) {
          s = p.at[3] * Exponential<A>::of(square);
        } else {
          s = n >= 0 ? grad_output[(first_b + k) * in.N + n] : A(0);
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
    });
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

// The first blocks own points, the others Gaussians; a task may have no blocks of one kind.
template <typename A, Task TASK, bool CULL>
__global__ void __launch_bounds__(kThreads)
    pair_kernel(const Inputs<A> for_points, const Inputs<A> for_gaussians, const A* __restrict__ grad_output,
                A* __restrict__ to_points, A* __restrict__ to_gaussians, int point_owners, int point_blocks,
                int gaussian_owners, bool is_whole) {
  const int block = blockIdx.x;
  if constexpr (TASK != Task::kDistanceGradients) {
    if (block < point_blocks) {
      return point_block<A, TASK == Task::kFieldGradients, CULL>(for_points, block % point_owners, block / point_owners,
                                                                 grad_output, to_points, is_whole);
    }
  }
  if constexpr (TASK != Task::kField) {
    const int other = block - point_blocks;
    gaussian_block<A, TASK == Task::kFieldGradients, CULL>(for_gaussians, other % gaussian_owners,
                                                           other / gaussian_owners, grad_output, to_gaussians);
  }
}

// `count` points or Gaussians in equal parts of whole tiles, about `wanted` of them for all of the `owners` blocks.
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

template <typename A, Task TASK, bool CULL>
void launch_pairs(const char* op, const DeviceScope& scope, const Inputs<A>& in, const Tensor& points,
                  const Outputs<A>& out) {
  // A small problem is over before a large grid has started: then parts may be a quarter of a tile.
  const bool is_small = !CULL && in.B * in.N <= int64_t{1} << 22;
  const int64_t wanted = is_small ? scope.device().multiprocessors : wanted_blocks(scope);
  const int64_t tile = is_small ? kThreads / 4 : kThreads;
  constexpr bool kPoints = TASK != Task::kDistanceGradients, kGaussians = TASK != Task::kField;
  const int64_t point_owners = kPoints ? ceil_div(in.B, kThreads) : 1;
  const int64_t gaussian_owners = kGaussians ? ceil_div(in.N, kThreads) : 1;
  const Split of_gaussians = split_of(in.N, point_owners, wanted, tile);
  const Split of_points = split_of(in.B, gaussian_owners, wanted, tile);
  Inputs<A> for_points = in, for_gaussians = in;
  for_points.part = of_gaussians.part, for_gaussians.part = of_points.part;
  const int64_t point_blocks = kPoints ? point_owners * of_gaussians.parts : 0;
  const int64_t gaussian_blocks = kGaussians ? gaussian_owners * of_points.parts : 0;
  const int64_t point_count = in.B * (TASK == Task::kFieldGradients ? 3 : 1);
  const bool is_whole = of_gaussians.parts == 1;
  Tensor point_parts = points, gaussian_parts = points;
  A *point_sums = out.of_points, *gaussian_sums = nullptr;
  if (kPoints && !is_whole) {
    point_parts = new_empty(points, {of_gaussians.parts, point_count});
    point_sums = data_of(point_parts);
  }
  if (kGaussians) {
    gaussian_parts = new_empty(points, {of_points.parts, 10, in.N});
    gaussian_sums = data_of(gaussian_parts);
  }
  launch({op, "pair_kernel", scope, point_blocks + gaussian_blocks, kThreads}, pair_kernel<A, TASK, CULL>, for_points,
         for_gaussians, out.grad_output, point_sums, gaussian_sums, static_cast<int>(point_owners),
         static_cast<int>(point_blocks), static_cast<int>(gaussian_owners), is_whole);
  const int64_t point_ends = kPoints && !is_whole ? ceil_div(point_count, kThreads) : 0;
  const int64_t gaussian_ends = kGaussians ? ceil_div(in.N, kFinishGaussians) : 0;
  launch({op, "finish_kernel", scope, point_ends + gaussian_ends, kThreads}, finish_kernel<A, TASK>, in, point_sums,
         of_gaussians.parts, point_count, static_cast<int>(point_ends), gaussian_sums, of_points.parts, out);
}

}  // namespace
}  // namespace visdet::gaussian_field

// What the backward works out of the levels before it reads samples: for each level its cells, the bins that samples
// are sorted into, the tiles that its gradient is gathered in, and how many of each the levels before it have.
//
// plan_kernel, a single thread, writes this table, a LevelPlan for each level: only the device may know the shapes of
// the levels. zero_kernel clears grad_value where gather_kernel would not write all of it, or would write rows more
// than once; a thread clears 16 bytes at a time. No two threads write the same address.
#pragma once

#include <optional>

#include "common/cells.cuh"
#include "common/launch.h"
#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/row_split.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr const char* kOp = "ms_deform_attn_backward";

// A bin is a run of 2^bin_bits neighbouring cells of a level. It has as many cells as hold kBinSamples samples if the
// samples of the level spread evenly.
constexpr int64_t kBinSamples = 1400;
constexpr int kMaxBinBits = 11;
__host__ __device__ __forceinline__ int bin_bits_of(int64_t samples, int64_t cells) {
  int bits = 0;
  while (bits < kMaxBinBits && samples << (bits + 1) <= cells * kBinSamples) ++bits;
  return bits;
}
__host__ __device__ __forceinline__ int64_t bins_of(int64_t cells, int bin_bits) {
  return (cells + (int64_t{1} << bin_bits) - 1) >> bin_bits;
}

// A tile is a rectangle of texels whose gradient one block gathers, with the cells around its texels. 2^part_bits
// groups of threads divide the records of a cell among them. The more records the cells hold, the smaller the tile.
struct Tile {
  int32_t cells_x, cells_y, part_bits;
  __host__ __device__ constexpr int texels_x() const { return cells_x - 1; }
  __host__ __device__ constexpr int texels_y() const { return cells_y - 1; }
};
__host__ __device__ __forceinline__ Tile tile_of_shape(int shape) {
  return shape == 0 ? Tile{12, 8, 0} : shape == 1 ? Tile{8, 6, 1} : Tile{6, 4, 2};
}
// samples: those of one (batch, head) on the level.
__host__ __device__ __forceinline__ int tile_shape_of(int64_t samples, int64_t H, int64_t W) {
  const int64_t cells = (H + 1) * (W + 1);
  return samples >= 128 * cells ? 2 : samples >= 48 * cells ? 1 : 0;
}
__host__ __device__ __forceinline__ int64_t tiles_of(const Tile& tile, int64_t H, int64_t W) {
  return H > 0 ? (H + tile.texels_y() - 1) / tile.texels_y() * ((W + tile.texels_x() - 1) / tile.texels_x()) : 0;
}

struct alignas(16) LevelPlan {
  Level level;
  int64_t first_cell_start;     // the index of its first cell among the cell starts of a (batch, head)
  int32_t tiles, tile_shape;    // how many tiles the level has, and tile_of_shape()'s argument
  int32_t first_point, points;  // the level's samples within a row
  int32_t first_bin;            // the index of its first bin among the bin starts of a (batch, head)
  int32_t bins, bin_bits;
  // About all levels, in the first entry only: no row of value belongs to two levels, and each row belongs to one.
  bool disjoint, cover;
};

// The starts of a level's cells and those of its bins have one entry more than it has cells or bins: the end of the
// last.
constexpr int kPlanThreads = 1, kZeroThreads = 256;
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const Levels levels, LevelPlan* __restrict__ plan, int L, int64_t S, int64_t Q) {
  int64_t cell_start = 0, rows = 0;
  int32_t first_point = 0, bin = 0;
  bool disjoint = true;
  for (int l = 0; l < L; ++l) {
    const Level level = read_level(levels, l, S);
    const int64_t area = static_cast<int64_t>(level.H) * level.W;
    for (int k = 0; k < l; ++k) {
      const Level other = plan[k].level;
      disjoint = disjoint && (level.start + area <= other.start ||
                              other.start + static_cast<int64_t>(other.H) * other.W <= level.start);
    }
    const int32_t points = level.end - first_point;
    const int shape = tile_shape_of(Q * points, level.H, level.W);
    const int64_t tiles = tiles_of(tile_of_shape(shape), level.H, level.W);
    const int64_t cells = cell_count(level.H, level.W);
    const int bin_bits = bin_bits_of(Q * points, cells);
    const int32_t bins = static_cast<int32_t>(bins_of(cells, bin_bits));
    plan[l] = {level, cell_start, static_cast<int32_t>(tiles), shape, first_point, points, bin, bins, bin_bits,
               false, false};
    cell_start += cells + 1, bin += bins + 1, rows += area, first_point = level.end;
  }
  if (L > 0) plan[0].disjoint = disjoint, plan[0].cover = disjoint && rows == S;
}

__global__ void __launch_bounds__(kZeroThreads)
    zero_kernel(const LevelPlan* __restrict__ plan, char* __restrict__ to, int64_t bytes) {
  if (plan[0].cover) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  for (; at + 16 <= bytes; at += stride) *reinterpret_cast<uint4*>(to + at) = uint4{};
  for (int64_t i = at; i < bytes && i < at + 16; ++i) to[i] = 0;
}

// Copies the plan into `table`, L entries of shared memory. All threads of the block call it; after it the table is
// complete.
__device__ __forceinline__ void load_plan(const LevelPlan* plan, int L, LevelPlan* table) {
  for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = plan[l];
  __syncthreads();
}

// The plan on the device. plan_kernel starts when a path asks for the plan the first time.
class Plans {
 public:
  Plans(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& value, const Levels& levels)
      : problem_(problem), scope_(scope), value_(value), levels_(levels) {}

  const LevelPlan* get() {
    if (!plan_) {
      plan_ = new_empty(value_, {static_cast<int64_t>(sizeof(LevelPlan)) * problem_.L}, ScalarType::Byte);
      launch({kOp, "plan_kernel", scope_, 1, kPlanThreads}, plan_kernel, levels_, data(), static_cast<int>(problem_.L),
             problem_.S, problem_.Q);
    }
    return data();
  }

 private:
  LevelPlan* data() { return mutable_data_of<LevelPlan>(*plan_); }

  const MsDeformAttnProblem& problem_;
  const DeviceScope& scope_;
  const Tensor& value_;
  const Levels& levels_;
  std::optional<Tensor> plan_;
};

}  // namespace
}  // namespace visdet::ms_deform_attn

// The levels as the kernels of ms_deform_attn's backward need to know them: for each level its cells, the bins that its
// samples are sorted into, the tiles of texels that its gradient is gathered in, and how many of each come before it.
//
// plan_kernel writes this table, a LevelPlan a level, by a single thread, since only the device may know the shapes of
// the levels. zero_kernel clears rows of grad_value that no kernel writes, 16 bytes a thread at a time. No two threads
// write the same address.
#pragma once

#include <optional>

#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/row_split.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr const char* kOp = "ms_deform_attn_backward";

__host__ __device__ __forceinline__ int64_t cells_of(int64_t H, int64_t W) { return H > 0 ? (H + 1) * (W + 1) : 0; }

// Bins: as many cells, a power of two, as hold kBinSamples if the samples of the level spread evenly.
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

// The tile of a level: its cells, and how many groups share a cell. The more records a cell holds, the smaller the
// tile.
struct Tile {
  int32_t cells_x, cells_y, part_bits;  // 2^part_bits groups share a cell
  __host__ __device__ constexpr int texels_x() const { return cells_x - 1; }
  __host__ __device__ constexpr int texels_y() const { return cells_y - 1; }
};

// samples: of the level for one (batch, head).
__host__ __device__ __forceinline__ Tile tile_of_shape(int shape) {
  return shape == 0 ? Tile{12, 8, 0} : shape == 1 ? Tile{8, 6, 1} : Tile{6, 4, 2};
}
__host__ __device__ __forceinline__ int tile_shape_of(int64_t samples, int64_t H, int64_t W) {
  const int64_t cells = (H + 1) * (W + 1);
  return samples >= 128 * cells ? 2 : samples >= 48 * cells ? 1 : 0;
}

__host__ __device__ __forceinline__ int64_t tiles_of(const Tile& tile, int64_t H, int64_t W) {
  return H > 0 ? (H + tile.texels_y() - 1) / tile.texels_y() * ((W + tile.texels_x() - 1) / tile.texels_x()) : 0;
}

// What the kernels below need to know of a level, worked out once on the device, where level_shapes may be.
struct alignas(16) LevelPlan {
  Level level;
  int64_t first_slot;  // of its cells among those of its (batch, head); one entry more: the end of the last cell
  int32_t tiles, tile_shape;
  int32_t first_point, points;        // of a row's samples
  int32_t first_bin, bins, bin_bits;  // first_bin: as first_slot; a bin is 2^bin_bits cells
  bool disjoint, cover;               // of all levels, in the first entry: no row in two of them; every row in one
};

constexpr int kPlanThreads = 1, kZeroThreads = 256;
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const Levels levels, LevelPlan* __restrict__ plan, int L, int64_t S, int64_t Q) {
  int64_t slot = 0, rows = 0;
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
    const int64_t cells = cells_of(level.H, level.W);
    const int bin_bits = bin_bits_of(Q * points, cells);
    const int32_t bins = static_cast<int32_t>(bins_of(cells, bin_bits));
    plan[l] = {level, slot, static_cast<int32_t>(tiles), shape, first_point, points, bin, bins, bin_bits, false, false};
    slot += cells + 1, bin += bins + 1, rows += area, first_point = level.end;
  }
  if (L > 0) plan[0].disjoint = disjoint, plan[0].cover = disjoint && rows == S;
}

// Rows that belong to no level, or to several, must be zero before gather_kernel.
__global__ void __launch_bounds__(kZeroThreads)
    zero_kernel(const LevelPlan* __restrict__ plan, char* __restrict__ to, int64_t bytes) {
  if (plan[0].cover) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  for (; at + 16 <= bytes; at += stride) *reinterpret_cast<uint4*>(to + at) = uint4{};
  for (int64_t i = at; i < bytes && i < at + 16; ++i) to[i] = 0;
}

// All threads of the block: the plan into shared memory.
__device__ __forceinline__ void load_plan(const LevelPlan* plan, int L, LevelPlan* table) {
  for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = plan[l];
  __syncthreads();
}

// The bits of numbers up to `most`.
int bit_width(int64_t most) {
  int bits = 0;
  while (most >> bits > 0) ++bits;
  return bits;
}

// A record of the backward holds its query and its point in 31 bits.
int point_bits_of(const MsDeformAttnProblem& problem) { return bit_width(problem.P - 1); }
void check_backward_sizes(const MsDeformAttnProblem& problem) {
  check_sizes(problem);
  VISDET_CHECK("ms_deform_attn_backward", problem.Q <= (int64_t{INT32_MAX} >> point_bits_of(problem)),
               "Q * P must be under 2^31 with P rounded up to a power of two, got ", problem.Q, " * ", problem.P);
}

// The plan of the levels, on the device, from the first time that it is asked for.
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
  LevelPlan* data() { return static_cast<LevelPlan*>(plan_->mutable_data_ptr()); }

  const MsDeformAttnProblem& problem_;
  const DeviceScope& scope_;
  const Tensor& value_;
  const Levels& levels_;
  std::optional<Tensor> plan_;
};

}  // namespace
}  // namespace visdet::ms_deform_attn

// The levels of the feature pyramid: how a kernel is told their sizes, and what the host knows of them.
// The contract of the operator is in ms_deform_attn.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/checks.h"
#include "common/constants.h"
#include "ms_deform_attn.h"

namespace visdet::ms_deform_attn {

constexpr int kMaxLevels = 256;  // Kernels hold the table of levels in shared memory.

// A kernel argument that describes all levels. The shapes and the starts are each given by value, if the caller has
// them on the host, or as a pointer to device memory that the kernel reads.
struct Levels {
  const int64_t* shapes;  // [L, 2] (height, width) on the device, or null
  const int64_t* starts;  // [L] on the device, or null
  int32_t H[kMaxHostLevels], W[kMaxHostLevels], start[kMaxHostLevels];
  // If a row has equally many samples on each level, P is their number. Otherwise P is 0, and end[l] is the number of
  // the row's samples on the levels 0 to l.
  int32_t P;
  int32_t end[kMaxHostLevels];
  bool contiguous;  // The levels are given by value, and fill the S rows of value in order, without a gap.

  __host__ __device__ __forceinline__ bool by_value() const { return shapes == nullptr && starts == nullptr; }
};

// Returns the number of samples that a row has on level l.
__host__ __device__ __forceinline__ int32_t points_on(const Levels& levels, int l) {
  return levels.P > 0 ? levels.P : levels.end[l] - (l > 0 ? levels.end[l - 1] : 0);
}

struct alignas(16) Level {
  int32_t start, H, W;  // H is 0 if the level does not lie within the S rows of value: its samples then yield NaN.
  int32_t end;          // the number of a row's samples on the levels up to and including this one
};

__device__ __forceinline__ Level read_level(const Levels& levels, int l, int64_t S) {
  const int32_t end = levels.P > 0 ? (l + 1) * levels.P : levels.end[l];
  if (levels.by_value()) return {levels.start[l], levels.H[l], levels.W[l], end};
  const int64_t H = levels.shapes ? levels.shapes[2 * l] : levels.H[l],
                W = levels.shapes ? levels.shapes[2 * l + 1] : levels.W[l],
                start = levels.starts ? levels.starts[l] : levels.start[l];
  const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start <= S - H * W;
  return fits ? Level{static_cast<int32_t>(start), static_cast<int32_t>(H), static_cast<int32_t>(W), end}
              : Level{0, 0, 0, end};
}

// Copies the levels into `table`, L entries of shared memory. All threads of the block call it; after it the table is
// complete. Returns whether the levels fill the S rows of value in order, without a gap.
__device__ __forceinline__ bool load_levels(const Levels& levels, int L, int64_t S, Level* table) {
  if (levels.by_value()) {
    for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = read_level(levels, l, S);
    __syncthreads();
    return levels.contiguous;
  }
  bool contiguous = true;
#pragma unroll 1
  for (int l = threadIdx.x; l < L; l += blockDim.x) {
    const Level level = read_level(levels, l, S);
    table[l] = level;
    int64_t before = 0;
#pragma unroll 1
    for (int k = 0; k < l; ++k) {
      const Level other = read_level(levels, k, S);
      before += static_cast<int64_t>(other.H) * other.W;
    }
    contiguous = contiguous && level.H > 0 && level.start == before;
    if (l == L - 1) contiguous = contiguous && before + static_cast<int64_t>(level.H) * level.W == S;
  }
  return __syncthreads_and(contiguous);
}

// Returns whether the levels, which the host knows, fill the S rows of value in order, without a gap.
inline bool host_levels_contiguous(const Levels& levels, const MsDeformAttnProblem& problem) {
  int64_t row = 0;
  for (int64_t l = 0; l < problem.L; ++l) {
    if (levels.start[l] != row) return false;
    row += int64_t{levels.H[l]} * levels.W[l];
  }
  return row == problem.S;
}

// Checks the level tables and turns them into a kernel argument. num_points: the samples of a row on each level, or
// null if each level has problem.P of them.
inline Levels levels_of(const MsDeformAttnProblem& problem, const Tensor& shapes, const Tensor& starts,
                        const int64_t* num_points) {
  Levels levels{};
  if (num_points == nullptr) {
    levels.P = static_cast<int32_t>(problem.P);
  } else {
    VISDET_CHECK("ms_deform_attn_fused", problem.L <= kMaxHostLevels, "level_shapes may name ", kMaxHostLevels,
                 " levels at the most, got ", problem.L);
    int32_t end = 0;
    for (int64_t l = 0; l < problem.L; ++l) levels.end[l] = end += static_cast<int32_t>(num_points[l]);
  }
  const bool host_shapes = shapes.is_cpu(), host_starts = starts.is_cpu();
  VISDET_CHECK("ms_deform_attn", problem.L <= kMaxHostLevels || (!host_shapes && !host_starts),
               "level_shapes and level_starts on the CPU may name ", kMaxHostLevels, " levels at the most, got ",
               problem.L, "; pass them on value's device");
  // The tables of a plan on meta tensors have no address, and a null pointer would mean that the levels are given by
  // value. A plan never reads them, so any other address will do.
  static const int64_t no_table = 0;
  const auto table_data = [](const Tensor& table) {
    const int64_t* data = data_of(table);
    return data == nullptr ? &no_table : data;
  };
  const int64_t *shape_data = table_data(shapes), *start_data = table_data(starts);
  if (host_shapes) {
    check_levels(problem, shape_data, host_starts ? start_data : nullptr);
    for (int64_t l = 0; l < problem.L; ++l) {
      levels.H[l] = static_cast<int32_t>(shape_data[2 * l]), levels.W[l] = static_cast<int32_t>(shape_data[2 * l + 1]);
    }
  } else {
    levels.shapes = shape_data;
  }
  if (host_starts) {
    for (int64_t l = 0; l < problem.L; ++l) {
      VISDET_CHECK("ms_deform_attn", start_data[l] >= 0 && start_data[l] <= problem.S, "level_starts[", l,
                   "] must be a row of value, 0 to ", problem.S, ", got ", start_data[l]);
      levels.start[l] = static_cast<int32_t>(start_data[l]);
    }
  } else {
    levels.starts = start_data;
  }
  levels.contiguous = problem.levels_on_host && host_levels_contiguous(levels, problem);
  return levels;
}

}  // namespace visdet::ms_deform_attn

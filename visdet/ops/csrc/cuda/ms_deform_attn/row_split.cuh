// How the threads of a warp divide the channels of a row among them, and which sizes the kernels' indices can hold.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "common/values.cuh"
#include "cuda/ms_deform_attn/levels.cuh"

namespace visdet::ms_deform_attn {

inline void check_sizes(const MsDeformAttnProblem& problem) {
  VISDET_CHECK("ms_deform_attn", problem.L <= kMaxLevels, "level_shapes may name ", kMaxLevels,
               " levels at the most on CUDA, got ", problem.L);
  VISDET_CHECK("ms_deform_attn", problem.S <= INT32_MAX, "value must have fewer than 2^31 rows S, got ", problem.S);
  // Kernels count the samples of one image and the bytes of one texel in 32 bits.
  const double samples = 1.0 * problem.Q * problem.G * problem.K;
  VISDET_CHECK("ms_deform_attn", samples <= INT32_MAX && problem.Q * problem.G <= INT32_MAX,
               "Q * G * L * P must be under 2^31, got ", problem.Q, " * ", problem.G, " * ", problem.K);
  VISDET_CHECK("ms_deform_attn", 8.0 * problem.G * problem.C <= INT32_MAX, "G * C must be under 2^28, got ", problem.G,
               " * ", problem.C);
  VISDET_CHECK("ms_deform_attn", problem.B * problem.G <= INT32_MAX, "B * G must be under 2^31, got ", problem.B, " * ",
               problem.G);
}

// Returns a grid whose x counts the blocks of a head, and whose y and z together count the heads: a kernel reads its
// head back as y + 65535 * z.
inline Grid head_grid(int64_t blocks, int64_t heads) {
  return {blocks, std::min<int64_t>(heads, 65535), ceil_div(heads, 65535)};
}

// Kernels are compiled for rows of the lengths that published models have. A longer row is taken in several steps.
constexpr int kMaxChannels = 64;

// `lanes` neighbouring threads, a power of two, read a row of C channels together, `vec` channels each by one load. vec
// is 16 bytes' worth of values where channels and addresses allow such loads, else 1. The lanes cover kMaxChannels at
// the most, and 32 channels if vec is 1.
struct RowSplit {
  int64_t vec, lanes;
};

inline RowSplit row_split(int64_t C, bool is_aligned, int64_t vec) {
  if (C % vec != 0 || !is_aligned) return {1, 32};
  int64_t lanes = 4;
  while (lanes * vec < std::min<int64_t>(C, kMaxChannels)) lanes *= 2;
  return {vec, lanes};
}

// Calls f(VEC, LANES) with the constants of a row_split(C, is_aligned, VEC).
template <int VEC, typename F>
void dispatch_row(const RowSplit& row, const F& f) {
  if (row.vec == 1) return f(std::integral_constant<int, 1>{}, std::integral_constant<int, 32>{});
  const std::integral_constant<int, VEC> vec;
  if constexpr (16 * VEC <= kMaxChannels) {
    if (row.lanes == 16) return f(vec, std::integral_constant<int, 16>{});
  }
  if (row.lanes == 8) return f(vec, std::integral_constant<int, 8>{});
  f(vec, std::integral_constant<int, 4>{});
}

// A backward with at most this many samples a texel adds its gradients directly, which is then faster than sorting.
constexpr int64_t kDirectSamples = 4;

// Returns how many channels each row should be padded to before the kernels run, so that rows can be read 16 bytes at a
// time: C itself where rows already can be, and where samples are so few that the copies would cost more.
inline int64_t filled_channels(const MsDeformAttnProblem& problem, const Tensor& value) {
  const int64_t vec = 16 / static_cast<int64_t>(value.element_size());
  const bool pays = problem.C >= vec && problem.Q * problem.K > kDirectSamples * problem.S;
  return pays ? ceil_div(problem.C, vec) * vec : problem.C;
}
inline Tensor fill_rows(const Tensor& tensor, const MsDeformAttnProblem& problem, int64_t channels) {
  const Tensor rows = view(tensor, {problem.B, tensor.size(1), problem.G, problem.C});
  const int64_t before_and_after[] = {0, channels - problem.C};
  // Where dimensions of size 1 have strides as in a channels-last tensor, pad() gives such a tensor, though the rows
  // are contiguous, too.
  return dense(pad(rows, {before_and_after, 2}));
}

}  // namespace visdet::ms_deform_attn

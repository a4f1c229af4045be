// Runs: where every level has a multiple of four samples of a row, each four samples in succession, a run, lie on one
// level. The host can then list the levels of a row's runs, so that kernels need not search them.
#pragma once

#include "cuda/ms_deform_attn/levels.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kRun = 4;     // samples of a run
constexpr int kChunk = 16;  // samples of the rows that FewRuns describes

// The levels of the runs of a row of at most kChunk samples, if the host knows the levels. A kernel reads them from its
// arguments, without a table in shared memory and the barrier that completes one.
struct FewRuns {
  Level level[kChunk / kRun];     // The level's number stands in `end`.
  int32_t points[kChunk / kRun];  // the number of samples that a row has on that level
};

// Returns the entry of `runs` for sample k of a row. It selects, because a kernel argument that each lane reads at an
// address of its own would be read lane after lane.
template <typename V>
__device__ __forceinline__ V of_run(const V (&runs)[kChunk / kRun], int k) {
  V found = runs[0];
#pragma unroll
  for (int r = 1; r < kChunk / kRun; ++r) {
    if (k >= r * kRun) found = runs[r];
  }
  return found;
}

inline FewRuns few_runs(const Levels& levels, const MsDeformAttnProblem& problem) {
  FewRuns runs{};
  int count = 0;
  for (int l = 0; l < problem.L; ++l) {
    for (int i = 0; i < points_on(levels, l) / kRun; ++i, ++count) {
      runs.level[count] = {levels.start[l], levels.H[l], levels.W[l], l}, runs.points[count] = points_on(levels, l);
    }
  }
  return runs;
}

}  // namespace
}  // namespace visdet::ms_deform_attn

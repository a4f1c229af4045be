// What the passes of sample_sum and sample_dot have in common on CUDA: sizes, where a sample lies, and the samples of a
// query that count. The contract is in csrc/sample_ops.h.
#pragma once

#include <cstdint>

#include "common/cells.cuh"
#include "common/compact.cuh"
#include "common/corners.cuh"
#include "common/launch.h"
#include "common/values.cuh"
#include "sample_ops.h"

namespace visdet::sample {
namespace {

struct Sizes {
  int64_t B, Q;
  int32_t C, H, W, D, G, K;
  int64_t cells;  // entries of an image: one for each cell, and one for the end of the last
};

inline Sizes sizes_of(const SampleProblem& problem) {
  const auto number = [](int64_t x) { return static_cast<int32_t>(x); };
  return {problem.B,         problem.Q,         number(problem.C),
          number(problem.H), number(problem.W), number(problem.D),
          number(problem.G), number(problem.K), cell_count(problem.H, problem.W) + 1};
}

inline void check_sizes(const char* op, const SampleProblem& problem) {
  VISDET_CHECK(op, 1.0 * problem.Q * problem.D <= INT32_MAX - 1024 && problem.D <= INT32_MAX - 1024,
               "Q * D must be under 2^31 - 1024 on CUDA, got ", problem.Q, " * ", problem.D);
  VISDET_CHECK(op, problem.B <= 65535, "images must be at most 65535 on CUDA, got ", problem.B);
  VISDET_CHECK(op, problem.C < (1 << 20), "images must have fewer than 2^20 channels on CUDA, got ", problem.C);
  VISDET_CHECK(op, 1.0 * problem.H * problem.W < INT32_MAX - problem.H - problem.W - 2.0,
               "images must have fewer than 2^31 pixels on CUDA, got ", problem.H, " x ", problem.W);
  VISDET_CHECK(op, problem.G < (1 << 30), "there must be fewer than 2^30 groups on CUDA, got ", problem.G);
}

constexpr int kGroups = 4;  // that a kernel does at once

// Whether a sample counts, its position in pixels, and its corners.
template <typename A>
__device__ __forceinline__ bool locate_sample(const Pack<A, 2>& sample, const Sizes& sizes, A& x, A& y,
                                              Bilinear<A>& at) {
  x = fma(sample.at[0] + 1, A(sizes.W) / 2, A(-0.5)), y = fma(sample.at[1] + 1, A(sizes.H) / 2, A(-0.5));
  return locate(x, y, sizes.H, sizes.W, at);
}

// All threads of a block call it, and each looks at one of the samples [d0, d0 + THREADS) of a query. If the sample
// counts, the thread calls keep(position, d, x, y, at), where `position` is the number of earlier samples that count.
// Otherwise it calls skip(d). Returns how many count. What keep() wrote to shared memory can be read afterwards.
template <int THREADS, typename A, typename Keep, typename Skip>
__device__ __forceinline__ int list_samples(const Pack<A, 2>* __restrict__ samples, int d0, const Sizes& sizes,
                                            const Keep& keep, const Skip& skip) {
  const int d = d0 + threadIdx.x;
  A x, y;
  Bilinear<A> at;
  const bool counts = d < sizes.D && locate_sample(samples[d], sizes, x, y, at);
  if (!counts && d < sizes.D) skip(d);
  return compact_block<THREADS>(
      1, [&](int) { return counts; }, [&](int, int position) { keep(position, d, x, y, at); });
}

// Coefficients of sample d of query q for kGroups groups from g0 on, zero past the last group and the last sample.
template <typename A>
__device__ __forceinline__ Pack<A, kGroups> load_coefficients(const A* __restrict__ coefficients, int64_t b, int64_t q,
                                                              int g0, int d, const Sizes& sizes) {
  Pack<A, kGroups> out = {};
  if (d >= sizes.D) return out;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g0 + g < sizes.G) out.at[g] = coefficients[((b * sizes.G + g0 + g) * sizes.Q + q) * sizes.D + d];
  }
  return out;
}

// Channel j of the encoding of a depth.
template <typename A>
__device__ __forceinline__ A encode(A depth, int j) {
  A sine, cosine;
  sincospi(scalbn(depth, j / 2 + 1), &sine, &cosine);
  return j % 2 ? cosine : sine;
}

}  // namespace
}  // namespace visdet::sample

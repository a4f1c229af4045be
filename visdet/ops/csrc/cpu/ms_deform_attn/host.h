// How host code calls the CPU kernels of ms_deform_attn: the tables of a call and the loops over its rows, without
// torch.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/ms_deform_attn/arrays.h"
#include "cpu/scratch.h"
#include "ms_deform_attn.h"

namespace visdet {

// An encoder's queries are the texels of the pyramid itself; taken in 8 x 8 squares, their samples have in common most
// of their texels. Other queries are taken in order.
constexpr int64_t kTileSide = 8;

// Returns the queries in the order in which they are worked on, or none for their own order. It is a matter of locality
// alone: results do not depend on it.
inline std::vector<int64_t> query_order(const MsDeformAttnProblem& problem, const int64_t* level_shapes) {
  std::vector<int64_t> order;
  if (problem.Q != problem.S) return order;
  order.reserve(static_cast<size_t>(problem.Q));
  int64_t start = 0;
  for (int64_t l = 0; l < problem.L; ++l) {
    const int64_t H = level_shapes[2 * l], W = level_shapes[2 * l + 1];
    for (int64_t y0 = 0; y0 < H; y0 += kTileSide) {
      for (int64_t x0 = 0; x0 < W; x0 += kTileSide) {
        for (int64_t y = y0; y < std::min(y0 + kTileSide, H); ++y) {
          for (int64_t x = x0; x < std::min(x0 + kTileSide, W); ++x) order.push_back(start + y * W + x);
        }
      }
    }
    start += H * W;
  }
  return order;
}

// Lists the level of each of a row's K samples, and the order of queries. num_points has the samples of each level, or
// is null if each has P.
struct Geometry {
  std::vector<int32_t> level, H, W;
  std::vector<int64_t> start, points, order;

  Geometry(const MsDeformAttnProblem& problem, const int64_t* shapes, const int64_t* starts,
           const int64_t* num_points) {
    order = query_order(problem, shapes);
    for (int64_t l = 0; l < problem.L; ++l) {
      const int64_t P = num_points == nullptr ? problem.P : num_points[l];
      level.insert(level.end(), static_cast<size_t>(P), static_cast<int32_t>(l));
      H.insert(H.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l]));
      W.insert(W.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l + 1]));
      start.insert(start.end(), static_cast<size_t>(P), starts[l]);
      points.insert(points.end(), static_cast<size_t>(P), P);
    }
    H.insert(H.end(), kBlock, 1);
    W.insert(W.end(), kBlock, 1);
    start.insert(start.end(), kBlock, 0);
  }
};

// Returns what both forms of a call have. The caller fills in the arrays of samples.
template <typename T, typename A>
MsDeformAttnArrays<T, A> arrays_of(const MsDeformAttnProblem& problem, const Geometry& geometry, const T* value) {
  MsDeformAttnArrays<T, A> a{};
  a.B = problem.B, a.S = problem.S, a.G = problem.G, a.C = problem.C, a.Q = problem.Q, a.L = problem.L, a.K = problem.K;
  a.level = geometry.level.data();
  a.H = geometry.H.data(), a.W = geometry.W.data(), a.start = geometry.start.data();
  a.order = geometry.order.empty() ? nullptr : geometry.order.data();
  a.value = value;
  return a;
}

// Returns whether a head has so many samples that it pays to lay its values out in one piece. A decoder has too few.
inline bool pays_to_gather(const MsDeformAttnProblem& problem) { return problem.Q * problem.K > problem.S; }

// The levels whose rows of a head the forward copies into one piece. It copies a level if a thread takes at least twice
// as many samples from it as it has texels.
struct Copies {
  std::vector<int32_t> copied;
  std::vector<int64_t> start;
  int64_t rows = 0;

  Copies(const MsDeformAttnProblem& problem, const Geometry& geometry, int64_t threads)
      : copied(geometry.start.size(), 0), start(geometry.start) {
    // Rows that fill no registers of 16 are copied with zeros after them, so the levels are copied all or none.
    const bool each = problem.C % 16 == 0;
    if (problem.G == 1 || (!each && !pays_to_gather(problem))) return;
    const int64_t heads = problem.B * problem.G;
    const int64_t threads_of_head = ceil_of(threads, heads);
    for (size_t k = 0, next = 0; next < static_cast<size_t>(problem.K); k = next) {
      next = k + static_cast<size_t>(geometry.points[k]);
      const int64_t texels = int64_t{geometry.H[k]} * geometry.W[k];
      if (each && problem.Q * geometry.points[k] <= 2 * texels * threads_of_head) continue;
      for (size_t i = k; i < next; ++i) copied[i] = 1, start[i] = rows;
      rows += texels;
    }
  }
};

// Computes the rows of the output. parallel_for(begin, end, grain, f) is that of torch, and has as many threads as
// copies.
template <typename T, typename A, typename ParallelFor>
void run_forward(const MsDeformAttnProblem& problem, const Copies& copies, MsDeformAttnArrays<T, A>& a,
                 const ParallelFor& parallel_for) {
  a.copied = copies.copied.data(), a.copy_start = copies.start.data(), a.copy_rows = copies.rows;
  const std::vector<A> zeros(static_cast<size_t>((problem.C + 15) / 16 * 16));
  a.zeros = reinterpret_cast<const T*>(zeros.data());
  const auto run = best_kernels<MsDeformAttnForward<T, A>>().rows;
  const int64_t Q = problem.Q, G = problem.G;
  if (copies.rows > 0) {
    // A thread's rows have as many samples as it copies texels, or more.
    const int64_t grain = copies.rows / problem.K + 1;
    parallel_for(0, problem.B * G * Q, grain, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(forward_scratch(a));
      for (int64_t rows; begin < end; begin += rows) {
        const int64_t head = begin / Q, first = begin % Q;
        rows = std::min(Q - first, end - begin);
        run(a, scratch.data(), head / G, head % G, first, rows);
      }
    });
  } else {
    parallel_for(0, problem.B * Q, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(forward_scratch(a));
      run(a, scratch.data(), begin / Q, 0, begin % Q, (end - begin) * G);
    });
  }
}

}  // namespace visdet

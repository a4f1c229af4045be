// The assignment of least total cost by shortest augmenting paths (Crouse, "On implementing 2D rectangular assignment
// algorithms", IEEE Transactions on Aerospace and Electronic Systems, 2016).
//
// Rows are assigned one after the other. For a new row, a search as Dijkstra's goes from row to row, over the columns
// in between, until it meets a column that has no row yet. Then the rows along the path exchange their columns. The
// length of an edge is its cost minus the potentials of its row and of its column, which is never negative.
//
// A block owns a problem. All its threads look for the nearest column, each at every blockDim.x-th one. Thread 0 alone
// writes what a step changes: the order of the columns and, at the end of a path, who is assigned to whom. Sums and
// ties are in the order of scipy.optimize.linear_sum_assignment, so that the result is the same.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "common/warp.cuh"

namespace visdet::linear_sum_assignment {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;

// A matrix of costs with no more rows than columns.
struct Costs {
  const double* data;
  int rows, columns;
  int64_t row_stride, column_stride;

  __device__ double at(int row, int column) const { return data[row * row_stride + column * column_stride]; }
};

// What the threads of a block share, in shared memory or, for many columns, in device memory.
struct Memory {
  double* shortest;          // [columns], the length of the shortest known path to each column
  double* column_potential;  // [columns]
  double* row_potential;     // [rows]
  int* row_before;           // [columns], the row before each column on this path
  int* row_of;               // [columns], the row that is assigned to each column, or -1
  int* order;                // [columns], the columns: those that the search has not reached, then the others
  int* column_of;            // [rows], the column that is assigned to each row, or -1

  __device__ Memory(double* memory, int rows, int columns)
      : shortest(memory),
        column_potential(shortest + columns),
        row_potential(column_potential + columns),
        row_before(reinterpret_cast<int*>(row_potential + rows)),
        row_of(row_before + columns),
        order(row_of + columns),
        column_of(order + columns) {}
};

inline int64_t memory_bytes(int64_t rows, int64_t columns) {
  const int64_t bytes = rows * (sizeof(double) + sizeof(int)) + columns * (2 * sizeof(double) + 3 * sizeof(int));
  return (bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
}

// A column that may be the nearest one. Of equally near ones, the least rank is first: columns without a row before all
// others, and of these the last in `order`, but the first one of the others.
struct Candidate {
  double distance;
  int rank;
  int column;

  __device__ bool is_before(const Candidate& other) const {
    return distance < other.distance || (distance == other.distance && rank < other.rank);
  }
  __device__ int place() const { return rank < 0 ? -1 - rank : rank; }
};
constexpr double kUnreached = std::numeric_limits<double>::infinity();
__device__ inline Candidate no_candidate() { return {kUnreached, std::numeric_limits<int>::max(), 0}; }

__device__ inline Candidate nearest_of_warp(Candidate mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    Candidate other;
    other.distance = __shfl_xor_sync(kAllLanes, mine.distance, step);
    other.rank = __shfl_xor_sync(kAllLanes, mine.rank, step);
    other.column = __shfl_xor_sync(kAllLanes, mine.column, step);
    if (other.is_before(mine)) mine = other;
  }
  return mine;
}

// Takes `row`, at the end of a path of length `distance`, as a step to the first `unreached` columns in `order`, and
// returns the nearest of them, which leaves the unreached ones.
__device__ inline Candidate next_column(const Costs& costs, const Memory& memory, int row, double distance,
                                        int unreached) {
  __shared__ Candidate of_warps[kMaxWarps];
  Candidate mine = no_candidate();
  const double potential = memory.row_potential[row];
#pragma unroll 4
  for (int place = threadIdx.x; place < unreached; place += blockDim.x) {
    const int column = memory.order[place];
    const double length = distance + costs.at(row, column) - potential - memory.column_potential[column];
    Candidate candidate;
    candidate.distance = memory.shortest[column];
    if (length < candidate.distance) {
      memory.shortest[column] = candidate.distance = length;
      memory.row_before[column] = row;
    }
    candidate.rank = memory.row_of[column] < 0 ? -1 - place : place;
    candidate.column = column;
    if (candidate.is_before(mine)) mine = candidate;
  }
  mine = nearest_of_warp(mine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();  // The candidates of all warps are there.
  const int lane = threadIdx.x % 32;
  mine = nearest_of_warp(lane < blockDim.x / 32 ? of_warps[lane] : no_candidate());
  if (threadIdx.x == 0) {
    memory.order[mine.place()] = memory.order[unreached - 1];
    memory.order[unreached - 1] = mine.column;
  }
  __syncthreads();  // The order is complete, and the candidates have been read.
  return mine;
}

// Assigns a column to `row`.
__device__ inline void add_row(const Costs& costs, const Memory& memory, int row) {
  for (int column = threadIdx.x; column < costs.columns; column += blockDim.x) {
    memory.shortest[column] = kUnreached;
    memory.row_before[column] = row;
    memory.order[column] = costs.columns - 1 - column;
  }
  __syncthreads();  // The search may begin.
  int unreached = costs.columns, last = row;
  Candidate nearest = no_candidate();
  for (double distance = 0; last >= 0; distance = nearest.distance) {
    nearest = next_column(costs, memory, last, distance, unreached--);
    last = memory.row_of[nearest.column];
  }
  for (int place = unreached + threadIdx.x; place < costs.columns; place += blockDim.x) {
    const int column = memory.order[place];
    const double shorter = nearest.distance - memory.shortest[column];
    memory.column_potential[column] -= shorter;
    if (memory.row_of[column] >= 0) memory.row_potential[memory.row_of[column]] += shorter;
  }
  __syncthreads();  // The assignment before has been read.
  if (threadIdx.x == 0) {
    memory.row_potential[row] += nearest.distance;
    for (int column = nearest.column, at = -1; at != row;) {
      at = memory.row_before[column];
      memory.row_of[column] = at;
      const int free = memory.column_of[at];
      memory.column_of[at] = column;
      column = free;
    }
  }
  __syncthreads();  // The assignment is complete.
}

// index[block, q] is the row of costs[block], one of the first counts[block % samples], that column q gets, or N.
// scratch: memory of `scratch_doubles` for each block, or nothing if that is dynamic shared memory.
__global__ void __launch_bounds__(kMaxThreads)
    assignment_kernel(const double* __restrict__ costs, const int64_t* __restrict__ counts, int samples, int N, int Q,
                      double* scratch, int64_t scratch_doubles, int64_t* __restrict__ index) {
  extern __shared__ double shared[];
  const int64_t count = counts[blockIdx.x % samples];
  const int targets = count < 0 ? 0 : count < N ? static_cast<int>(count) : N;
  const bool is_transposed = targets > Q;
  const double* data = costs + static_cast<int64_t>(blockIdx.x) * N * Q;
  const Costs problem = is_transposed ? Costs{data, Q, targets, 1, Q} : Costs{data, targets, Q, Q, 1};
  const Memory memory(scratch == nullptr ? shared : scratch + blockIdx.x * scratch_doubles, problem.rows,
                      problem.columns);
  for (int column = threadIdx.x; column < problem.columns; column += blockDim.x) {
    memory.column_potential[column] = 0;
    memory.row_of[column] = -1;
  }
  for (int row = threadIdx.x; row < problem.rows; row += blockDim.x) {
    memory.row_potential[row] = 0;
    memory.column_of[row] = -1;
  }
  for (int row = 0; row < problem.rows; ++row) add_row(problem, memory, row);
  for (int q = threadIdx.x; q < Q; q += blockDim.x) {
    const int target = is_transposed ? memory.column_of[q] : memory.row_of[q];
    index[static_cast<int64_t>(blockIdx.x) * Q + q] = target < 0 ? N : target;
  }
}

}  // namespace visdet::linear_sum_assignment

// The layers of a call of perceptrons, and what its kernels share: the tile of outputs that a thread owns, and the
// product of activations in shared memory with a weight.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/warp.cuh"

namespace visdet::perceptrons {

constexpr int kMaxLayers = 24;  // of all perceptrons of a call, whose description is an argument of the kernels
constexpr int kMaxPerceptrons = 8;
constexpr int kMaxWidth = 256;  // of a layer

// What follows the linear part of a layer, as bits.
constexpr int kRelu = 1;
constexpr int kNorm = 2;   // a layer normalisation with weight and bias
constexpr int kScale = 4;  // a factor for each channel
constexpr int kFirst = 8;  // The layer is the first one of a perceptron.

struct Layer {
  const float *weight, *bias;    // [outputs, inputs], [outputs]
  const float *factor, *offset;  // [outputs], those of the normalisation, or the factor of kScale, or nullptr
  int inputs, outputs, kind;
  int64_t saved;       // where the results of the linear part [rows, outputs] begin in `saved`, or -1
  int64_t statistics;  // where mean and 1 / deviation [rows, 2] begin in `saved`
  int64_t gradients;   // where the gradients of weight, bias, factor and offset begin in `grad_parameters`
  int before;          // outputs of all layers before this one, which lie before its own in tables of all layers
};

struct Perceptron {
  int first_layer, num_layers;
  int first_column, first_output;  // of the input and of the output
};

struct Net {
  Layer layers[kMaxLayers];
  Perceptron perceptrons[kMaxPerceptrons];
  int num_layers, count;  // count: of perceptrons
  int columns, outputs;   // of the input and of the output
  int64_t rows;
  int64_t num_parameters;  // numbers in all parameters
  int layer_outputs;       // outputs of all layers together
  float eps;
};

// A block owns kBlockRows rows of one perceptron. Its threads form groups of kLanes, each of which owns kRows rows.
// Lane c of a group owns columns c, c + kLanes, ... of them. Blocks of 8 rows gained at most 2 % for few rows.
constexpr int kBlockRows = 16;
constexpr int kRows = 4;
constexpr int kLanes = 64;
constexpr int kTiles = kMaxWidth / kLanes;  // columns of a thread
constexpr int kDepth = 16;                  // terms of a product between two barriers
constexpr int kStride = kMaxWidth + 4;      // of the rows of activations in shared memory

constexpr int kThreads = kBlockRows / kRows * kLanes;

using Tile = float[kRows][kTiles];

struct Shared {
  static constexpr int kWeights = kMaxWidth * (kDepth + 4);  // floats of a stage, the larger of both layouts

  float activations[kBlockRows][kStride];
  float weights[2][kWeights];
  float sums[kThreads / 32][kRows];
  float columns[kBlockRows / kRows][kMaxWidth];
};

__device__ __forceinline__ int lane_of_group() { return threadIdx.x % kLanes; }
__device__ __forceinline__ int group_of_thread() { return threadIdx.x / kLanes; }

// Reads the thread's tile of a block's rows: `width` columns of [rows, pitch] numbers, zero outside them. first: the
// thread's first row.
__device__ __forceinline__ void load_tile(const float* __restrict__ columns, int64_t pitch, int width, int64_t first,
                                          int64_t rows, Tile& tile) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int column = lane_of_group() + t * kLanes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool is_inside = column < width && first + r < rows;
      tile[r][t] = is_inside ? columns[(first + r) * pitch + column] : 0.f;
    }
  }
}

__host__ __device__ constexpr int round_up(int value, int to) { return (value + to - 1) / to * to; }

// Four neighbouring numbers of a row of `width` numbers, with zeros behind its end.
__device__ __forceinline__ float4 load_four(const float* row, int at, int width, bool is_aligned) {
  if (is_aligned && at + 4 <= width) return *reinterpret_cast<const float4*>(row + at);
  float4 four = {0, 0, 0, 0};
  if (at < width) four.x = row[at];
  if (at + 1 < width) four.y = row[at + 1];
  if (at + 2 < width) four.z = row[at + 2];
  if (at + 3 < width) four.w = row[at + 3];
  return four;
}

// Adds activations [kBlockRows, terms] times the weight to the thread's tile of [kBlockRows, columns]. The weight is
// [columns, terms] with TRANSPOSED, as in a forward pass, and otherwise [terms, columns]. Activations behind `terms`
// are zero up to the next multiple of kDepth. A barrier lies before the first read of activations, and none behind the
// last one.
template <bool TRANSPOSED>
__device__ __forceinline__ void add_product(Shared& shared, const float* __restrict__ weight, int terms, int columns,
                                            Tile& tile) {
  constexpr int kFours = kMaxWidth * kDepth / 4 / kThreads;  // of a thread and stage
  constexpr int kPitch = TRANSPOSED ? kDepth + 4 : kStride;  // Eight lanes in a row reach 32 banks by fours.
  const int width = TRANSPOSED ? terms : columns;            // of the weight's rows in memory
  const bool is_aligned = width % 4 == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0;
  constexpr int fours = TRANSPOSED ? kDepth / 4 : kMaxWidth / 4;  // of a row of the stage, used or not
  const int count = TRANSPOSED ? columns * fours : kDepth * fours;
  const int lane = lane_of_group(), first_row = group_of_thread() * kRows;
  const int tiles = (columns + kLanes - 1) / kLanes, stages = (terms + kDepth - 1) / kDepth;
  float4 next[kFours];
  const auto load = [&](int k0) {
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const int at = threadIdx.x + f * kThreads;
      if (at >= count) break;
      const int row = at / fours, four = at - row * fours;
      if (TRANSPOSED) {
        next[f] = load_four(weight + static_cast<int64_t>(row) * width, k0 + 4 * four, width, is_aligned);
      } else {
        next[f] = {0, 0, 0, 0};
        if (k0 + row < terms) {
          next[f] = load_four(weight + static_cast<int64_t>(k0 + row) * width, 4 * four, width, is_aligned);
        }
      }
    }
  };
  load(0);
  for (int stage = 0; stage < stages; ++stage) {
    float* const weights = shared.weights[stage % 2];
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const int at = threadIdx.x + f * kThreads;
      if (at >= count) break;
      const int row = at / fours, four = at - row * fours;
      *reinterpret_cast<float4*>(weights + row * kPitch + 4 * four) = next[f];
    }
    __syncthreads();  // The stage is complete, and nobody reads the other one.
    if (stage + 1 < stages) load((stage + 1) * kDepth);
#pragma unroll
    for (int k = 0; k < kDepth; k += 4) {
      float4 x[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r] = *reinterpret_cast<const float4*>(&shared.activations[first_row + r][stage * kDepth + k]);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t >= tiles) break;
        const int column = lane + t * kLanes;
        float4 w;
        if (TRANSPOSED) {
          w = *reinterpret_cast<const float4*>(weights + column * kPitch + k);
        } else {
          const float* const at = weights + k * kPitch + column;
          w = {at[0], at[kPitch], at[2 * kPitch], at[3 * kPitch]};
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          tile[r][t] += x[r].x * w.x;
          tile[r][t] += x[r].y * w.y;
          tile[r][t] += x[r].z * w.z;
          tile[r][t] += x[r].w * w.w;
        }
      }
    }
  }
}

// Writes the thread's tile of [kBlockRows, columns] as activations, with zeros up to the next multiple of kDepth. The
// caller puts a barrier before it; add_product has one behind it.
__device__ __forceinline__ void store_activations(Shared& shared, int columns, const Tile& tile) {
  const int lane = lane_of_group(), first_row = group_of_thread() * kRows;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int column = lane + t * kLanes;
    if (column >= round_up(columns, kDepth)) break;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      shared.activations[first_row + r][column] = column < columns ? tile[r][t] : 0.f;
    }
  }
}

// Replaces each of the thread's numbers, one for each of its rows, by the sum over the threads that own the row.
__device__ __forceinline__ void sum_over_columns(Shared& shared, float (&values)[kRows]) {
  static_assert(kLanes == 64);
  const int warp = threadIdx.x / 32;
  sum_lanes(values);
  __syncthreads();  // The sums before have been read.
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) shared.sums[warp][r] = values[r];
  }
  __syncthreads();  // The sums of all warps are there.
#pragma unroll
  for (int r = 0; r < kRows; ++r) values[r] += shared.sums[warp ^ 1][r];
}

}  // namespace visdet::perceptrons

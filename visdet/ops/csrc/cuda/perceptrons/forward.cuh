// The forward pass: one kernel for all layers of all perceptrons.
//
// A block owns 16 rows of one perceptron. Their activations stay in shared memory from the first layer to the last, and
// all weights pass through shared memory once for each block. What the backward pass needs of a layer is the result of
// its linear part, and mean and deviation of each row. Each number is written by one thread.
#pragma once

#include "cuda/perceptrons/layers.cuh"

namespace visdet::perceptrons {

__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(const __grid_constant__ Net net, const float* __restrict__ input, float* __restrict__ output,
                   float* __restrict__ saved) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Perceptron perceptron = net.perceptrons[blockIdx.y];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockRows + group_of_thread() * kRows;
  const int lane = lane_of_group();

  Tile tile;
  load_tile(input + perceptron.first_column, net.columns, net.layers[perceptron.first_layer].inputs, first, net.rows,
            tile);
  for (int l = 0; l < perceptron.num_layers; ++l) {
    const Layer& layer = net.layers[perceptron.first_layer + l];
    const int outputs = layer.outputs;
    __syncthreads();  // The activations before have been read.
    store_activations(shared, layer.inputs, tile);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = lane + t * kLanes;
      const float bias = column < outputs ? layer.bias[column] : 0.f;
#pragma unroll
      for (int r = 0; r < kRows; ++r) tile[r][t] = bias;
    }
    add_product<true>(shared, layer.weight, layer.inputs, outputs, tile);
    // Columns behind the last one hold what lies in shared memory there.
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = lane + t * kLanes;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (column >= outputs) {
          tile[r][t] = 0;
          continue;
        }
        if (saved != nullptr && layer.saved >= 0 && first + r < net.rows) {
          saved[layer.saved + (first + r) * outputs + column] = tile[r][t];
        }
        if ((layer.kind & kRelu) && tile[r][t] < 0) tile[r][t] = 0;  // NaN stays
      }
    }
    if (layer.kind & kNorm) {
      float mean[kRows] = {}, scale[kRows] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) mean[r] += tile[r][t];
      }
      sum_over_columns(shared, mean);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        mean[r] /= outputs;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (lane + t * kLanes < outputs) scale[r] += (tile[r][t] - mean[r]) * (tile[r][t] - mean[r]);
        }
      }
      sum_over_columns(shared, scale);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        scale[r] = rsqrtf(scale[r] / outputs + net.eps);
        if (saved != nullptr && lane == 0 && first + r < net.rows) {
          *reinterpret_cast<float2*>(saved + layer.statistics + (first + r) * 2) = {mean[r], scale[r]};
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int column = lane + t * kLanes;
        if (column >= outputs) break;
        const float factor = layer.factor[column], offset = layer.offset[column];
#pragma unroll
        for (int r = 0; r < kRows; ++r) tile[r][t] = (tile[r][t] - mean[r]) * scale[r] * factor + offset;
      }
    } else if (layer.kind & kScale) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int column = lane + t * kLanes;
        if (column >= outputs) break;
#pragma unroll
        for (int r = 0; r < kRows; ++r) tile[r][t] *= layer.factor[column];
      }
    }
    if (l + 1 < perceptron.num_layers) continue;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = lane + t * kLanes;
      if (column >= outputs) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first + r < net.rows) {
          output[(first + r) * net.outputs + perceptron.first_output + column] = tile[r][t];
        }
      }
    }
  }
}

}  // namespace visdet::perceptrons

// The backward pass: three kernels for all layers of all perceptrons. Every sum has an order that is always the same.
//
// rows_kernel: a block owns 16 rows of one perceptron and goes from the last layer to the first. It writes the
// gradients of the linear parts, and what its rows give for bias, factor and offset. weights_kernel: a block owns 64 x
// 64 numbers of one weight and adds the products of some rows. totals_kernel: eight threads own a number of the
// parameters' gradients and add what the blocks gave.
#pragma once

#include "cuda/perceptrons/layers.cuh"

namespace visdet::perceptrons {

// bias, factor and offset, in the order in which they follow the weight
constexpr int kVectors = 3;

// What a block's rows give for one of the vectors of a layer. values: the sums over the thread's rows.
__device__ __forceinline__ void store_sums(Shared& shared, const float (&values)[kTiles], int columns, float* sums) {
  const int lane = lane_of_group();
  __syncthreads();  // The sums before have been read.
#pragma unroll
  for (int t = 0; t < kTiles; ++t) shared.columns[group_of_thread()][lane + t * kLanes] = values[t];
  __syncthreads();  // The sums of all groups are there.
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    float total = 0;
#pragma unroll
    for (int group = 0; group < kBlockRows / kRows; ++group) total += shared.columns[group][column];
    sums[column] = total;
  }
}

// The input of the layer's activation, and mean and 1 / deviation of the row where a normalisation needs them.
struct LinearResult {
  float value, mean, scale;

  // The value after ReLU, normalised but without factor and offset.
  __device__ __forceinline__ float activated(int kind) const {
    const float x = (kind & kRelu) && value < 0 ? 0.f : value;
    return kind & kNorm ? (x - mean) * scale : x;
  }
};

__global__ void __launch_bounds__(kThreads, 2)
    rows_kernel(const __grid_constant__ Net net, const float* __restrict__ grad_output, const float* __restrict__ saved,
                float* __restrict__ grad_input, float* __restrict__ grad_linear, float* __restrict__ block_sums) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Perceptron perceptron = net.perceptrons[blockIdx.y];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockRows + group_of_thread() * kRows;
  const int lane = lane_of_group();

  Tile tile;
  load_tile(grad_output + perceptron.first_output, net.outputs,
            net.layers[perceptron.first_layer + perceptron.num_layers - 1].outputs, first, net.rows, tile);
  for (int l = perceptron.num_layers - 1; l >= 0; --l) {
    const Layer& layer = net.layers[perceptron.first_layer + l];
    const int outputs = layer.outputs, kind = layer.kind & ~kFirst;
    float* const sums = block_sums + (static_cast<int64_t>(blockIdx.x) * net.layer_outputs + layer.before) * kVectors;
    // From here on, tile holds the gradient of the layer's result, then that of its linear part.
    if (kind != 0) {
      Tile values;           // activated
      unsigned is_open = 0;  // a bit for each number that ReLU lets through
      float scale[kRows], of_grad[kRows] = {}, of_products[kRows] = {};
      float of_factor[kTiles] = {}, of_offset[kTiles] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        LinearResult result{};
        const bool is_row = first + r < net.rows;
        if ((kind & kNorm) && is_row) {
          const float2 row = *reinterpret_cast<const float2*>(saved + layer.statistics + (first + r) * 2);
          result.mean = row.x, result.scale = row.y;
        }
        scale[r] = result.scale;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int column = lane + t * kLanes;
          values[r][t] = 0;
          if (column >= outputs || !is_row) continue;
          result.value = saved[layer.saved + (first + r) * outputs + column];
          values[r][t] = result.activated(kind);
          if (!((kind & kRelu) && result.value <= 0)) is_open |= 1u << (r * kTiles + t);
        }
      }
      if (kind & (kNorm | kScale)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int column = lane + t * kLanes;
          const float factor = column < outputs ? layer.factor[column] : 0.f;
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            of_factor[t] += tile[r][t] * values[r][t];
            of_offset[t] += tile[r][t];
            tile[r][t] *= factor;
            of_grad[r] += tile[r][t];
            of_products[r] += tile[r][t] * values[r][t];
          }
        }
        store_sums(shared, of_factor, outputs, sums + outputs);
      }
      if (kind & kNorm) {
        store_sums(shared, of_offset, outputs, sums + 2 * outputs);
        sum_over_columns(shared, of_grad);
        sum_over_columns(shared, of_products);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            tile[r][t] = scale[r] * (tile[r][t] - (of_grad[r] + values[r][t] * of_products[r]) / outputs);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (!(is_open >> (r * kTiles + t) & 1)) tile[r][t] = 0;
        }
      }
    }
    float of_bias[kTiles] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = lane + t * kLanes;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        of_bias[t] += tile[r][t];
        if (column < outputs && first + r < net.rows) {
          grad_linear[layer.before * net.rows + (first + r) * outputs + column] = tile[r][t];
        }
      }
    }
    store_sums(shared, of_bias, outputs, sums);
    if (l == 0 && grad_input == nullptr) return;
    __syncthreads();  // The activations of the layer before have been read.
    store_activations(shared, outputs, tile);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) tile[r][t] = 0;
    }
    add_product<false>(shared, layer.weight, outputs, layer.inputs, tile);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = lane + t * kLanes;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (column >= layer.inputs) {
          tile[r][t] = 0;  // It holds what lies in shared memory there.
        } else if (l == 0 && first + r < net.rows) {
          grad_input[(first + r) * net.columns + perceptron.first_column + column] = tile[r][t];
        }
      }
    }
  }
}

constexpr int kWeightTile = 64;  // rows and columns of the part of a weight that a block owns
constexpr int kWeightThreads = 256;

inline __host__ __device__ int weight_tiles(const Layer& layer) {
  return (layer.outputs + kWeightTile - 1) / kWeightTile * ((layer.inputs + kWeightTile - 1) / kWeightTile);
}

// blockIdx.x counts the parts of all weights, blockIdx.y the runs of rows. A thread owns 4 x 4 numbers. parts is
// [runs, num_parameters], of which only the weights are written.
__global__ void __launch_bounds__(kWeightThreads)
    weights_kernel(const __grid_constant__ Net net, const float* __restrict__ input, const float* __restrict__ saved,
                   const float* __restrict__ grad_linear, int64_t rows_of_run, float* __restrict__ parts) {
  constexpr int kPitch = kWeightTile + 4, kLoads = kDepth * kWeightTile / kWeightThreads;
  __shared__ __align__(16) float shared_grads[2][kDepth][kPitch];
  __shared__ __align__(16) float shared_inputs[2][kDepth][kPitch];
  int l = 0, tile = blockIdx.x;
  while (tile >= weight_tiles(net.layers[l])) tile -= weight_tiles(net.layers[l++]);
  const Layer& layer = net.layers[l];
  const int columns = (layer.inputs + kWeightTile - 1) / kWeightTile;
  const int first_output = tile / columns * kWeightTile, first_input = tile % columns * kWeightTile;
  const int64_t begin = blockIdx.y * rows_of_run, end = min(begin + rows_of_run, net.rows);

  // A thread loads one column of either factor, every few rows.
  const int column = threadIdx.x % kWeightTile, first_row = threadIdx.x / kWeightTile;
  const bool has_output = first_output + column < layer.outputs, has_input = first_input + column < layer.inputs;
  const float* const grads = grad_linear + layer.before * net.rows + first_output + column;
  const bool is_first = layer.kind & kFirst;
  const Layer& source = net.layers[is_first ? l : l - 1];
  const int kind = is_first ? 0 : source.kind;
  int first_column = 0;
  for (int p = 0; p < net.count; ++p) {
    if (net.perceptrons[p].first_layer == l) first_column = net.perceptrons[p].first_column;
  }
  const float* const inputs = (is_first ? input + first_column : saved + source.saved) + first_input + column;
  const int64_t input_stride = is_first ? net.columns : layer.inputs;
  float factor = 1, offset = 0;
  if (has_input && (kind & (kNorm | kScale))) factor = source.factor[first_input + column];
  if (has_input && (kind & kNorm)) offset = source.offset[first_input + column];

  float next_grads[kLoads], next_inputs[kLoads];
  const auto load = [&](int64_t row0) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t row = row0 + first_row + i * (kWeightThreads / kWeightTile);
      const bool is_row = row < end;
      next_grads[i] = is_row && has_output ? grads[row * layer.outputs] : 0.f;
      next_inputs[i] = 0;
      if (!is_row || !has_input) continue;
      LinearResult result{inputs[row * input_stride], 0, 0};
      if (kind & kNorm) {
        const float2 statistics = *reinterpret_cast<const float2*>(saved + source.statistics + row * 2);
        result.mean = statistics.x, result.scale = statistics.y;
      }
      next_inputs[i] = result.activated(kind) * factor + offset;
    }
  };
  float sums[4][4] = {};
  const int row4 = threadIdx.x / 16 * 4, column4 = threadIdx.x % 16 * 4;
  load(begin);
  for (int64_t row0 = begin, stage = 0; row0 < end; row0 += kDepth, stage ^= 1) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      shared_grads[stage][first_row + i * (kWeightThreads / kWeightTile)][column] = next_grads[i];
      shared_inputs[stage][first_row + i * (kWeightThreads / kWeightTile)][column] = next_inputs[i];
    }
    __syncthreads();  // The stage is complete, and nobody reads the other one.
    if (row0 + kDepth < end) load(row0 + kDepth);
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 g = *reinterpret_cast<const float4*>(&shared_grads[stage][k][row4]);
      const float4 x = *reinterpret_cast<const float4*>(&shared_inputs[stage][k][column4]);
      const float of_row[4] = {g.x, g.y, g.z, g.w}, of_column[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += of_row[i] * of_column[j];
      }
    }
  }
  float* const weight = parts + blockIdx.y * net.num_parameters + layer.gradients;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int o = first_output + row4 + i, c = first_input + column4 + j;
      if (o < layer.outputs && c < layer.inputs) weight[static_cast<int64_t>(o) * layer.inputs + c] = sums[i][j];
    }
  }
}

constexpr int kTotalThreads = 256;
constexpr int kTotals = 32;  // numbers that a block owns

// Eight threads of a block own a number, and each of them adds every eighth part of it.
__global__ void __launch_bounds__(kTotalThreads)
    totals_kernel(const __grid_constant__ Net net, const float* __restrict__ parts, int runs,
                  const float* __restrict__ block_sums, int blocks, float* __restrict__ totals) {
  constexpr int kGroups = kTotalThreads / kTotals;
  __shared__ float shared[kTotalThreads];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kTotals + threadIdx.x % kTotals;
  const int group = threadIdx.x / kTotals;
  float sum = 0;
  if (number < net.num_parameters) {
    int l = net.num_layers - 1;
    while (net.layers[l].gradients > number) --l;
    const Layer& layer = net.layers[l];
    const int64_t at = number - layer.gradients, vectors = static_cast<int64_t>(layer.outputs) * layer.inputs;
    const bool is_weight = at < vectors;
    const int64_t step = is_weight ? net.num_parameters : static_cast<int64_t>(net.layer_outputs) * kVectors;
    const float* const from = is_weight ? parts + number : block_sums + layer.before * kVectors + (at - vectors);
    const int count = is_weight ? runs : blocks;
#pragma unroll 4
    for (int part = group; part < count; part += kGroups) sum += from[part * step];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();  // The sums of all groups are there.
  if (group > 0 || number >= net.num_parameters) return;
  for (int g = 1; g < kGroups; ++g) sum += shared[g * kTotals + threadIdx.x];
  totals[number] = sum;
}

}  // namespace visdet::perceptrons

// Sums of the columns of several tall matrices, in float32 or float64 and always in the same order: the gradients of
// biases. The contract is in ../ms_deform_attn_projected.cpp.
//
// One launch sums the rows of all matrices: a block owns some rows of one of them, and a thread adds VEC neighbouring
// columns of every few of these rows. A second, small launch adds the sums of the blocks.
#include <algorithm>
#include <vector>

#include "common/launch.h"
#include "common/values.cuh"

namespace visdet::column_sums {
namespace {

constexpr int kMaxMatrices = 4;  // of a launch
constexpr int kThreads = 256;    // of either kernel
constexpr int kMinRows = 64;     // of a block
constexpr int kColumns = 32;     // of a block of the second kernel
constexpr int kInFlight = 4;     // loads of a thread

struct Matrix {
  const void* data;  // [rows, columns]
  int64_t rows;
  int64_t first_sum;    // where the sums of its blocks begin, [blocks, columns]
  int64_t first_total;  // where its columns begin in the result
  int32_t columns, first_block, blocks;
};
struct Matrices {
  Matrix at[kMaxMatrices];
  int32_t count, rows;  // rows: of a block
};

// A block sums some rows of a matrix. Its threads form n groups, each with a thread for each pack of columns. Group g
// adds every n-th row, from row g on.
template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads) block_sums_kernel(const Matrices matrices, A* __restrict__ block_sums) {
  __shared__ A shared[kThreads * VEC];
  int m = 0;
  while (m + 1 < matrices.count && static_cast<int>(blockIdx.x) >= matrices.at[m + 1].first_block) ++m;
  const Matrix matrix = matrices.at[m];
  const int block = blockIdx.x - matrix.first_block, packs = matrix.columns / VEC;
  const int64_t first = static_cast<int64_t>(block) * matrices.rows, end = min(first + matrices.rows, matrix.rows);
  const T* data = static_cast<const T*>(matrix.data);
  A* const sums = block_sums + matrix.first_sum + static_cast<int64_t>(block) * matrix.columns;
  for (int pack0 = 0; pack0 < packs; pack0 += kThreads) {
    const int width = min(packs - pack0, kThreads), groups = kThreads / width;
    const int group = threadIdx.x / width, pack = threadIdx.x - group * width;
    const T* column = data + static_cast<int64_t>(pack0 + pack) * VEC;
    A sum[VEC] = {};
    if (group < groups) {
      for (int64_t row = first + group; row < end; row += kInFlight * groups) {
        Pack<T, VEC> values[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int64_t at = row + i * groups;
          values[i] = {};
          if (at < end) values[i] = *reinterpret_cast<const Pack<T, VEC>*>(column + at * matrix.columns);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          A row_values[VEC];
          unpack(values[i], row_values);
#pragma unroll
          for (int v = 0; v < VEC; ++v) sum[v] += row_values[v];
        }
      }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) shared[threadIdx.x * VEC + v] = sum[v];
    __syncthreads();  // the sums of the groups are complete
    for (int c = threadIdx.x; c < width * VEC; c += kThreads) {
      A total = 0;
      for (int g = 0; g < groups; ++g) total += shared[g * width * VEC + c];
      sums[pack0 * VEC + c] = total;
    }
    __syncthreads();  // the sums have been read
  }
}

// A block adds the sums of all blocks for kColumns columns of a matrix.
template <typename A, typename O>
__global__ void __launch_bounds__(kThreads)
    total_kernel(const Matrices matrices, const A* __restrict__ block_sums, O* __restrict__ totals) {
  constexpr int kGroups = kThreads / kColumns;
  __shared__ A shared[kThreads];
  const Matrix matrix = matrices.at[blockIdx.y];
  const int group = threadIdx.x / kColumns, c = blockIdx.x * kColumns + threadIdx.x % kColumns;
  A sum = 0;
  if (c < matrix.columns) {
#pragma unroll 4
    for (int b = group; b < matrix.blocks; b += kGroups) {
      sum += block_sums[matrix.first_sum + static_cast<int64_t>(b) * matrix.columns + c];
    }
  }
  shared[threadIdx.x] = sum;
  __syncthreads();  // the sums of the groups are complete
  if (group > 0 || c >= matrix.columns) return;
  for (int g = 1; g < kGroups; ++g) sum += shared[g * kColumns + threadIdx.x];
  totals[matrix.first_total + c] = from_accumulate<O>(sum);
}

Tensor forward(std::vector<Tensor> matrices, ScalarType type) {
  VISDET_CHECK("column_sums", !matrices.empty(), "matrices must not be empty");
  const ScalarType from = matrices[0].scalar_type();
  VISDET_CHECK("column_sums", is_value_dtype(from) && (type == from || type == accumulate_dtype(from)),
               "dtype must be that of matrices or of their sums, got ", torch::headeronly::toString(type), " for ",
               dtype_text(matrices[0]));
  int64_t columns = 0;
  bool are_packs = true;
  const int64_t vec = from == ScalarType::Double ? 1 : vector_values(matrices[0]);
  for (Tensor& matrix : matrices) {
    VISDET_CHECK("column_sums",
                 matrix.dim() == 2 && matrix.scalar_type() == from && on_device_of(matrices[0], matrix) &&
                     matrix.size(1) < (int64_t{1} << 30),
                 "matrices must be [rows, columns], of one type, on one device, of fewer than 2^30 columns, got ",
                 shape_text(matrix), " of ", dtype_text(matrix), " beside ", dtype_text(matrices[0]));
    matrix = dense(matrix);
    columns += matrix.size(1);
    are_packs = are_packs && matrix.size(1) % vec == 0 && aligned(matrix, kVectorBytes);
  }
  const DeviceScope scope(matrices[0]);
  Tensor totals = new_empty(matrices[0], {columns}, type);
  const int64_t wanted_blocks = 4 * scope.device().multiprocessors;
  int64_t first_total = 0;
  for (size_t first = 0; first < matrices.size(); first += kMaxMatrices) {
    const size_t count = std::min<size_t>(matrices.size() - first, kMaxMatrices);
    int64_t rows = 0, blocks = 0, numbers = 0, most_columns = 0;
    for (size_t m = 0; m < count; ++m) rows += matrices[first + m].size(0);
    Matrices some{};
    some.count = static_cast<int32_t>(count);
    const int64_t block_rows = std::max<int64_t>(ceil_div(rows, wanted_blocks), kMinRows);
    VISDET_CHECK("column_sums", block_rows < (int64_t{1} << 31), "too many rows: ", rows);
    some.rows = static_cast<int32_t>(block_rows);
    for (size_t m = 0; m < count; ++m) {
      const Tensor& matrix = matrices[first + m];
      const int64_t its_blocks = ceil_div(matrix.size(0), block_rows);
      some.at[m] = {matrix.const_data_ptr(),
                    matrix.size(0),
                    numbers,
                    first_total,
                    static_cast<int32_t>(matrix.size(1)),
                    static_cast<int32_t>(blocks),
                    static_cast<int32_t>(its_blocks)};
      blocks += its_blocks, numbers += its_blocks * matrix.size(1), first_total += matrix.size(1);
      most_columns = std::max(most_columns, matrix.size(1));
    }
    if (most_columns == 0) continue;
    const Tensor sums = new_empty(totals, {numbers}, accumulate_dtype(from));
    dispatch_value_type(from, [&](auto value_tag, auto accumulate_tag) {
      using T = decltype(value_tag);
      using A = decltype(accumulate_tag);
      auto* of_blocks = mutable_data_of<A>(sums);
      constexpr int kVec = sizeof(T) == 8 ? 1 : kVectorValues<T>;
      launch({"column_sums", "block_sums_kernel", scope, blocks, kThreads},
             are_packs ? block_sums_kernel<T, A, kVec> : block_sums_kernel<T, A, 1>, some, of_blocks);
      const Launch last{"column_sums",
                        "total_kernel",
                        scope,
                        {ceil_div(most_columns, kColumns), static_cast<int64_t>(count)},
                        kThreads};
      if (type == from) {
        launch(last, total_kernel<A, T>, some, of_blocks, mutable_data_of<T>(totals));
      } else {
        launch(last, total_kernel<A, A>, some, of_blocks, mutable_data_of<A>(totals));
      }
    });
  }
  return totals;
}

}  // namespace
}  // namespace visdet::column_sums

VISDET_CUDA_OPERATORS(column_sums, m) { m.impl("column_sums", TORCH_BOX(&visdet::column_sums::forward)); }

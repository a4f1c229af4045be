// The sums of a tall matrix's columns, in float32 or float64 and always in the same order: the gradient of a bias. The
// contract is in ../autocast_linear.cpp.
//
// A block of the first kernel owns some rows, and a thread adds VEC neighbouring columns of every few of these rows.
// The second, small kernel adds the sums of the blocks.
#include <algorithm>

#include "common/launch.h"
#include "common/values.cuh"

namespace visdet::column_sums {
namespace {

constexpr int kThreads = 256;  // of either kernel
constexpr int kMinRows = 64;   // of a block
constexpr int kColumns = 32;   // of a block of the second kernel
constexpr int kInFlight = 4;   // loads of a thread

// A block sums block_rows rows of data [rows, columns]. Its threads form n groups, each with a thread for each pack of
// columns. Group g adds every n-th row, from row g on.
template <typename T, typename A, int VEC>
__global__ void __launch_bounds__(kThreads)
    block_sums_kernel(const T* __restrict__ data, int64_t rows, int columns, int64_t block_rows,
                      A* __restrict__ block_sums /* [blocks, columns] */) {
  __shared__ A shared[kThreads * VEC];
  const int packs = columns / VEC;
  const int64_t first = blockIdx.x * block_rows, end = min(first + block_rows, rows);
  A* const sums = block_sums + static_cast<int64_t>(blockIdx.x) * columns;
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
          if (at < end) values[i] = *reinterpret_cast<const Pack<T, VEC>*>(column + at * columns);
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

// A block adds the sums of all blocks for kColumns columns.
template <typename A, typename O>
__global__ void __launch_bounds__(kThreads)
    total_kernel(const A* __restrict__ block_sums, int blocks, int columns, O* __restrict__ totals) {
  constexpr int kGroups = kThreads / kColumns;
  __shared__ A shared[kThreads];
  const int group = threadIdx.x / kColumns, c = blockIdx.x * kColumns + threadIdx.x % kColumns;
  A sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (int b = group; b < blocks; b += kGroups) sum += block_sums[static_cast<int64_t>(b) * columns + c];
  }
  shared[threadIdx.x] = sum;
  __syncthreads();  // the sums of the groups are complete
  if (group > 0 || c >= columns) return;
  for (int g = 1; g < kGroups; ++g) sum += shared[g * kColumns + threadIdx.x];
  totals[c] = from_accumulate<O>(sum);
}

Tensor forward(const Tensor& matrix_in, ScalarType type) {
  const ScalarType from = matrix_in.scalar_type();
  VISDET_CHECK("column_sums", is_value_dtype(from) && (type == from || type == accumulate_dtype(from)),
               "dtype must be that of matrix or of its sums, got ", torch::headeronly::toString(type), " for ",
               dtype_text(matrix_in));
  VISDET_CHECK("column_sums", matrix_in.dim() == 2 && matrix_in.size(1) < (int64_t{1} << 30),
               "matrix must be [rows, columns], of fewer than 2^30 columns, got ", shape_text(matrix_in));
  const DeviceScope scope(matrix_in);
  const Tensor matrix = dense(matrix_in);
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  Tensor totals = new_empty(matrix, {columns}, type);
  if (columns == 0) return totals;
  const int64_t block_rows = std::max<int64_t>(ceil_div(rows, 4 * scope.device().multiprocessors), kMinRows);
  const int64_t blocks = ceil_div(rows, block_rows);
  const Tensor sums = new_empty(totals, {blocks, columns}, accumulate_dtype(from));
  const bool are_packs =
      from != ScalarType::Double && columns % vector_values(matrix) == 0 && aligned(matrix, kVectorBytes);
  dispatch_value_type(from, [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto* of_blocks = mutable_data_of<A>(sums);
    constexpr int kVec = sizeof(T) == 8 ? 1 : kVectorValues<T>;
    launch({"column_sums", "block_sums_kernel", scope, blocks, kThreads},
           are_packs ? block_sums_kernel<T, A, kVec> : block_sums_kernel<T, A, 1>,
           static_cast<const T*>(matrix.const_data_ptr()), rows, static_cast<int>(columns), block_rows, of_blocks);
    const Launch last{"column_sums", "total_kernel", scope, ceil_div(columns, kColumns), kThreads};
    if (type == from) {
      launch(last, total_kernel<A, T>, of_blocks, static_cast<int>(blocks), static_cast<int>(columns),
             mutable_data_of<T>(totals));
    } else {
      launch(last, total_kernel<A, A>, of_blocks, static_cast<int>(blocks), static_cast<int>(columns),
             mutable_data_of<A>(totals));
    }
  });
  return totals;
}

}  // namespace
}  // namespace visdet::column_sums

VISDET_CUDA_OPERATORS(column_sums, m) { m.impl("column_sums", TORCH_BOX(&visdet::column_sums::forward)); }

// Conversions, products and shapes of matrices, by torch's operators.
#pragma once

#include <optional>
#include <vector>

#include "common/aten.h"

namespace visdet {

inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// Returns contiguous rows [..., C] as a matrix.
inline Tensor as_matrix(const Tensor& rows) {
  int64_t count = 1;
  for (int64_t i = 0; i + 1 < rows.dim(); ++i) count *= rows.size(i);
  return shaped(rows, {count, rows.size(rows.dim() - 1)});
}

inline Tensor transposed(const Tensor& matrix) {
  return strided(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

// The elements that a tensor takes in memory of several tensors, each of which starts at a multiple of 64.
inline int64_t padded_numel(const Tensor& tensor) { return (tensor.numel() + 63) / 64 * 64; }

// Returns each of the tensors, contiguous and in this type: itself, or a part of one piece of memory that one launch
// fills.
inline std::vector<Tensor> converted(const std::vector<Tensor>& tensors, ScalarType type) {
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.scalar_type() != type) total += padded_numel(tensor);
  }
  std::optional<Tensor> memory;
  std::vector<Tensor> all, to, from;
  int64_t used = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.scalar_type() == type) {
      all.push_back(dense(tensor));
      continue;
    }
    if (!memory) memory = torch::stable::new_empty(tensor, {total}, type);
    all.push_back(shaped(*memory, sizes_of(tensor), used));
    used += padded_numel(tensor);
    if (tensor.is_contiguous()) {
      to.push_back(all.back()), from.push_back(tensor);
    } else {
      torch::stable::copy_(all.back(), tensor);
    }
  }
  if (!to.empty()) call_for<0>("aten::_foreach_copy_", "", to, from, false);
  return all;
}

// Returns the product of two matrices in this type, in which a CUDA kernel writes it. Written into a tensor, it takes
// no part in autocast, which may be on in a backward pass and would round the matrices to its type.
inline Tensor product(const Tensor& a, const Tensor& b, ScalarType type) {
  if (a.is_cuda() && a.scalar_type() != type) return call("aten::mm", "dtype", a, b, type);
  const Tensor to = new_empty(a, {a.size(0), b.size(1)});
  call("aten::mm", "out", a, b, to);
  return to.scalar_type() == type ? to : torch::stable::to(to, type);
}

}  // namespace visdet

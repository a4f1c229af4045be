// What operators need that prepare the arguments of deformable_aggregation by kernels of their own: the rule by which a
// pair is visible, and the operator's two directions.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "common/values.cuh"

namespace visdet::deformable_aggregation {

// Whether a (point, camera) pair at this location counts; NaN does not.
template <typename A>
__device__ __forceinline__ bool is_visible(const Pack<A, 2>& location) {
  const A x = location.at[0], y = location.at[1];
  return x > 0 && x < 1 && y > 0 && y < 1;
}

Tensor forward(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts, const Tensor& locations,
               const Tensor& weights);

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& features,
                                            const Tensor& level_shapes, const Tensor& level_starts,
                                            const Tensor& locations, const Tensor& weights, bool deterministic);

}  // namespace visdet::deformable_aggregation

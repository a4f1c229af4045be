// The operators deformable_aggregation and deformable_aggregation_backward on CUDA, for operators that prepare their
// arguments by kernels of their own.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace visdet::deformable_aggregation {

using torch::stable::Tensor;

Tensor forward(const Tensor& features, const Tensor& level_shapes, const Tensor& level_starts, const Tensor& locations,
               const Tensor& weights);

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& features,
                                            const Tensor& level_shapes, const Tensor& level_starts,
                                            const Tensor& locations, const Tensor& weights, bool deterministic);

}  // namespace visdet::deformable_aggregation

// deformable_aggregation's CPU entries, for the operators that prepare its arguments in kernels of their own.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace visdet {

torch::stable::Tensor deformable_aggregation_cpu(const torch::stable::Tensor& features,
                                                 const torch::stable::Tensor& level_shapes,
                                                 const torch::stable::Tensor& level_starts,
                                                 const torch::stable::Tensor& locations,
                                                 const torch::stable::Tensor& weights);

std::tuple<torch::stable::Tensor, torch::stable::Tensor, torch::stable::Tensor> deformable_aggregation_backward_cpu(
    const torch::stable::Tensor& grad_output, const torch::stable::Tensor& features,
    const torch::stable::Tensor& level_shapes, const torch::stable::Tensor& level_starts,
    const torch::stable::Tensor& locations, const torch::stable::Tensor& weights, bool deterministic);

}  // namespace visdet

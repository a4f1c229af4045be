// Multi-scale deformable attention with its four linear layers, forward and backward, on any device. Each direction is
// one call from Python, since separate calls cost the host more time than their kernels take. What it computes, and
// when it may stand for separate layers, is said in visdet/ops/ms_deform_attn_projected.py, its only caller.
#include <algorithm>
#include <array>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "common/matrices.h"

namespace visdet {
namespace {

// The layers stand in the order of the parameters.
enum Layer { kOffsets, kLogits, kValue, kOutput, kLayers };

// What a forward leaves behind its output for the backward, in the order of its list. predictors: the weights of
// kOffsets, and below them those of kLogits, which read the same rows.
struct Saved {
  Tensor query, value, predictors, value_weight, output_weight, sampled, maps, offsets, logits;

  std::vector<Tensor> after(const Tensor& output) const {
    return {output, query, value, predictors, value_weight, output_weight, sampled, maps, offsets, logits};
  }
  static Saved of(const std::vector<Tensor>& list) {
    VISDET_CHECK("ms_deform_attn_projected_backward", list.size() == 9, "saved must be 9 tensors, got ", list.size());
    return {list[0], list[1], list[2], list[3], list[4], list[5], list[6], list[7], list[8]};
  }
};

// Returns the rows of two matrices, one below the other.
Tensor stacked(const Tensor& upper, const Tensor& lower) {
  return call("aten::cat", "", std::vector<Tensor>{upper, lower}, int64_t{0});
}

// Sets rows [B, S] of maps [B, S, C], where the mask says so, to zero. On CUDA, torch's kernel takes 23 us for 18 MB.
void clear(Tensor& maps, const std::optional<Tensor>& mask) {
  if (!mask) return;
  if (maps.is_cuda() && maps.is_contiguous() && maps.size(2) * maps.element_size() % 16 == 0) {
    maps = call("visdet::clear_rows_", "", maps, *mask);
    return;
  }
  Tensor zero = torch::stable::empty({}, maps.scalar_type(), std::nullopt,
                                     torch::stable::Device(torch::headeronly::DeviceType::CPU));
  torch::stable::zero_(zero);
  call("aten::masked_fill_", "Tensor", maps, torch::stable::unsqueeze(*mask, -1), zero);
}

// The arguments of the operator in the middle: maps [B, S, G, C], offsets [B, Q, G, K, 2] and logits [B, Q, G, K].
struct Heads {
  Tensor maps, offsets, logits;
};
Heads heads_of(const Saved& saved, int64_t G, const std::vector<int64_t>& num_points) {
  const int64_t K = std::accumulate(num_points.begin(), num_points.end(), int64_t{0});
  const auto check = [&](const char* name, const Tensor& rows, int64_t columns) {
    VISDET_CHECK("ms_deform_attn_projected", rows.size(2) == columns, "the layer of ", name, " must have ", columns,
                 " outputs for ", G, " heads and ", K, " points, got ", rows.size(2));
  };
  VISDET_CHECK("ms_deform_attn_projected", G > 0, "num_heads must be positive, got ", G);
  const int64_t C = saved.maps.size(2) / G;
  check("value", saved.maps, G * C), check("offsets", saved.offsets, G * K * 2), check("logits", saved.logits, G * K);
  const auto rows = [](const Tensor& tensor, std::initializer_list<int64_t> sizes) {
    std::vector<int64_t> all{tensor.size(0), tensor.size(1)};
    return shaped(tensor, (all.insert(all.end(), sizes), all));
  };
  return {rows(saved.maps, {G, C}), rows(saved.offsets, {G, K, 2}), rows(saved.logits, {G, K})};
}

std::vector<Tensor> ms_deform_attn_projected(const Tensor& query, const Tensor& value,
                                             const std::optional<Tensor>& identity,
                                             const std::optional<Tensor>& key_padding_mask, const Tensor& level_shapes,
                                             const Tensor& level_starts, const Tensor& reference_points,
                                             std::vector<int64_t> num_points, int64_t num_heads,
                                             std::vector<Tensor> parameters, ScalarType type) {
  VISDET_CHECK("ms_deform_attn_projected", parameters.size() == 2 * kLayers,
               "parameters must be a weight and a bias of each of 4 layers, got ", parameters.size(), " tensors");
  const Tensor &of_offsets = parameters[2 * kOffsets], &of_logits = parameters[2 * kLogits];
  VISDET_CHECK("ms_deform_attn_projected",
               of_offsets.dim() == 2 && of_logits.dim() == 2 && of_offsets.size(1) == of_logits.size(1),
               "the layers of offsets and logits must read the same rows, got weights of ", shape_text(of_offsets),
               " and ", shape_text(of_logits));
  // Where both are converted, the second one lies behind the first in memory.
  const bool are_stacked = of_offsets.scalar_type() != type && of_logits.scalar_type() != type &&
                           padded_numel(of_offsets) == of_offsets.numel();
  std::vector<Tensor> inputs;  // weights, biases, query, value
  for (const size_t bias : {0, 1}) {
    for (size_t layer = 0; layer < kLayers; ++layer) inputs.push_back(parameters[2 * layer + bias]);
  }
  inputs.push_back(query), inputs.push_back(value);
  const std::vector<Tensor> all = converted(inputs, type);
  const auto linear = [&](const Tensor& rows, Layer layer) {
    return call("aten::linear", "", rows, all[layer], std::optional<Tensor>(all[kLayers + layer]));
  };
  const Tensor &rows = all[2 * kLayers], &texels = all[2 * kLayers + 1];
  Tensor maps = linear(texels, kValue);
  clear(maps, key_padding_mask);
  const int64_t columns = of_offsets.size(1);
  Saved saved{rows,
              texels,
              are_stacked ? strided(all[kOffsets], {of_offsets.size(0) + of_logits.size(0), columns}, {columns, 1})
                          : stacked(all[kOffsets], all[kLogits]),
              all[kValue],
              all[kOutput],
              maps,
              maps,
              linear(rows, kOffsets),
              linear(rows, kLogits)};
  const Heads heads = heads_of(saved, num_heads, num_points);
  saved.sampled = call("visdet::ms_deform_attn_fused", "", heads.maps, level_shapes, level_starts, reference_points,
                       heads.offsets, heads.logits, num_points);
  const Tensor output = linear(saved.sampled, kOutput);
  // torch's sum takes a factor of a kind that cannot be handed over from here, its difference does not.
  // What linear returns counts as a view, which could not be changed in place.
  return saved.after(identity ? torch::stable::subtract(*identity, output, -1.0) : shaped(output, sizes_of(output)));
}

// Returns the gradients of value, of reference points, and of each query's offsets and then logits, [B, Q, G * K * 3].
// CUDA has kernels that write them so.
std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_fused_backward_joined(
    const Tensor& grad_output, const Tensor& value, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& reference_points, const Tensor& offsets, const Tensor& logits, std::vector<int64_t> num_points,
    bool needs_reference, bool deterministic) {
  const auto [of_value, of_reference, of_offsets, of_logits] =
      call_for<4>("visdet::ms_deform_attn_fused_backward", "", grad_output, value, level_shapes, level_starts,
                  reference_points, offsets, logits, num_points, needs_reference, deterministic);
  const auto rows = [](const Tensor& grad, int64_t columns) {
    return shaped(grad, {grad.size(0), grad.size(1), columns});
  };
  const int64_t samples = logits.size(2) * logits.size(3);  // of a query
  return {
      of_value, of_reference,
      call("aten::cat", "", std::vector<Tensor>{rows(of_offsets, 2 * samples), rows(of_logits, samples)}, int64_t{2})};
}

// Returns the sums of each matrix's columns, one matrix after another, in this type. CUDA has a kernel; elsewhere a
// product with ones takes no longer than torch's sum, and a tenth of its time where 16 bit are summed in float32.
Tensor column_sums(std::vector<Tensor> matrices, ScalarType type) {
  std::vector<Tensor> sums;
  for (const Tensor& matrix : matrices) {
    const Tensor ones = torch::stable::fill_(torch::stable::new_empty(matrix, {1, matrix.size(0)}), 1.0);
    sums.push_back(shaped(product(ones, matrix, type), {matrix.size(1)}));
  }
  return call("aten::cat", "", sums, int64_t{0});
}

// wanted: of reference_points, query, value and the parameters, 0 where its gradient is not asked for, 1 for one in the
// type of the saved tensors and 2 for one in float32. Returned are those asked for, in this order.
std::vector<Tensor> ms_deform_attn_projected_backward(const Tensor& grad_output_in, std::vector<Tensor> saved_list,
                                                      const std::optional<Tensor>& key_padding_mask,
                                                      const Tensor& level_shapes, const Tensor& level_starts,
                                                      const Tensor& reference_points, std::vector<int64_t> num_points,
                                                      int64_t num_heads, std::vector<int64_t> wanted,
                                                      bool deterministic) {
  constexpr size_t kReference = 0, kQuery = 1, kTexels = 2, kParameters = 3;
  VISDET_CHECK("ms_deform_attn_projected_backward", wanted.size() == kParameters + 2 * kLayers,
               "wanted must be 11 numbers, got ", wanted.size());
  const Saved saved = Saved::of(saved_list);
  const Heads heads = heads_of(saved, num_heads, num_points);
  const ScalarType type = saved.sampled.scalar_type();
  const auto type_of = [&](size_t i) { return wanted[i] == 2 ? ScalarType::Float : type; };
  const auto weight_of = [](size_t layer) { return kParameters + 2 * layer; };
  const auto bias_of = [](size_t layer) { return kParameters + 2 * layer + 1; };
  const auto wants = [&](std::initializer_list<size_t> any) {
    return std::any_of(any.begin(), any.end(), [&](size_t i) { return wanted[i] != 0; });
  };

  const Tensor grad_output =
      as_matrix(dense(grad_output_in.scalar_type() == type ? grad_output_in : torch::stable::to(grad_output_in, type)));
  const Tensor grad_sampled = shaped(product(grad_output, saved.output_weight, type), sizes_of(saved.sampled));
  auto [grad_heads, grad_reference, grad_predictions] = call_for<3>(
      "visdet::ms_deform_attn_fused_backward_joined", "", grad_sampled, heads.maps, level_shapes, level_starts,
      reference_points, heads.offsets, heads.logits, num_points, wanted[kReference] != 0, deterministic);
  Tensor grad_maps = shaped(grad_heads, sizes_of(saved.maps));
  clear(grad_maps, key_padding_mask);
  grad_maps = as_matrix(grad_maps);

  std::vector<std::optional<Tensor>> grads(wanted.size());
  // Takes a part of `whole`, which has the gradients of several tensors.
  const auto give = [&](size_t i, const Tensor& whole, const std::vector<int64_t>& sizes, int64_t offset = 0) {
    if (wanted[i] == 0) return;
    const Tensor own = shaped(whole, sizes, offset);
    grads[i] = own.scalar_type() == type_of(i) ? own : torch::stable::to(own, type_of(i));
  };
  const auto type_for = [&](std::initializer_list<size_t> several) {
    return std::any_of(several.begin(), several.end(), [&](size_t i) { return wanted[i] == 2; }) ? ScalarType::Float
                                                                                                 : type;
  };
  if (wants({kReference})) grads[kReference] = grad_reference;
  if (wants({kTexels})) {
    give(kTexels, product(grad_maps, saved.value_weight, type_of(kTexels)), sizes_of(saved.value));
  }
  std::vector<Tensor> matrices;  // whose columns' sums are the biases' gradients
  const int64_t of_offsets = saved.offsets.size(2), of_logits = saved.logits.size(2);
  if (wants({kQuery, weight_of(kOffsets), weight_of(kLogits), bias_of(kOffsets), bias_of(kLogits)})) {
    const int64_t columns = saved.query.size(2);
    const Tensor grad = as_matrix(grad_predictions);
    if (wants({kQuery})) {
      give(kQuery, product(grad, saved.predictors, type_of(kQuery)), sizes_of(saved.query));
    }
    if (wants({weight_of(kOffsets), weight_of(kLogits)})) {
      const Tensor both =
          product(transposed(grad), as_matrix(saved.query), type_for({weight_of(kOffsets), weight_of(kLogits)}));
      give(weight_of(kOffsets), both, {of_offsets, columns});
      give(weight_of(kLogits), both, {of_logits, columns}, of_offsets * columns);
    }
    if (wants({bias_of(kOffsets), bias_of(kLogits)})) matrices.push_back(grad);
  }
  const auto of_layer = [&](Layer layer, const Tensor& grad, const Tensor& rows) {
    if (wants({weight_of(layer)})) {
      const Tensor weight = product(transposed(grad), as_matrix(rows), type_of(weight_of(layer)));
      give(weight_of(layer), weight, sizes_of(weight));
    }
    if (wants({bias_of(layer)})) matrices.push_back(grad);
  };
  of_layer(kValue, grad_maps, saved.value);
  of_layer(kOutput, grad_output, saved.sampled);
  if (!matrices.empty()) {
    const Tensor sums = call("visdet::column_sums", "", matrices,
                             type_for({bias_of(kOffsets), bias_of(kLogits), bias_of(kValue), bias_of(kOutput)}));
    int64_t offset = 0;
    const auto give_bias = [&](Layer layer, int64_t columns) {
      give(bias_of(layer), sums, {columns}, offset);
      offset += columns;
    };
    if (wants({bias_of(kOffsets), bias_of(kLogits)})) give_bias(kOffsets, of_offsets), give_bias(kLogits, of_logits);
    if (wants({bias_of(kValue)})) give_bias(kValue, grad_maps.size(1));
    if (wants({bias_of(kOutput)})) give_bias(kOutput, grad_output.size(1));
  }

  std::vector<Tensor> given;
  for (const auto& grad : grads) {
    if (grad) given.push_back(*grad);
  }
  return given;
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "ms_deform_attn_projected(Tensor query, Tensor value, Tensor? identity, Tensor? key_padding_mask,"
      " Tensor level_shapes, Tensor level_starts, Tensor reference_points, int[] num_points, int num_heads,"
      " Tensor[] parameters, ScalarType dtype) -> Tensor[]");
  m.def(
      "ms_deform_attn_projected_backward(Tensor grad_output, Tensor[] saved, Tensor? key_padding_mask,"
      " Tensor level_shapes, Tensor level_starts, Tensor reference_points, int[] num_points, int num_heads,"
      " int[] wanted, bool deterministic) -> Tensor[]");
  m.def(
      "ms_deform_attn_fused_backward_joined(Tensor grad_output, Tensor value, Tensor level_shapes,"
      " Tensor level_starts, Tensor reference_points, Tensor offsets, Tensor logits, int[] num_points,"
      " bool needs_reference, bool deterministic) -> (Tensor grad_value, Tensor grad_reference, Tensor grad_joined)");
  m.def("column_sums(Tensor[] matrices, ScalarType dtype) -> Tensor");
  m.def("clear_rows_(Tensor(a!) rows, Tensor mask) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) {
  m.impl("ms_deform_attn_projected", TORCH_BOX(&visdet::ms_deform_attn_projected));
  m.impl("ms_deform_attn_projected_backward", TORCH_BOX(&visdet::ms_deform_attn_projected_backward));
  m.impl("ms_deform_attn_fused_backward_joined", TORCH_BOX(&visdet::ms_deform_attn_fused_backward_joined));
  m.impl("column_sums", TORCH_BOX(&visdet::column_sums));
}

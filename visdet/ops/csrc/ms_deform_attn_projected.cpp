// Multi-scale deformable attention with its four linear layers, forward and backward, on any device: one call from
// Python each, since on the host that calls cost more than what they launch. What it computes and when it may stand for
// separate layers is said in visdet/ops/ms_deform_attn_projected.py, its only caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <vector>

#include "common/aten.h"
#include "common/checks.h"

namespace visdet {
namespace {

// In the order of the parameters: layers of offsets, logits, value and output.
enum Layer { kOffsets, kLogits, kValue, kOutput, kLayers };

// What a forward leaves behind its output for the backward, in the order of its list.
struct Saved {
  Tensor query, value, weights[kLayers], sampled, maps, offsets, logits;

  std::vector<Tensor> after(const Tensor& output) const {
    return {output, query,   value, weights[kOffsets], weights[kLogits], weights[kValue], weights[kOutput], sampled,
            maps,   offsets, logits};
  }
  static Saved of(const std::vector<Tensor>& list) {
    VISDET_CHECK("ms_deform_attn_projected_backward", list.size() == 10, "saved must be 10 tensors, got ", list.size());
    return {list[0], list[1], {list[2], list[3], list[4], list[5]}, list[6], list[7], list[8], list[9]};
  }
};

// Elements that a tensor takes of memory that others share: the next one starts at a multiple of 64.
int64_t place_of(const Tensor& tensor) { return (tensor.numel() + 63) / 64 * 64; }

std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

Tensor as_matrix(const Tensor& rows) { return shaped(rows, {rows.size(0) * rows.size(1), rows.size(2)}); }

Tensor transposed(const Tensor& matrix) {
  return strided(matrix, {matrix.size(1), matrix.size(0)}, {matrix.stride(1), matrix.stride(0)});
}

// Each of the tensors, contiguous and in this type: itself, or a part of one piece of memory that one launch fills.
std::vector<Tensor> converted(const std::vector<Tensor>& tensors, ScalarType type) {
  int64_t total = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.scalar_type() != type) total += place_of(tensor);
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
    used += place_of(tensor);
    if (tensor.is_contiguous()) {
      to.push_back(all.back()), from.push_back(tensor);
    } else {
      torch::stable::copy_(all.back(), tensor);
    }
  }
  if (!to.empty()) call_for<0>("aten::_foreach_copy_", "", to, from, false);
  return all;
}

// Sets rows [B, S] of maps [B, S, C], where the mask says so, to zero.
void clear(Tensor& maps, const std::optional<Tensor>& mask) {
  if (!mask) return;
  Tensor zero = torch::stable::empty({}, maps.scalar_type(), std::nullopt,
                                     torch::stable::Device(torch::headeronly::DeviceType::CPU));
  torch::stable::zero_(zero);
  call("aten::masked_fill_", "Tensor", maps, torch::stable::unsqueeze(*mask, -1), zero);
}

// The product of two matrices, in this type, in which it leaves a CUDA kernel.
Tensor product(const Tensor& a, const Tensor& b, ScalarType type) {
  if (a.scalar_type() == type) return call("aten::mm", "", a, b);
  if (a.is_cuda()) return call("aten::mm", "dtype", a, b, type);
  return torch::stable::to(call("aten::mm", "", a, b), type);
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
                                             const std::optional<Tensor>& key_padding_mask, const Tensor& level_shapes,
                                             const Tensor& level_starts, const Tensor& reference_points,
                                             std::vector<int64_t> num_points, int64_t num_heads,
                                             std::vector<Tensor> parameters, ScalarType type) {
  VISDET_CHECK("ms_deform_attn_projected", parameters.size() == 2 * kLayers,
               "parameters must be a weight and a bias of each of 4 layers, got ", parameters.size(), " tensors");
  parameters.push_back(query), parameters.push_back(value);
  const std::vector<Tensor> all = converted(parameters, type);
  const auto linear = [&](const Tensor& rows, Layer layer) {
    return call("aten::linear", "", rows, all[2 * layer], std::optional<Tensor>(all[2 * layer + 1]));
  };
  const Tensor &rows = all[2 * kLayers], &texels = all[2 * kLayers + 1];
  Tensor maps = linear(texels, kValue);
  clear(maps, key_padding_mask);
  Saved saved{
      rows, texels, {all[0], all[2], all[4], all[6]}, maps, maps, linear(rows, kOffsets), linear(rows, kLogits)};
  const Heads heads = heads_of(saved, num_heads, num_points);
  saved.sampled = call("visdet::ms_deform_attn_fused", "", heads.maps, level_shapes, level_starts, reference_points,
                       heads.offsets, heads.logits, num_points);
  return saved.after(linear(saved.sampled, kOutput));
}

// wanted: of reference_points, query, value and the eight parameters, 0 where its gradient is not asked for, 1 for one
// in the type of grad_output and 2 for one in float32. Returned are those asked for, in this order.
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
  const auto type_of = [&](size_t i) { return wanted[i] == 2 ? ScalarType::Float : grad_output_in.scalar_type(); };

  const Tensor grad_output = as_matrix(dense(grad_output_in));
  const Tensor grad_sampled =
      shaped(call("aten::mm", "", grad_output, saved.weights[kOutput]), sizes_of(saved.sampled));
  auto [grad_heads, grad_reference, grad_offsets, grad_logits] =
      call_for<4>("visdet::ms_deform_attn_fused_backward", "", grad_sampled, heads.maps, level_shapes, level_starts,
                  reference_points, heads.offsets, heads.logits, num_points, wanted[kReference] != 0, deterministic);
  Tensor grad_maps = shaped(grad_heads, sizes_of(saved.maps));
  clear(grad_maps, key_padding_mask);
  grad_maps = as_matrix(grad_maps);

  std::vector<std::optional<Tensor>> grads(wanted.size());
  const auto wants = [&](size_t i) { return wanted[i] != 0; };
  if (wants(kReference)) grads[kReference] = grad_reference;
  if (wants(kTexels)) {
    grads[kTexels] = shaped(product(grad_maps, saved.weights[kValue], type_of(kTexels)), sizes_of(saved.value));
  }
  std::optional<Tensor> most_ones;  // one launch for all biases, none without
  const auto ones = [&](int64_t count) {
    if (!most_ones) {
      const int64_t most = std::max(grad_output.size(0), grad_maps.size(0));
      most_ones = torch::stable::fill_(torch::stable::new_empty(grad_output, {most}), 1.0);
    }
    return shaped(*most_ones, {1, count});
  };
  // Of layers that read the same rows; the columns of grad are theirs, one after another.
  const auto parameters_of = [&](std::vector<Layer> layers, const Tensor& grad, const Tensor& rows) {
    for (const size_t bias : {0, 1}) {
      const auto index = [&](Layer layer) { return kParameters + 2 * layer + bias; };
      const auto is = [&](int64_t kind) {
        return std::any_of(layers.begin(), layers.end(), [&](Layer layer) { return wanted[index(layer)] == kind; });
      };
      if (!is(1) && !is(2)) continue;
      const Tensor left = bias ? ones(grad.size(0)) : transposed(grad);
      const Tensor all = product(left, bias ? grad : rows, is(2) ? ScalarType::Float : grad.scalar_type());
      const int64_t each = bias ? 1 : rows.size(1);  // elements a column
      int64_t offset = 0;
      for (const Layer layer : layers) {
        const int64_t columns = saved.weights[layer].size(0);
        const size_t i = index(layer);
        const Tensor own = bias ? shaped(all, {columns}, offset) : shaped(all, {columns, each}, offset);
        if (wants(i)) grads[i] = own.scalar_type() == type_of(i) ? own : torch::stable::to(own, type_of(i));
        offset += columns * each;
      }
    }
  };
  const std::array<size_t, 5> from_query{kQuery, kParameters, kParameters + 1, kParameters + 2, kParameters + 3};
  if (std::any_of(from_query.begin(), from_query.end(), wants)) {
    const int64_t count = saved.offsets.size(0) * saved.offsets.size(1);
    const auto joined = [](const Tensor& a, const Tensor& b, int64_t dim) {
      return call("aten::cat", "", std::vector<Tensor>{a, b}, dim);
    };
    const Tensor grad = joined(shaped(grad_offsets, {count, saved.offsets.size(2)}),
                               shaped(grad_logits, {count, saved.logits.size(2)}), 1);
    if (wants(kQuery)) {
      const Tensor weights = joined(saved.weights[kOffsets], saved.weights[kLogits], 0);
      grads[kQuery] = shaped(product(grad, weights, type_of(kQuery)), sizes_of(saved.query));
    }
    parameters_of({kOffsets, kLogits}, grad, as_matrix(saved.query));
  }
  parameters_of({kValue}, grad_maps, as_matrix(saved.value));
  parameters_of({kOutput}, grad_output, as_matrix(saved.sampled));

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
      "ms_deform_attn_projected(Tensor query, Tensor value, Tensor? key_padding_mask, Tensor level_shapes,"
      " Tensor level_starts, Tensor reference_points, int[] num_points, int num_heads, Tensor[] parameters,"
      " ScalarType dtype) -> Tensor[]");
  m.def(
      "ms_deform_attn_projected_backward(Tensor grad_output, Tensor[] saved, Tensor? key_padding_mask,"
      " Tensor level_shapes, Tensor level_starts, Tensor reference_points, int[] num_points, int num_heads,"
      " int[] wanted, bool deterministic) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) {
  m.impl("ms_deform_attn_projected", TORCH_BOX(&visdet::ms_deform_attn_projected));
  m.impl("ms_deform_attn_projected_backward", TORCH_BOX(&visdet::ms_deform_attn_projected_backward));
}

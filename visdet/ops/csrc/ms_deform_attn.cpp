// Schemas of ms_deform_attn. Fake tensors, autograd and the plain-torch definition are in visdet/ops/ms_deform_attn.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "ms_deform_attn(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor locations, Tensor weights)"
      " -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor locations, Tensor weights, bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_locations, Tensor grad_weights)");
  m.def(
      "ms_deform_attn_fused(Tensor value, Tensor level_shapes, Tensor level_starts, Tensor reference_points,"
      " Tensor offsets, Tensor logits, int[] num_points) -> Tensor");
  m.def(
      "ms_deform_attn_fused_backward(Tensor grad_output, Tensor value, Tensor level_shapes, Tensor level_starts,"
      " Tensor reference_points, Tensor offsets, Tensor logits, int[] num_points, bool needs_reference,"
      " bool deterministic)"
      " -> (Tensor grad_value, Tensor grad_reference, Tensor grad_offsets, Tensor grad_logits)");
}

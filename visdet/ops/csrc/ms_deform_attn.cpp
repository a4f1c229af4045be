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
}

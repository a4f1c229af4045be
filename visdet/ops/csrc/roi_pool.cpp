// Schemas of roi_pool. Fake tensors, autograd and the plain-torch definition are in visdet/ops/roi_pool.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "roi_pool(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale)"
      " -> (Tensor output, Tensor argmax)");
  m.def(
      "roi_pool_backward(Tensor grad_output, Tensor rois, Tensor argmax, int B, int H, int W)"
      " -> Tensor grad_input");
}

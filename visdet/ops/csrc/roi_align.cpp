// Schemas of roi_align, which has kernels on the CPU alone. Fake tensors, autograd and the plain-torch definition are
// in visdet/ops/roi_align.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "roi_align(Tensor input, Tensor rois, int pooled_height, int pooled_width, float spatial_scale,"
      " int sampling_ratio, bool aligned) -> Tensor output");
  m.def(
      "roi_align_backward(Tensor grad_output, Tensor rois, int B, int H, int W, float spatial_scale,"
      " int sampling_ratio, bool aligned) -> Tensor grad_input");
}

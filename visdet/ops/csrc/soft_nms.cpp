// Schema of soft_nms. The fake tensor and the plain-torch definition are in visdet/ops/nms.py.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "soft_nms(Tensor boxes, Tensor scores, float iou_threshold, float sigma, float min_score, int method, int offset)"
      " -> (Tensor detections, Tensor keep)");
}

// soft_nms: the contract.
//
// boxes [N, 4] (x1, y1, x2, y2) and scores [N], both float64 or both float32, on the CPU. Round i swaps the best box
// at positions i.. (the first of equal scores, numbers before NaN) to position i, multiplies each later score by
//
//   naive (0)     0 where o >= iou_threshold       o: the IoU with box i, sides being x2 - x1 + offset;
//   linear (1)    1 - o where o >= iou_threshold      0 where it is no number
//   gaussian (2)  exp(-o^2 / sigma)
//
// and drops those below min_score: from the front, each hole is filled by the last box that stays. Returns boxes and
// lowered scores [M, 5], and their indices [M], in the order of the positions.
#pragma once

#include "common/checks.h"

namespace visdet {

inline void check_soft_nms(const Tensor& boxes, const Tensor& scores, double sigma, int64_t method) {
  constexpr const char* op = "soft_nms";
  check_shape(op, "boxes", boxes, {"N", 4});
  check_sum_type(op, "boxes", boxes);
  check_like(op, "scores", scores, {boxes.size(0)}, "boxes", boxes);
  VISDET_CHECK(op, method >= 0 && method <= 2, "method must be 0, 1 or 2, got ", method);
  VISDET_CHECK(op, method != 2 || sigma > 0, "sigma must be positive, got ", sigma);
}

}  // namespace visdet

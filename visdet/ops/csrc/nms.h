// nms: contract and checks, shared by CPU and CUDA.
//
// boxes [N, D], float32 or float64. D says what they are and how two of them overlap:
//   4  (x1, y1, x2, y2): torchvision's arithmetic on the CPU. With w = max(min(x2, x2') - max(x1, x1'), 0), h likewise
//      and areas (x2 - x1) * (y2 - y1), the overlap is w * h / (area + area' - w * h). Every operation is rounded to
//      the type of the boxes, and the result is compared with the threshold in float64;
//   5  (x, y, w, h, angle) and 8 (x1, y1, ..., x4, y4): see common/box_overlap.h. The IoU is rounded to the type of the
//      boxes, and so is the threshold.
// scores [N], of the type of boxes. classes: [N] int64, or none if all boxes are of one class.
// is_candidate: [N] bool, the boxes that take part, or none if all do.
//
// Boxes are taken by descending score, NaN first and equal ones by ascending index. A box is kept unless it overlaps a
// kept box of its class by more than iou_threshold; a NaN overlap is not more. Returns the indices of the kept boxes,
// int64, in that order. N is less than 2^31 - 64. The result does not depend on the number of threads.
#pragma once

#include <optional>

#include "common/box_overlap.h"
#include "common/checks.h"

namespace visdet {

inline void check_nms(const Tensor& boxes, const Tensor& scores, const std::optional<Tensor>& classes,
                      const std::optional<Tensor>& is_candidate) {
  constexpr const char* op = "nms";
  check_sums(op, "boxes", boxes, {"N", "D"});
  const int64_t N = boxes.size(0), D = boxes.size(1);
  VISDET_CHECK(op, D == 4 || D == 5 || D == 8, "boxes must have 4, 5 or 8 columns, got ", D);
  VISDET_CHECK(op, N < INT32_MAX - 64, "boxes must be fewer than 2^31 - 64, got ", N);
  check_like(op, "scores", scores, {N}, "boxes", boxes);
  if (classes) check_typed(op, "classes", *classes, {N}, ScalarType::Long, "boxes", boxes);
  if (is_candidate) check_typed(op, "is_candidate", *is_candidate, {N}, ScalarType::Bool, "boxes", boxes);
}

}  // namespace visdet

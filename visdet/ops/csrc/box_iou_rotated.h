// box_iou_rotated: its checks. The contract is in box_iou_rotated.cpp.
#pragma once

#include "common/box_overlap.h"
#include "common/checks.h"

namespace visdet {

// Returns the result, uninitialised.
inline Tensor check_box_iou_rotated(const Tensor& boxes1, const Tensor& boxes2, int64_t mode, bool is_aligned) {
  constexpr const char* op = "box_iou_rotated";
  check_shape(op, "boxes1", boxes1, {"M", "D"});
  check_sum_type(op, "boxes1", boxes1);
  const int64_t M = boxes1.size(0), D = boxes1.size(1);
  VISDET_CHECK(op, D == 5 || D == 8, "boxes1 must have 5 or 8 columns, got ", D);
  if (is_aligned) {
    check_like(op, "boxes2", boxes2, {M, D}, "boxes1", boxes1);
  } else {
    check_like(op, "boxes2", boxes2, {"N", D}, "boxes1", boxes1);
  }
  VISDET_CHECK(op, mode >= 0 && mode <= 2, "mode must be 0, 1 or 2, got ", mode);
  return is_aligned ? new_empty(boxes1, {M}) : new_empty(boxes1, {M, boxes2.size(0)});
}

}  // namespace visdet

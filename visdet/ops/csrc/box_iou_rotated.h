// box_iou_rotated: what CPU and CUDA have alike. The contract is in box_iou_rotated.cpp.
#pragma once

#include "common/box_overlap.h"
#include "common/each.h"

namespace visdet::box_iou_rotated {

// Writes the overlaps, of which there are some. ROTATED: whether the boxes are rotated ones.
template <bool ROTATED, typename A>
void write_overlaps(const OnDevice& device, const Tensor& boxes1, const Tensor& boxes2, OverlapMode mode,
                    bool is_aligned, A* to);

inline Tensor forward(const Tensor& boxes1_in, const Tensor& boxes2_in, int64_t mode, bool is_aligned) {
  constexpr const char* op = "box_iou_rotated";
  check_sums(op, "boxes1", boxes1_in, {"M", "D"});
  const int64_t M = boxes1_in.size(0), D = boxes1_in.size(1);
  VISDET_CHECK(op, D == 5 || D == 8, "boxes1 must have 5 or 8 columns, got ", D);
  check_like(op, "boxes2", boxes2_in, {is_aligned ? Dimension(M) : "N", D}, "boxes1", boxes1_in);
  VISDET_CHECK(op, mode >= 0 && mode <= 2, "mode must be 0, 1 or 2, got ", mode);
  const OnDevice device(op, boxes1_in);
  const Tensor boxes1 = dense(boxes1_in), boxes2 = dense(boxes2_in);
  const Tensor overlaps = is_aligned ? new_empty(boxes1, {M}) : new_empty(boxes1, {M, boxes2.size(0)});
  if (overlaps.numel() == 0) return overlaps;
  dispatch_sum_type(boxes1.scalar_type(), [&]<typename A>(A) {
    const auto write = D == 5 ? write_overlaps<true, A> : write_overlaps<false, A>;
    write(device, boxes1, boxes2, static_cast<OverlapMode>(mode), is_aligned, data_of(overlaps));
  });
  return overlaps;
}

VISDET_OPERATORS(box_iou_rotated, m) { m.impl("box_iou_rotated", TORCH_BOX(&forward)); }

}  // namespace visdet::box_iou_rotated

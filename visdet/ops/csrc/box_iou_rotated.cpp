// box_iou_rotated: the contract, its schema, and what it computes on the CPU.
//
// boxes1 [M, D] and boxes2 [N, D], both float32 or both float64. D = 5: (x, y, w, h, angle); D = 8: (x1, y1, ..., x4,
// y4); see common/box_overlap.h. mode: 0 the IoU, 1 the intersection over the area of the box of boxes1, 2 the area of
// the intersection. Returns [M, N], or with is_aligned, where M = N, the overlaps [M] of the boxes of equal index.
#include "box_iou_rotated.h"

#include <vector>

namespace visdet::box_iou_rotated {
namespace {

constexpr int64_t kPairsOfThread = 4096;  // fewer do not repay a thread

template <typename A, bool ROTATED>
std::vector<Quadrilateral> quadrilaterals_of(const Tensor& boxes) {
  const A* box = data_of(boxes);
  std::vector<Quadrilateral> all;
  for (int64_t n = 0; n < boxes.size(0); ++n) all.push_back(box_at<ROTATED>(box, n));
  return all;
}

}  // namespace

template <bool ROTATED, typename A>
void write_overlaps(const OnDevice&, const Tensor& boxes1, const Tensor& boxes2, OverlapMode mode, bool is_aligned,
                    A* to) {
  const auto all1 = quadrilaterals_of<A, ROTATED>(boxes1), all2 = quadrilaterals_of<A, ROTATED>(boxes2);
  const int64_t M = boxes1.size(0), N = is_aligned ? 1 : boxes2.size(0);
  parallel_each(M, ceil_of(kPairsOfThread, N), [&](int64_t m) {
    const Quadrilateral* others = all2.data() + (is_aligned ? m : 0);
    for (int64_t n = 0; n < N; ++n) to[m * N + n] = overlap_of<A, ROTATED>(all1[m], others[n], mode);
  });
}

}  // namespace visdet::box_iou_rotated

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("box_iou_rotated(Tensor boxes1, Tensor boxes2, int mode, bool is_aligned) -> Tensor");
}

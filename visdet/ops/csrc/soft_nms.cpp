// soft_nms: the contract, its schema, and its function for CPU tensors. The fake tensor and the plain-torch definition
// are in visdet/ops/nms.py.
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
#include "cpu/soft_nms.h"

#include <limits>

#include "cpu/dispatch.h"

namespace visdet {
namespace {

void check_soft_nms(const Tensor& boxes, const Tensor& scores, double sigma, int64_t method) {
  constexpr const char* op = "soft_nms";
  check_shape(op, "boxes", boxes, {"N", 4});
  check_sum_type(op, "boxes", boxes);
  check_like(op, "scores", scores, {boxes.size(0)}, "boxes", boxes);
  VISDET_CHECK(op, method >= 0 && method <= 2, "method must be 0, 1 or 2, got ", method);
  VISDET_CHECK(op, method != 2 || sigma > 0, "sigma must be positive, got ", sigma);
}

template <typename A>
std::tuple<Tensor, Tensor> run_soft_nms(const Tensor& boxes, const Tensor& scores, SoftNmsArrays<A> a) {
  const int64_t stride = a.N + best_kernels<SoftNmsKernels<A>>().lanes;
  const Scratch<A> columns(kColumns * stride);
  for (int k = 0; k < kColumns; ++k) a.column[k] = columns.data() + k * stride;
  const A *box = data_of<A>(boxes), *score = data_of<A>(scores);
  const Scratch<int64_t> index(a.N);
  a.index = index.data();
  for (int64_t n = 0; n < stride; ++n) {
    const bool is_box = n < a.N;
    for (int k = 0; k < 4; ++k) a.column[k][n] = is_box ? box[4 * n + k] : A(0);
    a.column[kArea][n] =
        (a.column[kX2][n] - a.column[kX1][n] + a.offset) * (a.column[kY2][n] - a.column[kY1][n] + a.offset);
    a.column[kScore][n] = is_box ? score[n] : std::numeric_limits<A>::quiet_NaN();
    if (is_box) a.index[n] = n;
  }
  const int64_t M = best_kernels<SoftNmsKernels<A>>().rounds(a);
  Tensor detections = new_empty(boxes, {M, 5});
  A* out = mutable_data_of<A>(detections);
  for (int64_t n = 0; n < M; ++n) {
    for (int k = 0; k < 4; ++k) out[5 * n + k] = a.column[k][n];
    out[5 * n + 4] = a.column[kScore][n];
  }
  Tensor keep = new_empty(boxes, {M}, ScalarType::Long);
  std::copy(a.index, a.index + M, mutable_data_of<int64_t>(keep));
  return {detections, keep};
}

std::tuple<Tensor, Tensor> soft_nms(const Tensor& boxes_in, const Tensor& scores_in, double iou_threshold, double sigma,
                                    double min_score, int64_t method, int64_t offset) {
  check_soft_nms(boxes_in, scores_in, sigma, method);
  const Tensor boxes = dense(boxes_in), scores = dense(scores_in);
  return dispatch_sum_type(boxes.scalar_type(), [&](auto tag) {
    using A = decltype(tag);
    SoftNmsArrays<A> a{};
    a.N = boxes.size(0), a.method = method;
    a.iou_threshold = static_cast<A>(iou_threshold), a.sigma = static_cast<A>(sigma);
    a.min_score = static_cast<A>(min_score), a.offset = static_cast<A>(offset);
    return run_soft_nms(boxes, scores, a);
  });
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "soft_nms(Tensor boxes, Tensor scores, float iou_threshold, float sigma, float min_score, int method, int offset)"
      " -> (Tensor detections, Tensor keep)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) { m.impl("soft_nms", TORCH_BOX(&visdet::soft_nms)); }

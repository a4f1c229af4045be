// soft_nms: the contract, its schema, and its function for CPU tensors. The fake tensor and the plain-torch definition
// are in visdet/ops/nms.py.
//
// boxes [N, 4] (x1, y1, x2, y2) and scores [N], both float64 or both float32, on the CPU. classes: [N] int64, or none
// if all boxes are of one class. Of the boxes of each class, round i swaps the best box at positions i.. (the first of
// equal scores, numbers before NaN) to position i, multiplies each later score by
//
//   naive (0)     0 where o >= iou_threshold       o: the IoU with box i, sides being x2 - x1 + offset;
//   linear (1)    1 - o where o >= iou_threshold      0 where it is no number
//   gaussian (2)  exp(-o^2 / sigma)
//
// and drops those below min_score: from the front, each hole is filled by the last box that stays. Returns boxes and
// lowered scores [M, 5], and their indices [M], in the order of the positions, class after class.
#include "cpu/soft_nms.h"

#include <limits>
#include <optional>
#include <vector>

#include "cpu/classes.h"
#include "cpu/dispatch.h"

namespace visdet {
namespace {

void check_soft_nms(const Tensor& boxes, const Tensor& scores, const std::optional<Tensor>& classes, double sigma,
                    int64_t method) {
  constexpr const char* op = "soft_nms";
  check_sums(op, "boxes", boxes, {"N", 4});
  check_like(op, "scores", scores, {boxes.size(0)}, "boxes", boxes);
  VISDET_CHECK(op, boxes.size(0) <= INT32_MAX, "boxes must be at most 2^31 - 1, got ", boxes.size(0));
  if (classes) check_typed(op, "classes", *classes, {boxes.size(0)}, ScalarType::Long, "boxes", boxes);
  VISDET_CHECK(op, method >= 0 && method <= 2, "method must be 0, 1 or 2, got ", method);
  VISDET_CHECK(op, method != 2 || sigma > 0, "sigma must be positive, got ", sigma);
}

// What remains of the boxes of a class.
template <typename A>
struct Remaining {
  std::vector<A> detections;  // [M, 5]
  std::vector<int64_t> keep;  // [M]
};

template <typename A>
Remaining<A> run_soft_nms(const A* box, const A* score, const int32_t* members, SoftNmsArrays<A> a) {
  const int64_t stride = a.N + best_kernels<SoftNmsKernels<A>>().lanes;
  const Scratch<A> columns(kColumns * stride);
  for (int k = 0; k < kColumns; ++k) a.column[k] = columns.data() + k * stride;
  const Scratch<int64_t> index(a.N);
  a.index = index.data();
  for (int64_t n = 0; n < stride; ++n) {
    const bool is_box = n < a.N;
    const int64_t from = is_box ? members[n] : 0;
    for (int k = 0; k < 4; ++k) a.column[k][n] = is_box ? box[4 * from + k] : A(0);
    a.column[kArea][n] =
        (a.column[kX2][n] - a.column[kX1][n] + a.offset) * (a.column[kY2][n] - a.column[kY1][n] + a.offset);
    a.column[kScore][n] = is_box ? score[from] : std::numeric_limits<A>::quiet_NaN();
    if (is_box) a.index[n] = from;
  }
  const int64_t M = best_kernels<SoftNmsKernels<A>>().rounds(a);
  Remaining<A> remaining;
  for (int64_t n = 0; n < M; ++n) {
    for (int k = 0; k < 4; ++k) remaining.detections.push_back(a.column[k][n]);
    remaining.detections.push_back(a.column[kScore][n]);
  }
  remaining.keep.assign(a.index, a.index + M);
  return remaining;
}

std::tuple<Tensor, Tensor> soft_nms(const Tensor& boxes_in, const Tensor& scores_in,
                                    const std::optional<Tensor>& classes_in, double iou_threshold, double sigma,
                                    double min_score, int64_t method, int64_t offset) {
  check_soft_nms(boxes_in, scores_in, classes_in, sigma, method);
  const Tensor boxes = dense(boxes_in), scores = dense(scores_in);
  std::vector<uint64_t> class_of(boxes.size(0));
  if (classes_in) {
    const Tensor classes = dense(*classes_in);
    std::copy_n(data_of<int64_t>(classes), class_of.size(), class_of.begin());
  }
  const Classes classes = group_by_class(class_of);
  return dispatch_sum_type(boxes.scalar_type(), [&]<typename A>(A) {
    SoftNmsArrays<A> settings{};
    settings.method = method;
    settings.iou_threshold = static_cast<A>(iou_threshold), settings.sigma = static_cast<A>(sigma);
    settings.min_score = static_cast<A>(min_score), settings.offset = static_cast<A>(offset);
    std::vector<Remaining<A>> remaining(classes.starts.size() - 1);
    parallel_each(static_cast<int64_t>(remaining.size()), 1, [&](int64_t c) {
      SoftNmsArrays<A> a = settings;
      a.N = classes.starts[c + 1] - classes.starts[c];
      remaining[c] = run_soft_nms<A>(data_of(boxes), data_of(scores), &classes.members[classes.starts[c]], a);
    });
    int64_t M = 0;
    for (const auto& of_class : remaining) M += static_cast<int64_t>(of_class.keep.size());
    Tensor detections = new_empty(boxes, {M, 5}), keep = new_empty(boxes, {M}, ScalarType::Long);
    A* detection = data_of(detections);
    int64_t* index = data_of(keep);
    for (const auto& of_class : remaining) {
      detection = std::copy(of_class.detections.begin(), of_class.detections.end(), detection);
      index = std::copy(of_class.keep.begin(), of_class.keep.end(), index);
    }
    return std::tuple<Tensor, Tensor>(detections, keep);
  });
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "soft_nms(Tensor boxes, Tensor scores, Tensor? classes, float iou_threshold, float sigma, float min_score,"
      " int method, int offset) -> (Tensor detections, Tensor keep)");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) { m.impl("soft_nms", TORCH_BOX(&visdet::soft_nms)); }

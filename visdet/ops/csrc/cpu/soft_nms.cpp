// soft_nms on the CPU. The contract is in ../soft_nms.h; how this file is compiled, in vec.h.
//
// Boxes are kept as columns, a vector's lanes are boxes. Rounds depend on each other and a round is short, so all of it
// runs on one thread. The places behind the last box hold NaN scores, which are neither best nor too low: no loop has a
// remainder.
#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet {

enum { kX1, kY1, kX2, kY2, kArea, kScore, kColumns };

template <typename A>
struct SoftNmsArrays {
  int64_t N;
  A* column[kColumns];  // each [N + a vector]
  int64_t* index;       // [N]
  A iou_threshold, sigma, min_score, offset;
  int64_t method;
};

namespace VISDET_ISA {

template <typename A>
int64_t first_greatest(const A* scores, int64_t begin, int64_t end) {
  constexpr int W = kLanes<A>;
  Vec<A> most = {};
  most -= A(__builtin_inf());
  for (int64_t p = begin; p < end; p += W) {
    const Vec<A> s = load(scores + p);
    most = s > most ? s : most;
  }
  A best = most[0];
  for (int lane = 1; lane < W; ++lane) best = most[lane] > best ? most[lane] : best;
  if (best == -A(__builtin_inf())) return begin;
  int64_t p = begin;
  while (scores[p] != best) ++p;
  return p;
}

// Lowers the scores of places (i, count) and returns whether one fell below min_score.
template <typename A, int METHOD>
bool lower_scores(const SoftNmsArrays<A>& a, int64_t i, int64_t count) {
  constexpr int W = kLanes<A>;
  const Vec<A> zero = {}, one = zero + 1, x1 = zero + a.column[kX1][i], y1 = zero + a.column[kY1][i],
               x2 = zero + a.column[kX2][i], y2 = zero + a.column[kY2][i];
  const A area = a.column[kArea][i], rate = -1 / a.sigma;
  auto any_low = zero < zero;
  for (int64_t p = i + 1; p < count; p += W) {
    const Vec<A> other_x1 = load(a.column[kX1] + p), other_y1 = load(a.column[kY1] + p);
    const Vec<A> other_x2 = load(a.column[kX2] + p), other_y2 = load(a.column[kY2] + p);
    Vec<A> width = (other_x2 < x2 ? other_x2 : x2) - (other_x1 > x1 ? other_x1 : x1) + a.offset;
    Vec<A> height = (other_y2 < y2 ? other_y2 : y2) - (other_y1 > y1 ? other_y1 : y1) + a.offset;
    width = width > 0 ? width : zero;
    height = height > 0 ? height : zero;
    const Vec<A> shared = width * height;
    Vec<A> overlap = shared / (area + load(a.column[kArea] + p) - shared);
    overlap = overlap == overlap ? overlap : zero;
    Vec<A> factor;
    if constexpr (METHOD == 2) {
      factor = exp_nonpositive<A>(overlap * overlap * rate);
    } else {
      factor = overlap >= a.iou_threshold ? (METHOD == 1 ? one - overlap : zero) : one;
    }
    const Vec<A> score = load(a.column[kScore] + p) * factor;
    store(a.column[kScore] + p, score);
    any_low |= score < a.min_score;
  }
  for (int lane = 0; lane < W; ++lane) {
    if (any_low[lane]) return true;
  }
  return false;
}

// Runs all rounds; returns how many boxes stay.
template <typename A>
int64_t soft_nms_rounds(const SoftNmsArrays<A>& a) {
  constexpr int W = kLanes<A>;
  const auto lower = a.method == 0 ? &lower_scores<A, 0> : a.method == 1 ? &lower_scores<A, 1> : &lower_scores<A, 2>;
  A* scores = a.column[kScore];
  int64_t count = a.N;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t best = first_greatest(scores, i, count);
    for (A* column : a.column) {
      const A value = column[i];
      column[i] = column[best], column[best] = value;
    }
    const int64_t index = a.index[i];
    a.index[i] = a.index[best], a.index[best] = index;
    if (!lower(a, i, count)) continue;
    for (int64_t p = i + 1; p < count;) {
      if (!(scores[p] < a.min_score)) {
        ++p;
        continue;
      }
      --count;
      for (A* column : a.column) column[p] = column[count];
      a.index[p] = a.index[count];
    }
    for (int lane = 0; lane < W; ++lane) scores[count + lane] = A(__builtin_nan(""));
  }
  return count;
}

template <typename A>
int64_t vector_lanes() {
  return kLanes<A>;
}

#define VISDET_INSTANTIATE(A)                                     \
  template int64_t soft_nms_rounds<A>(const SoftNmsArrays<A>& a); \
  template int64_t vector_lanes<A>();
VISDET_INSTANTIATE(float)
VISDET_INSTANTIATE(double)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "cpu/dispatch.h"
#include "soft_nms.h"

namespace visdet {

#define VISDET_DECLARE(isa)                         \
  namespace isa {                                   \
  template <typename A>                             \
  int64_t soft_nms_rounds(const SoftNmsArrays<A>&); \
  template <typename A>                             \
  int64_t vector_lanes();                           \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

template <typename A>
std::tuple<Tensor, Tensor> run_soft_nms(const Tensor& boxes, const Tensor& scores, SoftNmsArrays<A> a) {
  const int64_t stride = a.N + VISDET_BEST_ISA(vector_lanes, A)();
  const Scratch<A> columns(kColumns * stride);
  for (int k = 0; k < kColumns; ++k) a.column[k] = columns.data() + k * stride;
  const A *box = boxes.const_data_ptr<A>(), *score = scores.const_data_ptr<A>();
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
  const int64_t M = VISDET_BEST_ISA(soft_nms_rounds, A)(a);
  Tensor detections = new_empty(boxes, {M, 5});
  A* out = detections.mutable_data_ptr<A>();
  for (int64_t n = 0; n < M; ++n) {
    for (int k = 0; k < 4; ++k) out[5 * n + k] = a.column[k][n];
    out[5 * n + 4] = a.column[kScore][n];
  }
  Tensor keep = new_empty(boxes, {M}, ScalarType::Long);
  std::copy(a.index, a.index + M, keep.mutable_data_ptr<int64_t>());
  return {detections, keep};
}

std::tuple<Tensor, Tensor> soft_nms(const Tensor& boxes_in, const Tensor& scores_in, double iou_threshold, double sigma,
                                    double min_score, int64_t method, int64_t offset) {
  check_soft_nms(boxes_in, scores_in, sigma, method);
  const Tensor boxes = dense(boxes_in), scores = dense(scores_in);
  const auto run = [&](auto tag) {
    using A = decltype(tag);
    SoftNmsArrays<A> a{};
    a.N = boxes.size(0), a.method = method;
    a.iou_threshold = static_cast<A>(iou_threshold), a.sigma = static_cast<A>(sigma);
    a.min_score = static_cast<A>(min_score), a.offset = static_cast<A>(offset);
    return run_soft_nms(boxes, scores, a);
  };
  return boxes.scalar_type() == ScalarType::Double ? run(double{}) : run(float{});
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) { m.impl("soft_nms", TORCH_BOX(&visdet::soft_nms)); }

#endif  // VISDET_ISA_BASELINE

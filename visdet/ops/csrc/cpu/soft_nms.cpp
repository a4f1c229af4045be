// soft_nms on the CPU. The contract is in csrc/soft_nms.cpp.
//
// Boxes are kept as columns, so that a vector's lanes are boxes. Rounds depend on each other, and a round is short, so
// one thread runs all of them. The entries behind the last box hold NaN scores, which are neither the best nor too low.
// So loops take whole vectors, without a remainder.
#include "cpu/soft_nms.h"

#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

template <typename A>
int64_t first_greatest(const A* scores, int64_t begin, int64_t end) {
  constexpr int W = kLanes<A>;
  Vec<A> most = {};
  most -= A(__builtin_inf());
  for (int64_t p = begin; p < end; p += W) {
    const Vec<A> s = load(scores + p);
    most = s > most ? s : most;
  }
  const A best = across_lanes<A>(most, [](Vec<A> one, Vec<A> other) { return one > other ? one : other; });
  if (best == -A(__builtin_inf())) return begin;
  int64_t p = begin;
  while (scores[p] != best) ++p;
  return p;
}

// Lowers the scores at positions i + 1 to count - 1 and returns whether one fell below min_score.
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
  return any_lane<A>(any_low);
}

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

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(SoftNmsKernels, kLanes<A>, soft_nms_rounds<A>)

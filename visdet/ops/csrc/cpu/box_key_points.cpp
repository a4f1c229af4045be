// box_key_points on the CPU. The contract is in csrc/box_key_points.h.
//
// The kernels are parallel over anchors. They first write the offsets of an anchor's points to a row of scratch, in
// vector code, since these need exponentials. Rotating the points then takes a few multiplications each.
#include "box_key_points.h"

#include "cpu/exp.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Writes the offsets of the fixed points, then sigmoid(logit) - 0.5 of the anchor's, and up to a vector more.
template <typename A>
VISDET_INLINE void find_offsets(const KeyPointsArrays<A>& a, int64_t anchor, A* offsets) {
  constexpr int W = kLanes<A>;
  const Vec<A> zero = {};
  const int64_t count = a.M * 3;
  const A* from = a.logits + anchor * count;
  std::memcpy(offsets, a.fixed, a.F * 3 * sizeof(A));
  for (int64_t i = 0; i < count; i += W) {
    A rest[W] = {};
    const int64_t here = count - i < W ? count - i : W;
    if (here < W) std::memcpy(rest, from + i, here * sizeof(A));
    const Vec<A> x = load(here < W ? rest : from + i);
    const auto is_positive = x > zero;
    const Vec<A> near = 1 / (1 + exp_nonpositive<A>(is_positive ? -x : x)) - A(0.5);
    store(offsets + a.F * 3 + i, x == x ? (is_positive ? near : -near) : x);
  }
}

template <typename A>
VISDET_INLINE A size_of(A log_size, A most) {
  log_size = log_size > most ? most : log_size;  // NaN stays
  if constexpr (sizeof(A) == 4) {
    return __builtin_expf(log_size);
  } else {
    return __builtin_exp(log_size);
  }
}

template <typename A>
void key_points(const KeyPointsArrays<A>& a, int64_t begin, int64_t end, A* scratch) {
  const int64_t points = a.F + a.M;
  for (int64_t n = begin; n < end; ++n) {
    const A* box = a.anchors + n * a.D;
    A* to = a.output + n * points * 3;
    const A size[3] = {size_of(box[3], a.max_log_size), size_of(box[4], a.max_log_size),
                       size_of(box[5], a.max_log_size)};
    find_offsets(a, n, scratch);
    for (int64_t p = 0; p < points; ++p) {
      const A *offset = scratch + p * 3, x = offset[0] * size[0], y = offset[1] * size[1];
      to[p * 3] = box[7] * x - box[6] * y + box[0];
      to[p * 3 + 1] = box[6] * x + box[7] * y + box[1];
      to[p * 3 + 2] = offset[2] * size[2] + box[2];
    }
  }
}

template <typename A>
void key_points_backward(const KeyPointsArrays<A>& a, int64_t begin, int64_t end, A* scratch) {
  const int64_t points = a.F + a.M;
  for (int64_t n = begin; n < end; ++n) {
    const A *box = a.anchors + n * a.D, *grads = a.grad_output + n * points * 3;
    A *to = a.grad_anchors + n * a.D, *to_logits = a.grad_logits + (n * a.M - a.F) * 3;
    const A size[3] = {size_of(box[3], a.max_log_size), size_of(box[4], a.max_log_size),
                       size_of(box[5], a.max_log_size)};
    A sum[8] = {};  // of centre, logarithms of sizes, sin, cos
    find_offsets(a, n, scratch);
    for (int64_t p = 0; p < points; ++p) {
      const A *offset = scratch + p * 3, *grad = grads + p * 3, x = offset[0] * size[0], y = offset[1] * size[1];
      const A turned[3] = {box[7] * grad[0] + box[6] * grad[1], box[7] * grad[1] - box[6] * grad[0], grad[2]};
      for (int axis = 0; axis < 3; ++axis) {
        sum[axis] += grad[axis];
        sum[3 + axis] += turned[axis] * offset[axis] * size[axis];
      }
      sum[6] += grad[1] * x - grad[0] * y;
      sum[7] += grad[0] * x + grad[1] * y;
      if (p < a.F) continue;
      for (int axis = 0; axis < 3; ++axis) {
        to_logits[p * 3 + axis] = turned[axis] * size[axis] * (A(0.5) + offset[axis]) * (A(0.5) - offset[axis]);
      }
    }
    for (int i = 3; i < 6; ++i) sum[i] = box[i] > a.max_log_size ? A(0) : sum[i];
    std::memset(to, 0, a.D * sizeof(A));
    std::memcpy(to, sum, sizeof(sum));
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(KeyPointsKernels, key_points<A>, key_points_backward<A>)

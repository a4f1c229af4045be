// box_key_points on the CPU. The contract is in ../box_key_points.h; how this file is compiled, in vec.h.
//
// Parallel over anchors. An anchor's places are written to a row of scratch first, in vectors, where the exponentials
// are; turning them is a few multiplications a point.
#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet {

template <typename A>
struct KeyPointsArrays {
  int64_t D, F, M;
  const A *anchors, *fixed, *logits;  // [N, D], [F, 3], [N, M * 3]
  A max_log_size;
  A* output;             // [N, F + M, 3], forward
  const A* grad_output;  // [N, F + M, 3], backward
  A *grad_anchors, *grad_logits;
};

namespace VISDET_ISA {

// places [(F + M) * 3 + a vector]: those of the fixed points, then sigmoid(logit) - 0.5 of an anchor's.
template <typename A>
VISDET_INLINE void find_places(const KeyPointsArrays<A>& a, int64_t anchor, A* places) {
  constexpr int W = kLanes<A>;
  const Vec<A> zero = {};
  const int64_t count = a.M * 3;
  const A* from = a.logits + anchor * count;
  std::memcpy(places, a.fixed, a.F * 3 * sizeof(A));
  for (int64_t i = 0; i < count; i += W) {
    A rest[W] = {};
    const int64_t here = count - i < W ? count - i : W;
    if (here < W) std::memcpy(rest, from + i, here * sizeof(A));
    const Vec<A> x = load(here < W ? rest : from + i);
    const auto is_positive = x > zero;
    const Vec<A> near = 1 / (1 + exp_nonpositive<A>(is_positive ? -x : x)) - A(0.5);
    store(places + a.F * 3 + i, x == x ? (is_positive ? near : -near) : x);
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

// Anchors [begin, end). scratch [(F + M) * 3 + a vector].
template <typename A>
void key_points(const KeyPointsArrays<A>& a, int64_t begin, int64_t end, A* scratch) {
  const int64_t points = a.F + a.M;
  for (int64_t n = begin; n < end; ++n) {
    const A* box = a.anchors + n * a.D;
    A* to = a.output + n * points * 3;
    const A size[3] = {size_of(box[3], a.max_log_size), size_of(box[4], a.max_log_size),
                       size_of(box[5], a.max_log_size)};
    find_places(a, n, scratch);
    for (int64_t p = 0; p < points; ++p) {
      const A *place = scratch + p * 3, x = place[0] * size[0], y = place[1] * size[1];
      to[p * 3] = box[7] * x - box[6] * y + box[0];
      to[p * 3 + 1] = box[6] * x + box[7] * y + box[1];
      to[p * 3 + 2] = place[2] * size[2] + box[2];
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
    find_places(a, n, scratch);
    for (int64_t p = 0; p < points; ++p) {
      const A *place = scratch + p * 3, *grad = grads + p * 3, x = place[0] * size[0], y = place[1] * size[1];
      const A turned[3] = {box[7] * grad[0] + box[6] * grad[1], box[7] * grad[1] - box[6] * grad[0], grad[2]};
      for (int axis = 0; axis < 3; ++axis) {
        sum[axis] += grad[axis];
        sum[3 + axis] += turned[axis] * place[axis] * size[axis];
      }
      sum[6] += grad[1] * x - grad[0] * y;
      sum[7] += grad[0] * x + grad[1] * y;
      if (p < a.F) continue;
      for (int axis = 0; axis < 3; ++axis) {
        to_logits[p * 3 + axis] = turned[axis] * size[axis] * (A(0.5) + place[axis]) * (A(0.5) - place[axis]);
      }
    }
    for (int i = 3; i < 6; ++i) sum[i] = box[i] > a.max_log_size ? A(0) : sum[i];
    std::memset(to, 0, a.D * sizeof(A));
    std::memcpy(to, sum, sizeof(sum));
  }
}

#define VISDET_INSTANTIATE(A)                                                   \
  template void key_points<A>(const KeyPointsArrays<A>&, int64_t, int64_t, A*); \
  template void key_points_backward<A>(const KeyPointsArrays<A>&, int64_t, int64_t, A*);
VISDET_INSTANTIATE(float)
VISDET_INSTANTIATE(double)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "box_key_points.h"
#include "cpu/dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                  \
  namespace isa {                                                            \
  template <typename A>                                                      \
  void key_points(const KeyPointsArrays<A>&, int64_t, int64_t, A*);          \
  template <typename A>                                                      \
  void key_points_backward(const KeyPointsArrays<A>&, int64_t, int64_t, A*); \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

constexpr int64_t kGrain = 1 << 12;  // points of one piece of work
constexpr int64_t kMostLanes = 16;

template <typename A>
KeyPointsArrays<A> arrays_of(const KeyPointsProblem& problem, const Tensor& anchors, const Tensor& fixed,
                             const Tensor& logits, double max_log_size) {
  KeyPointsArrays<A> a{};
  a.D = problem.D, a.F = problem.F, a.M = problem.M;
  a.anchors = static_cast<const A*>(anchors.const_data_ptr());
  a.fixed = static_cast<const A*>(fixed.const_data_ptr());
  a.logits = static_cast<const A*>(logits.const_data_ptr());
  a.max_log_size = static_cast<A>(max_log_size);
  return a;
}

template <typename A, typename Kernel>
void run(const KeyPointsProblem& problem, const KeyPointsArrays<A>& a, const Kernel& kernel) {
  const int64_t points = problem.F + problem.M, grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, points));
  torch::stable::parallel_for(0, problem.B * problem.Q, grain, [&](int64_t begin, int64_t end) {
    std::vector<A> scratch(points * 3 + kMostLanes);
    kernel(a, begin, end, scratch.data());
  });
}

template <typename F>
void dispatch(const Tensor& anchors, const F& f) {
  if (anchors.scalar_type() == ScalarType::Double) return f(double{});
  f(float{});
}

Tensor box_key_points(const Tensor& anchors_in, const Tensor& fixed_in, const Tensor& logits_in, double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  const Tensor anchors = dense(anchors_in), fixed = dense(fixed_in), logits = dense(logits_in);
  Tensor output = new_empty(anchors, {problem.B, problem.Q, problem.F + problem.M, 3});
  if (output.numel() == 0) return output;
  dispatch(anchors, [&](auto tag) {
    using A = decltype(tag);
    auto a = arrays_of<A>(problem, anchors, fixed, logits, max_log_size);
    a.output = static_cast<A*>(output.mutable_data_ptr());
    run(problem, a, VISDET_BEST_ISA(key_points, A));
  });
  return output;
}

std::tuple<Tensor, Tensor> box_key_points_backward(const Tensor& grad_output_in, const Tensor& anchors_in,
                                                   const Tensor& fixed_in, const Tensor& logits_in,
                                                   double max_log_size) {
  const auto problem = check_box_key_points(anchors_in, fixed_in, logits_in);
  check_key_points_gradient(problem, grad_output_in, anchors_in);
  const Tensor grad_output = dense(grad_output_in), anchors = dense(anchors_in), fixed = dense(fixed_in),
               logits = dense(logits_in);
  Tensor grad_anchors = new_empty(anchors, anchors.sizes()), grad_logits = new_empty(logits, logits.sizes());
  if (grad_anchors.numel() == 0) return {grad_anchors, grad_logits};
  dispatch(anchors, [&](auto tag) {
    using A = decltype(tag);
    auto a = arrays_of<A>(problem, anchors, fixed, logits, max_log_size);
    a.grad_output = static_cast<const A*>(grad_output.const_data_ptr());
    a.grad_anchors = static_cast<A*>(grad_anchors.mutable_data_ptr());
    a.grad_logits = static_cast<A*>(grad_logits.mutable_data_ptr());
    run(problem, a, VISDET_BEST_ISA(key_points_backward, A));
  });
  return {grad_anchors, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("box_key_points", TORCH_BOX(&visdet::box_key_points));
  m.impl("box_key_points_backward", TORCH_BOX(&visdet::box_key_points_backward));
}

#endif  // VISDET_ISA_BASELINE

// What the fused form of the backward does before and after the paths. softmax_kernel works out the softmax of each row
// for the paths that do not do so themselves. The other kernels turn the gradients of locations and weights into those
// of offsets, logits and reference points.
//
// A few neighbouring threads own a row in softmax_kernel, softmax_grad_kernel and fused_grad_kernel, and write the
// gradients of its samples. A thread of reference_grad_kernel owns the reference point of a query on a level. No writes
// race.
#pragma once

#include <optional>

#include "cuda/ms_deform_attn/backward_call.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kRowThreads = 256;

// Returns how many lanes of a warp divide the K samples of a row among them.
inline int row_lanes_of(int64_t K) {
  int lanes = 1;
  while (lanes < 32 && lanes < K) lanes *= 2;
  return lanes;
}

// Here and below, I is the type of offsets and logits. kSoftmaxLanes threads own a row; the first writes its softmax.
template <typename I, typename A>
__global__ void __launch_bounds__(kRowThreads)
    softmax_kernel(const FusedSamples<I, A> source, SoftmaxRow<A>* __restrict__ rows, int64_t count, int K) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kSoftmaxLanes;
  const int lane = threadIdx.x % kSoftmaxLanes;
  const auto of_row = source.of_image(0, row * K);
  const auto softmax = of_row.row_of_lanes(row < count, 0, K, lane, kSoftmaxLanes);
  if (row < count && lane == 0) rows[row] = softmax;
}

// From the gradients of locations and weights to those of offsets and logits. `lanes` threads own a row.
template <typename I, typename A>
__global__ void __launch_bounds__(kRowThreads)
    fused_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<I, A> source,
                      const Pack<A, 4>* __restrict__ sample_grads, I* __restrict__ grad_offsets,
                      I* __restrict__ grad_logits, int64_t count, int G, int L, int K, int lanes) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, L, table);
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const bool exists = row < count;
  const Pack<A, 4>* of_row = sample_grads + row * K;
  const int64_t query = row / G;
  A mean = 0;  // of the weights' gradients
  for (int k = lane; exists && k < K; k += lanes) mean += of_row[k].at[0] * of_row[k].at[1];
  mean = sum_lanes(mean, 1, lanes);
  int l = 0;
  for (int k = lane; exists && k < K; k += lanes) {
    while (k >= table[l].level.end) ++l;
    const Pack<A, 4> grad = of_row[k];
    typename FusedSamples<I, A>::Raw raw;
    if (source.boxes) source.fetch_reference(query * L + l, raw);
    const Pack<A, 2> of_offset = source.grad_offset(raw, table[l].level, table[l].points, grad.at[2], grad.at[3]);
    store_pack<I, 2>(grad_offsets + 2 * (row * K + k), of_offset.at);
    grad_logits[row * K + k] = from_accumulate<I>(grad.at[0] * (grad.at[1] - mean));
  }
}

// From the gradients of weights to those of logits. kSoftmaxLanes threads own a row, and take kStep samples at a time.
template <typename I, typename A>
__global__ void __launch_bounds__(kRowThreads)
    softmax_grad_kernel(const FusedSamples<I, A> source, const A* __restrict__ grad_weights,
                        I* __restrict__ grad_logits, int64_t count, int K) {
  constexpr int kEach = 4, kStep = kEach * kSoftmaxLanes;  // kEach: the loads that a thread has in flight
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kSoftmaxLanes, first = row * K;
  const int lane = threadIdx.x % kSoftmaxLanes;
  const bool exists = row < count;
  const auto of_row = source.of_image(0, first);
  typename FusedSamples<I, A>::Raw raw[kEach];
  A grad[kEach];
  const auto has = [&](int k0, int i) { return exists && k0 + i * kSoftmaxLanes + lane < K; };
  const auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = k0 + i * kSoftmaxLanes + lane;
      raw[i].weight = grad[i] = 0;
      if (has(k0, i)) of_row.fetch_weight(k, raw[i]), grad[i] = grad_weights[first + k];
    }
  };
  fetch(0);
  const SoftmaxRow<A> softmax = K <= kStep
                                    ? of_row.template row_of_raw<kSoftmaxLanes>(raw, [&](int i) { return has(0, i); })
                                    : of_row.row_of_lanes(exists, 0, K, lane, kSoftmaxLanes);
  A mean = 0;  // of the weights' gradients
  for (int k0 = 0; k0 < K; k0 += kStep) {
    if (k0 > 0) fetch(k0);
#pragma unroll
    for (int i = 0; i < kEach; ++i) mean += has(k0, i) ? of_row.weight(raw[i], softmax) * grad[i] : A(0);
  }
  mean = sum_lanes(mean, 1, kSoftmaxLanes);
  for (int k0 = 0; k0 < K; k0 += kStep) {
    if (K > kStep) fetch(k0);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!has(k0, i)) continue;
      const A of_logit = of_row.weight(raw[i], softmax) * (grad[i] - mean);
      grad_logits[first + k0 + i * kSoftmaxLanes + lane] = from_accumulate<I>(of_logit);
    }
  }
}

// The gradient of the reference point of a query on a level, which a thread owns: it adds up those of heads and points
// in their order.
template <typename I, typename A>
__global__ void __launch_bounds__(kRowThreads)
    reference_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<I, A> source,
                          const Pack<A, 4>* __restrict__ sample_grads, A* __restrict__ grad_reference, int64_t count,
                          int G, int L, int K) {
  const int64_t query_level = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (query_level >= count) return;
  const int64_t query = query_level / L;
  const int l = static_cast<int>(query_level - query * L), first = plan[l].first_point, points = plan[l].points;
  const A half_of_each = A(0.5) / points;
  A sum[4] = {};
  for (int g = 0; g < G; ++g) {
    for (int p = 0; p < points; ++p) {
      const int64_t index = (query * G + g) * K + first + p;
      const Pack<A, 4> grad = sample_grads[index];
      sum[0] += grad.at[2], sum[1] += grad.at[3];
      if (source.boxes) {
        const Pack<A, 2> offset = source.offset_of(source.fetch_position(index, query_level));
        if (grad.at[2] != 0) sum[2] += grad.at[2] * offset.at[0] * half_of_each;
        if (grad.at[3] != 0) sum[3] += grad.at[3] * offset.at[1] * half_of_each;
      }
    }
  }
  for (int i = 0; i < (source.boxes ? 4 : 2); ++i) grad_reference[query_level * (source.boxes ? 4 : 2) + i] = sum[i];
}

// The fused form as a Form of BackwardCall, and the gradients of its predictions: finish() writes them once those of
// the samples are known.
class FusedBackward {
 public:
  static constexpr bool kHasSoftmax = true;

  FusedBackward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const FusedForm& form,
                bool needs_reference)
      : problem_(problem),
        scope_(scope),
        form_(form),
        rows_(problem.B * problem.Q * problem.G),
        needs_reference_(needs_reference) {
    grad_offsets = new_like(form.offsets);
    grad_logits = new_like(form.logits);
    grad_reference = needs_reference ? new_like(form.reference) : new_empty(form.reference, {0});
  }

  Tensor grad_reference, grad_offsets, grad_logits;

  template <typename T, typename A>
  FusedSamples<T, A> source() const {
    return form_.template source<T, A>();
  }
  template <typename T, typename A>
  FusedSamples<T, A> source_with_softmax() {
    FusedSamples<T, A> source = form_.template source<T, A>();
    source.rows = softmax<A>();
    return source;
  }
  template <typename A, typename F>
  void with_source(const F& f) {
    dispatch_predictions<A>([&](auto type) { f(source_with_softmax<decltype(type), A>()); });
  }

  template <typename A>
  SampleGrads<A> grads() {
    has_offsets_ = false;
    return {nullptr, nullptr, new_sample_grads<Pack<A, 4>>(), nullptr};
  }
  template <typename A>
  SampleGrads<A> final_grads() {
    if (needs_reference_) return grads<A>();  // a reference point's gradient is summed from those of locations
    has_offsets_ = true;
    return {nullptr, new_sample_grads<A>(), nullptr, data_of(grad_offsets)};
  }

  // After backward().
  template <typename A>
  void finish(Plans& plans) {
    dispatch_predictions<A>([&](auto type) { finish_predictions<decltype(type), A>(plans); });
  }

 private:
  // Calls f(I{}) with the type of offsets and logits.
  template <typename A, typename F>
  void dispatch_predictions(const F& f) const {
    dispatch_value_type(form_.offsets.scalar_type(), [&](auto type, auto accumulate) {
      if constexpr (std::is_same_v<decltype(accumulate), A>) f(type);
    });
  }

  template <typename A>
  const SoftmaxRow<A>* softmax() {
    softmax_ = new_empty(form_.reference, {rows_, 2});
    SoftmaxRow<A>* of_rows = data_of(*softmax_);
    dispatch_predictions<A>([&]<typename I>(I) {
      launch({kOp, "softmax_kernel", scope_, ceil_div(rows_ * kSoftmaxLanes, kRowThreads), kRowThreads},
             softmax_kernel<I, A>, source<I, A>(), of_rows, rows_, static_cast<int>(problem_.K));
    });
    return of_rows;
  }

  // V: what is written of a sample, numbers of the type of coordinates.
  template <typename V>
  V* new_sample_grads() {
    const int64_t numbers = static_cast<int64_t>(sizeof(V)) / form_.reference.element_size();
    sample_grads_ = new_empty(form_.reference, {rows_, problem_.K, numbers});
    return mutable_data_of<V>(*sample_grads_);
  }

  // I: the type of offsets and logits.
  template <typename I, typename A>
  void finish_predictions(Plans& plans) {
    const int G = static_cast<int>(problem_.G), L = static_cast<int>(problem_.L), K = static_cast<int>(problem_.K);
    I* of_logits = data_of(grad_logits);
    const FusedSamples<I, A> samples_of = source<I, A>();
    const void* grads = sample_grads_->const_data_ptr();
    if constexpr (sizeof(A) == 4) {  // the path that writes offsets serves no float64
      if (has_offsets_) {
        launch({kOp, "softmax_grad_kernel", scope_, ceil_div(rows_ * kSoftmaxLanes, kRowThreads), kRowThreads},
               softmax_grad_kernel<I, A>, samples_of, static_cast<const A*>(grads), of_logits, rows_, K);
        return;
      }
    }
    const auto* packed = static_cast<const Pack<A, 4>*>(grads);
    const int lanes = row_lanes_of(problem_.K);
    launch({kOp, "fused_grad_kernel", scope_, ceil_div(rows_ * lanes, kRowThreads), kRowThreads,
            static_cast<int64_t>(sizeof(LevelPlan)) * L},
           fused_grad_kernel<I, A>, plans.get(), samples_of, packed, data_of(grad_offsets), of_logits, rows_, G, L, K,
           lanes);
    if (!needs_reference_) return;
    const int64_t count = problem_.B * problem_.Q * problem_.L;
    launch({kOp, "reference_grad_kernel", scope_, ceil_div(count, kRowThreads), kRowThreads},
           reference_grad_kernel<I, A>, plans.get(), samples_of, packed, data_of(grad_reference), count, G, L, K);
  }

  const MsDeformAttnProblem& problem_;
  const DeviceScope& scope_;
  const FusedForm& form_;
  const int64_t rows_;
  const bool needs_reference_;
  bool has_offsets_ = false;  // grad_offsets is written by put_once(), and sample_grads_ are the weights' alone
  std::optional<Tensor> sample_grads_, softmax_;
};

}  // namespace
}  // namespace visdet::ms_deform_attn

// A call of ms_deform_attn's backward as its paths see it, and where they write the gradients of the samples.
#pragma once

#include "common/paths.h"
#include "cuda/ms_deform_attn/backward_plan.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kSoftmaxLanes = 4;     // threads that work out the softmax of a row together
constexpr int64_t kScanShared = 64;  // bytes that sum_before() declares in a block of 512 threads

// Where the gradients of the samples go: the plain form's tensors, or, for the fused form's last kernels, 16 bytes a
// sample with its weight. See put_once() for a third way.
template <typename A>
struct SampleGrads {
  A* locations;        // [B, Q, G, K, 2]
  A* weights;          // [B, Q, G, K]
  Pack<A, 4>* packed;  // [B, Q, G, K] (weight, gradient of weight, of x, of y), instead of both
  char* offsets;       // [B, Q, G, K, 2] of the type of the fused form's offsets, instead of locations
  int64_t offset_gap;  // elements between a query's offsets and the next one's

  // add: to what another turn of channels has left.
  __device__ __forceinline__ void put(int64_t index, A weight, A of_weight, A of_x, A of_y, bool add) const {
    if (packed != nullptr) {
      if (add) of_weight += packed[index].at[1], of_x += packed[index].at[2], of_y += packed[index].at[3];
      packed[index] = {weight, of_weight, of_x, of_y};
    } else {
      auto* location = reinterpret_cast<Pack<A, 2>*>(locations) + index;
      if (add) of_weight += weights[index], of_x += location->at[0], of_y += location->at[1];
      weights[index] = of_weight;
      *location = {of_x, of_y};
    }
  }
};

// From the dots with the texels of its moved square.
struct SampleGradient {
  float weight, x, y;
};

// An offset's gradient, by one store unless gaps between queries leave it unaligned.
template <typename I, typename A>
__device__ __forceinline__ void put_pair(I* to, const A (&pair)[2], int64_t gap) {
  if (gap % 2 == 0) {
    store_pack<I, 2>(to, pair);
  } else {
    to[0] = from_accumulate<I>(pair[0]), to[1] = from_accumulate<I>(pair[1]);
  }
}

// The gradients of a sample to which nothing will be added. The fused form's offset may get its own at once; then only
// the weight's waits for the row's others (softmax_grad_kernel), 4 bytes a sample instead of 16.
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index, const GivenSamples<float>&,
                                         const GivenSamples<float>::Raw&, int64_t /*query*/, const Level&,
                                         int /*points*/, float weight, const SampleGradient& grad) {
  to.put(index, weight, grad.weight, grad.x, grad.y, false);
}
template <typename T>
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index,
                                         const FusedSamples<T, float>& source,
                                         const typename FusedSamples<T, float>::Raw& raw, int64_t query,
                                         const Level& level, int points, float weight, const SampleGradient& grad) {
  if (to.offsets == nullptr) return to.put(index, weight, grad.weight, grad.x, grad.y, false);
  to.weights[index] = grad.weight;
  const Pack<float, 2> of_offset = source.grad_offset(raw, level, points, grad.x, grad.y);
  const int64_t place = 2 * index + query * to.offset_gap;
  if (source.full_precision) {
    put_pair(reinterpret_cast<float*>(to.offsets) + place, of_offset.at, to.offset_gap);
  } else {
    put_pair(reinterpret_cast<T*>(to.offsets) + place, of_offset.at, to.offset_gap);
  }
}

// A call of the backward, none of whose tensors is empty. Rows of value and grad_output begin at multiples of 16 bytes
// and have a multiple of 16 bytes. Form is the form of the operator, GivenBackward or FusedBackward:
//   form.source<T, A>()               where a kernel finds the samples that works out the softmax of rows by itself,
//   form.source_with_softmax<T, A>()  the same for one that reads it, T being the type of the values,
//   form.with_source<A>(f)            calls f with the latter for kernels that do not depend on the type of the values,
//   form.grads<A>()                   where the gradients of samples go, and
//   form.final_grads<A>()             the same for a kernel that writes each sample's once, by put_once().
template <typename Form>
struct BackwardCall {
  const MsDeformAttnProblem& problem;
  const DeviceScope& scope;
  const Levels& levels;
  Plans& plans;
  Form& form;
  const Tensor &grad_output, &value;
  bool deterministic;
  Tensor& grad_value;

  int64_t element() const { return static_cast<int64_t>(value.element_size()); }
  bool is_double() const { return element() == 8; }
};

// Calls f(LANES) with the number of threads, 4, 8 or 16, that read a row of C channels together, four channels each. A
// row of more than 64 channels takes 16 threads several turns.
template <typename F>
void dispatch_lanes(int64_t C, const F& f) {
  if (C <= 16) return f(std::integral_constant<int, 4>{});
  if (C <= 32) return f(std::integral_constant<int, 8>{});
  f(std::integral_constant<int, 16>{});
}

}  // namespace
}  // namespace visdet::ms_deform_attn

// A call of the backward as its paths see it, and where they write the gradients of the samples.
#pragma once

#include "common/cells.cuh"
#include "common/corners.cuh"
#include "common/paths.h"
#include "cuda/ms_deform_attn/backward_plan.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kSoftmaxLanes = 4;  // the threads that work out the softmax of a row together

// The gradients of a sample's weight and of its location in 0..1.
template <typename A>
struct SampleGradient {
  A weight, x, y;
};

// Returns the gradients of a sample that counts. dots: the dot products of its row of grad_output with its four texels,
// zero outside the map; fx, fy: the fractions of the way to the second column and row.
template <typename A>
__device__ __forceinline__ SampleGradient<A> sample_gradient(const A (&dots)[4], A fx, A fy, A weight,
                                                             const Level& level) {
  const Interpolation<A> of_dots = interpolate_numbers(dots, fx, fy);
  return {of_dots.value, level.W * weight * of_dots.by_x, level.H * weight * of_dots.by_y};
}

// Returns the gradients of a sample that does not count. They are NaN where its level does not lie within value.
template <typename A>
__device__ __forceinline__ SampleGradient<A> gradient_of_uncounted(const Level& level) {
  const A number = level.H > 0 ? A(0) : quiet_nan<A>();
  return {number, number, number};
}

// Where the gradients of the samples go. The plain form has them in `weights` and `locations`. The fused form, whose
// last kernels go on from them, has them in `packed` together with the sample's weight, or, if a path can write the
// gradients of offsets itself (put_once), in `weights` and `offsets`.
template <typename A>
struct SampleGrads {
  A* locations;        // [B, Q, G, K, 2]
  A* weights;          // [B, Q, G, K]
  Pack<A, 4>* packed;  // [B, Q, G, K] (weight, gradients of the weight, of x and of y), or null
  char* offsets;       // [B, Q, G, K, 2] of the type of the fused form's offsets, or null

  // Writes the gradients of the sample at `index`, or adds them to those that are there.
  __device__ __forceinline__ void put(int64_t index, A weight, SampleGradient<A> grad, bool add = false) const {
    if (packed != nullptr) {
      if (add) grad.weight += packed[index].at[1], grad.x += packed[index].at[2], grad.y += packed[index].at[3];
      packed[index] = {weight, grad.weight, grad.x, grad.y};
    } else {
      auto* location = reinterpret_cast<Pack<A, 2>*>(locations) + index;
      if (add) grad.weight += weights[index], grad.x += location->at[0], grad.y += location->at[1];
      weights[index] = grad.weight;
      *location = {grad.x, grad.y};
    }
  }
};

// Writes the gradients of a sample to which no others will be added. In the fused form the gradient of the offset may
// then be written at once, so that softmax_grad_kernel reads 4 bytes of the sample instead of 16.
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index, const GivenSamples<float>&,
                                         const GivenSamples<float>::Raw&, const Level&, int /*points*/, float weight,
                                         const SampleGradient<float>& grad) {
  to.put(index, weight, grad);
}
template <typename T>
__device__ __forceinline__ void put_once(const SampleGrads<float>& to, int64_t index,
                                         const FusedSamples<T, float>& source,
                                         const typename FusedSamples<T, float>::Raw& raw, const Level& level,
                                         int points, float weight, const SampleGradient<float>& grad) {
  if (to.offsets == nullptr) return to.put(index, weight, grad);
  to.weights[index] = grad.weight;
  const Pack<float, 2> of_offset = source.grad_offset(raw, level, points, grad.x, grad.y);
  if (source.full_precision) {
    store_pack<float, 2>(reinterpret_cast<float*>(to.offsets) + 2 * index, of_offset.at);
  } else {
    store_pack<T, 2>(reinterpret_cast<T*>(to.offsets) + 2 * index, of_offset.at);
  }
}

// A call of the backward, none of whose tensors is empty. Rows of value and grad_output begin at multiples of 16 bytes
// and have a multiple of 16 bytes. Form is the form of the operator, GivenBackward or FusedBackward:
//   form.source<T, A>()               the samples, for a kernel that computes the softmax of rows itself
//   form.source_with_softmax<T, A>()  the samples, for a kernel that reads a softmax; T is the type of the values
//   form.with_source<A>(f)            calls f with source_with_softmax, where the kernel does not depend on T
//   form.grads<A>()                   the place for the gradients of samples
//   form.final_grads<A>()             the same, for a kernel that writes each of them only once, by put_once()
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

}  // namespace
}  // namespace visdet::ms_deform_attn

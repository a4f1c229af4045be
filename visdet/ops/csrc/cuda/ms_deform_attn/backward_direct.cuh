// Path "direct": few samples (a decoder), where sorting over the whole pyramid does not pay.
//
// A group of LANES neighbouring threads owns one sample, a block the samples next to each other. The group reads the
// sample's row of grad_output and its four rows of value, adds to the four rows of grad_sums, and its first thread
// writes the gradients of the sample's location and weight.
//
// Races: groups add to the same rows of grad_sums, which is cleared before, by atomic additions of float32. Their order
// differs between runs, so grad_value does, too; no other address is written twice.
#pragma once

#include "common/bilinear.h"
#include "cuda/ms_deform_attn/backward_call.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kSampleThreads = 256;  // one thread a sample

// Lanes of a warp in the group of `size` threads that this thread belongs to.
template <int SIZE>
__device__ __forceinline__ unsigned group_mask() {
  if constexpr (SIZE == 32) return 0xffffffffu;
  return ((1u << (SIZE % 32)) - 1) << (threadIdx.x % 32 / SIZE * SIZE);
}

// Few samples (a decoder), where sorting over the whole pyramid does not pay: a group of LANES threads takes one
// sample, adds to the four rows of grad_sums, which was zeroed, and works out the sample's own gradients.
template <typename T, typename A, typename Source, int LANES>
__global__ void __launch_bounds__(kSampleThreads)
    direct_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const Source source, A* __restrict__ grad_sums, const SampleGrads<A> grads,
                  const MsDeformAttnProblem problem) {
  constexpr int VEC = 4;  // 16 bytes of sums, so that the lanes' reductions lie side by side
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, static_cast<int>(problem.L), table);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kSampleThreads + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int64_t row = index / problem.K, query = row / problem.G, b = query / problem.Q;
  if (b >= problem.B) return;
  const int g = static_cast<int>(row - query * problem.G), k = static_cast<int>(index - row * problem.K);
  int l = 0;
  while (k >= table[l].level.end) ++l;
  const Level level = table[l].level;
  typename Source::Raw raw = source.fetch_position(index, query * problem.L + l);
  source.fetch_weight(index, raw);
  const A weight = source.weight(raw, source.row_at(row));
  A x, y;
  source.position(raw, level, table[l].points, x, y);
  Bilinear<A> at;
  const bool counts = level.H > 0 && locate(x, y, level.H, level.W, at);
  A dot[4] = {}, corner_weights[4];
  if (counts) {
    at.corner_weights(corner_weights);
    const int64_t C = problem.C, image = (b * problem.S * problem.G + g) * C;
    for (int64_t c = lane * VEC; c < C; c += LANES * VEC) {
      A g_out[VEC];
      load_pack<T, VEC>(grad_output + row * C + c, g_out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!at.is_inside[i]) continue;
        const int64_t offset = image + (level.start + static_cast<int64_t>(at.index[i])) * problem.G * C + c;
        A corner[VEC], part[VEC];
        load_pack<T, VEC>(value + offset, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          dot[i] += corner[v] * g_out[v];
          part[v] = corner_weights[i] * weight * g_out[v];
        }
        add_pack<VEC>(grad_sums + offset, part);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[i] += __shfl_xor_sync(group_mask<LANES>(), dot[i], step);
    }
  }
  if (lane > 0) return;
  if (!counts) {
    const A nothing = level.H > 0 ? A(0) : quiet_nan<A>();
    return grads.put(index, weight, nothing, nothing, nothing, false);
  }
  const A top = dot[0] + at.fx * (dot[1] - dot[0]), bottom = dot[2] + at.fx * (dot[3] - dot[2]);
  const A left = dot[2] - dot[0], right = dot[3] - dot[1];
  grads.put(index, weight, top + at.fy * (bottom - top),
            level.W * weight * ((dot[1] - dot[0]) + at.fy * (right - left)),
            level.H * weight * (left + at.fx * (right - left)), false);
}

// The path of few samples.
template <typename Form>
const char* direct_declines(const BackwardCall<Form>& call) {
  if (call.deterministic) return "it adds in no fixed order, and the call is deterministic";
  if (call.is_double()) return "the values are float64";
  const MsDeformAttnProblem& problem = call.problem;
  return problem.Q * problem.K <= kDirectSamples * problem.S ? nullptr : "there are more than 4 samples a texel";
}

template <typename Form>
void direct_launch(const BackwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const LevelPlan* plan = call.plans.get();
  const bool is_float = call.value.scalar_type() == ScalarType::Float;
  Tensor sums = is_float ? zero_(call.grad_value) : new_zeros(call.value, call.value.sizes(), ScalarType::Float);
  dispatch_value_type(call.value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (sizeof(A) == 4) {
      const auto source = call.form.template source_with_softmax<T, A>();
      using Source = std::decay_t<decltype(source)>;
      dispatch_lanes(problem.C, [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::value;
        const int64_t samples = problem.B * problem.Q * problem.G * problem.K;
        launch({kOp, "direct_kernel", call.scope, ceil_div(samples * kLanes, kSampleThreads), kSampleThreads,
                static_cast<int64_t>(sizeof(LevelPlan)) * problem.L},
               direct_kernel<T, A, Source, kLanes>, static_cast<const T*>(call.grad_output.const_data_ptr()),
               static_cast<const T*>(call.value.const_data_ptr()), plan, source,
               static_cast<A*>(sums.mutable_data_ptr()), call.form.template grads<A>(), problem);
      });
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

}  // namespace
}  // namespace visdet::ms_deform_attn

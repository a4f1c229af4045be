// Path "direct": few samples, as a decoder has them, for which sorting over the whole pyramid does not pay.
//
// A group of 2^lane_bits neighbouring threads owns a sample; a block has as many as fit, in the order of their index.
// The group reads the sample's row of grad_output and its four rows of value, and adds to the four rows of grad_sums.
// Its first thread writes the gradients of the sample's location and weight.
//
// Races: groups add to the same rows of grad_sums, which is zero before, by atomic additions of float32. Their order
// differs between runs, and with it the rounding of grad_value. Every other address has one writer.
#pragma once

#include "common/bilinear.h"
#include "cuda/ms_deform_attn/backward_call.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kDirectThreads = 256;

// Returns the logarithm of the number of threads, 4 to 32, that read a row of C channels together, four channels each.
// A row of more than 128 channels takes 32 threads several steps.
inline int lane_bits_of(int64_t C) {
  int bits = 2;
  while (bits < 5 && int64_t{4} << bits < C) ++bits;
  return bits;
}

template <typename T, typename Source>
__global__ void __launch_bounds__(kDirectThreads)
    direct_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const Source source, float* __restrict__ grad_sums, const SampleGrads<float> grads,
                  const MsDeformAttnProblem problem, int lane_bits) {
  constexpr int VEC = 4;  // 16 bytes of grad_sums for each thread, so that a group's additions lie side by side
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, static_cast<int>(problem.L), table);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x) >> lane_bits;
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1);
  const int64_t row = index / problem.K, query = row / problem.G, b = query / problem.Q;
  if (b >= problem.B) return;
  const int g = static_cast<int>(row - query * problem.G), k = static_cast<int>(index - row * problem.K);
  int l = 0;
  while (k >= table[l].level.end) ++l;
  const Level level = table[l].level;
  typename Source::Raw raw = source.fetch_position(index, query * problem.L + l);
  source.fetch_weight(index, raw);
  const float weight = source.weight(raw, source.row_at(row));
  float x, y;
  source.position(raw, level, table[l].points, x, y);
  Bilinear<float> at;
  const bool counts = level.H > 0 && locate(x, y, level.H, level.W, at);
  float dots[4] = {}, corner_weights[4];
  if (counts) {
    at.corner_weights(corner_weights);
    const int64_t C = problem.C, image = (b * problem.S * problem.G + g) * C;
    for (int64_t c = lane * VEC; c < C; c += lanes * VEC) {
      float g_out[VEC];
      load_pack<T, VEC>(grad_output + row * C + c, g_out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!at.is_inside[i]) continue;
        const int64_t offset = image + (level.start + static_cast<int64_t>(at.index[i])) * problem.G * C + c;
        float corner[VEC], of_sample[VEC];
        load_pack<T, VEC>(value + offset, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          dots[i] += corner[v] * g_out[v];
          of_sample[v] = corner_weights[i] * weight * g_out[v];
        }
        add_pack<VEC>(grad_sums + offset, of_sample);
      }
    }
    sum_lanes(dots, 1, lanes, kAllLanes >> (32 - lanes) << (threadIdx.x % 32 & ~(lanes - 1)));
  }
  if (lane > 0) return;
  grads.put(index, weight,
            counts ? sample_gradient(dots, at.fx, at.fy, weight, level) : gradient_of_uncounted<float>(level));
}

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
  dispatch_value_type(call.value.scalar_type(), [&]<typename T>(T, auto accumulate_tag) {
    if constexpr (std::is_same_v<decltype(accumulate_tag), float>) {
      const auto source = call.form.template source_with_softmax<T, float>();
      using Source = std::decay_t<decltype(source)>;
      const int lane_bits = lane_bits_of(problem.C);
      const int64_t samples = problem.B * problem.Q * problem.G * problem.K;
      launch({kOp, "direct_kernel", call.scope, ceil_div(samples << lane_bits, kDirectThreads), kDirectThreads,
              static_cast<int64_t>(sizeof(LevelPlan)) * problem.L},
             direct_kernel<T, Source>, data_of(call.grad_output), data_of(call.value), plan, source, data_of(sums),
             call.form.template grads<float>(), problem, lane_bits);
    }
  });
  if (!is_float) copy_(call.grad_value, sums);
}

}  // namespace
}  // namespace visdet::ms_deform_attn

// The field of many points.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/launch.h"
#include "cuda/gaussian_field/calls.cuh"
#include "cuda/gaussian_field/finish.cuh"
#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

// Writes 2^-square to `result` if `always` is not 0, which holds always, unknown to ptxas: it then waits for the
// readers of what was in `result`, and cannot gather the exponentials of all points. Those would wait for one another:
// the special-function unit takes one of a warp every eight cycles.
__device__ __forceinline__ void exponential_in_turn(float square, int always, float& result) {
  asm("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ex2.approx.ftz.f32 %0, %1;}" : "+f"(result) : "f"(-square), "r"(always));
}

constexpr int kFieldPoints = 16;  // a thread
constexpr int kFieldBlocks = 4;   // a multiprocessor

// Part p of the Gaussians is [first[p], first[p + 1]).
constexpr int kMostParts = 100;
struct Parts {
  int32_t count;
  int64_t first[kMostParts + 1];
};

// The field, in float32, of so many points that they fill the GPU: point_block's task without its order and gradients.
// A block takes kThreads * kFieldPoints points and a part of the Gaussians. A thread takes two points at a time. The
// statements stand in one of the fastest of 200 orders, the slowest of which takes 7 % longer: the order decides which
// of ptxas's instructions wait for one another at the two ports of the registers.
__global__ void __launch_bounds__(kThreads, kFieldBlocks)
    field_kernel(const Inputs<float> in, const __grid_constant__ Parts parts, float* __restrict__ to, int owners,
                 int always) {
  __shared__ Gaussian<float> tile[kThreads];
  const int part = blockIdx.x / owners;
  const int64_t mine = static_cast<int64_t>(blockIdx.x % owners) * (kThreads * kFieldPoints) + threadIdx.x;
  float x[kFieldPoints], y[kFieldPoints], z[kFieldPoints], sums[kFieldPoints] = {};
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = mine + r * kThreads;
    const float* point = in.points + 3 * b;
    const bool exists = b < in.B;
    x[r] = exists ? point[0] : 0;
    y[r] = exists ? point[1] : 0;
    z[r] = exists ? point[2] : 0;
  }
  float e = 0;
  const int64_t end = parts.first[part + 1];
  for (int64_t first = parts.first[part]; first < end; first += kThreads) {
    const int count = static_cast<int>(min(end - first, int64_t{kThreads}));
    if (threadIdx.x < count) tile[threadIdx.x] = read_gaussian(in, first + threadIdx.x, Exponent<float>::kScale);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      const Gaussian<float> g = tile[k];
#pragma unroll
      for (int r = 0; r < kFieldPoints; r += 2) {
        const int s = r + 1;
        const float v0_r = (x[r] - g.x) * g.i00;
        const float v0_s = (x[s] - g.x) * g.i00;
        float v1_s = (y[s] - g.y) - g.l10 * v0_s;
        float v1_r = (y[r] - g.y) - g.l10 * v0_r;
        const float dz_r = z[r] - g.z;
        v1_r = v1_r * g.i11;
        float v2_s = (z[s] - g.z) - g.l20 * v0_s;
        float v2_r = dz_r - g.l20 * v0_r;
        float square_r = v1_r * v1_r;
        v2_r = v2_r - g.l21 * v1_r;
        square_r = v0_r * v0_r + square_r;
        v2_r = v2_r * g.i22;
        square_r = v2_r * v2_r + square_r;
        v1_s = v1_s * g.i11;
        v2_s = v2_s - g.l21 * v1_s;
        float square_s = v1_s * v1_s;
        square_s = v0_s * v0_s + square_s;
        v2_s = v2_s * g.i22;
        square_s = v2_s * v2_s + square_s;
        exponential_in_turn(square_r, always, e);
        sums[r] += g.weight * e;
        exponential_in_turn(square_s, always, e);
        sums[s] += g.weight * e;
      }
    }
    __syncthreads();  // the tile has been read
  }
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = mine + r * kThreads;
    if (b < in.B) to[part * in.B + b] = sums[r];
  }
}

// Parts for `owners` blocks each on a GPU that works on `places` blocks at a time: large ones first, then ever smaller
// ones. A multiprocessor serves its oldest block first, so that equal blocks end at very different times, and the last
// ones of all run on a GPU that is no longer full: the smaller they are, the shorter.
Parts decreasing_parts(int64_t count, int64_t owners, int64_t places) {
  constexpr double kTake = 0.76, kLeast = 0.03;  // of a share
  const int64_t at_once = std::max<int64_t>(1, places / owners);
  const double share = std::min(1.0, static_cast<double>(owners) / static_cast<double>(places));  // a block's
  const double least = std::max(32.0, kLeast * share * static_cast<double>(count));
  Parts parts{};
  int64_t end = 0;
  while (end < count) {
    const double wanted = std::max(least, kTake * share * static_cast<double>(count - end));
    const int64_t size = 8 * static_cast<int64_t>(std::ceil(wanted / 8));  // whole passes of the unrolled loop
    for (int64_t i = 0; i < at_once && end < count; ++i) {
      end = parts.count + 1 < kMostParts ? std::min(end + size, count) : count;
      parts.first[++parts.count] = end;
    }
  }
  return parts;
}

// Several points a thread share the reading of a Gaussian, once there are enough to fill the GPU.
template <typename Call>
const char* several_points_decline(const Call& call) {
  const int64_t enough = 4 * kThreads * call.scope.device().multiprocessors;
  return call.problem.B >= enough ? nullptr : "its points are too few to fill the GPU";
}

const char* many_points_decline(const ForwardCall& call) {
  if (call.points.scalar_type() == ScalarType::Double) return "points are float64";
  return several_points_decline(call);
}

void launch_many_points(const ForwardCall& call) {
  const auto in = inputs_of_field<float>(call);
  auto* field = call.field.mutable_data_ptr<float>();
  const int64_t owners = ceil_div(in.B, kThreads * kFieldPoints);
  const Parts parts = decreasing_parts(in.N, owners, kFieldBlocks * call.scope.device().multiprocessors);
  Tensor scratch = call.points;
  float* to = field;
  if (parts.count > 1) {
    scratch = new_empty(call.points, {parts.count, in.B});
    to = scratch.mutable_data_ptr<float>();
  }
  launch({call.op, "field_kernel", call.scope, owners * parts.count, kThreads}, field_kernel, in, parts, to,
         static_cast<int>(owners), 1);
  if (parts.count == 1) return;
  const int64_t blocks = ceil_div(in.B, kThreads);
  launch({call.op, "finish_kernel", call.scope, blocks, kThreads}, finish_kernel<float, false, true>, in, nullptr, to,
         parts.count, field, in.B, static_cast<int>(blocks), nullptr, 0, nullptr, nullptr, nullptr);
}

}  // namespace
}  // namespace visdet::gaussian_field

// The field, in float32, of so many points that they fill the GPU. A thread owns several points, and reads a Gaussian
// once for all of them.
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/gaussian_field/finish.cuh"
#include "cuda/gaussian_field/gaussians.cuh"

namespace visdet::gaussian_field {
namespace {

constexpr int kFieldPoints = 16;  // of a thread
constexpr int kFieldBlocks = 4;   // of a multiprocessor at a time

// The Gaussians in parts: [first[p], first[p + 1]) is part p.
constexpr int kMaxParts = 100;
struct Parts {
  int32_t count;
  int64_t first[kMaxParts + 1];
};

// Writes 2^-square to `result`. `always` is never 0, which the assembler cannot know: since the instruction might not
// write, it stays behind the readers of what was in `result`. So the exponentials of a thread's points are spread among
// the other instructions. Gathered, they would wait for one another: the special-function unit takes one of a warp
// every eight cycles.
__device__ __forceinline__ void exponential_in_turn(float square, int always, float& result) {
  asm("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ex2.approx.ftz.f32 %0, %1;}" : "+f"(result) : "f"(-square), "r"(always));
}

// A block owns kThreads * kFieldPoints points and a part of the Gaussians, and writes the sums of its part.
__global__ void __launch_bounds__(kThreads, kFieldBlocks)
    field_kernel(const Inputs<float> in, const __grid_constant__ Parts parts, float* __restrict__ to, int owners,
                 int always) {
  __shared__ Gaussian<float> tile[kThreads];
  const int part = blockIdx.x / owners;
  const int64_t first_b = static_cast<int64_t>(blockIdx.x % owners) * (kThreads * kFieldPoints) + threadIdx.x;
  float x[kFieldPoints], y[kFieldPoints], z[kFieldPoints], sums[kFieldPoints] = {};
  bool has_wild = false;  // this thread's points
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = first_b + r * kThreads;
    const float* point = in.points + 3 * b;
    const bool exists = b < in.B;
    x[r] = exists ? point[0] : 0;
    y[r] = exists ? point[1] : 0;
    z[r] = exists ? point[2] : 0;
    has_wild |= is_wild(x[r], y[r], z[r]);
  }
  float e = 0;
  const int64_t end = parts.first[part + 1];
  for (int64_t first = parts.first[part]; first < end; first += kThreads) {
    const int count = static_cast<int>(min(end - first, int64_t{kThreads}));
    bool reads_wild = has_wild;
    if (threadIdx.x < count) {
      tile[threadIdx.x] = read_gaussian(in, first + threadIdx.x, Exponential<float>::kScale);
      reads_wild |= is_wild(tile[threadIdx.x]);
    }
    for_tile(reads_wild, [&](auto wild) {
#pragma unroll(decltype(wild)::value ? 1 : 8)
      for (int k = 0; k < count; ++k) {
        const Gaussian<float> g = tile[k];
#pragma unroll
        for (int r = 0; r < kFieldPoints; ++r) {
          float v[3];
          exponential_in_turn(whiten<decltype(wild)::value>(g, x[r], y[r], z[r], v), always, e);
          sums[r] += g.weight * e;
        }
      }
    });
    __syncthreads();  // the tile has been read
  }
#pragma unroll
  for (int r = 0; r < kFieldPoints; ++r) {
    const int64_t b = first_b + r * kThreads;
    if (b < in.B) to[part * in.B + b] = sums[r];
  }
}

// Divides `count` Gaussians into parts for a GPU that works on `at_once` blocks at a time, where each part takes
// `owners` blocks: large parts first, then ever smaller ones. A multiprocessor serves its oldest block first, so that
// equal blocks would end at very different times. The last blocks run on a GPU that is no longer full, and the smaller
// they are, the sooner they end.
Parts decreasing_parts(int64_t count, int64_t owners, int64_t at_once) {
  constexpr double kFirst = 0.76, kLeast = 0.03;  // of what a block would take if all took the same
  const int64_t parts_at_once = std::max<int64_t>(1, at_once / owners);
  const double equal = std::min(1.0, static_cast<double>(owners) / static_cast<double>(at_once));
  const double least = std::max(32.0, kLeast * equal * static_cast<double>(count));
  Parts parts{};
  int64_t end = 0;
  while (end < count) {
    const double wanted = std::max(least, kFirst * equal * static_cast<double>(count - end));
    const int64_t size = 8 * static_cast<int64_t>(std::ceil(wanted / 8));  // whole passes of the unrolled loop
    for (int64_t i = 0; i < parts_at_once && end < count; ++i) {
      end = parts.count + 1 < kMaxParts ? std::min(end + size, count) : count;
      parts.first[++parts.count] = end;
    }
  }
  return parts;
}

const char* many_points_decline(const ForwardCall& call) {
  if (call.points.scalar_type() == ScalarType::Double) return "points are float64";
  const int64_t enough = 4 * kThreads * call.scope.device().multiprocessors;
  return call.problem.B >= enough ? nullptr : "its points are too few to fill the GPU";
}

void launch_many_points(const ForwardCall& call) {
  const auto in = call.inputs<float>();
  float* field = data_of(call.field);
  const int64_t owners = ceil_div(in.B, kThreads * kFieldPoints);
  const Parts parts = decreasing_parts(in.N, owners, kFieldBlocks * call.scope.device().multiprocessors);
  Tensor scratch = call.points;
  float* to = field;
  if (parts.count > 1) {
    scratch = new_empty(call.points, {parts.count, in.B});
    to = data_of(scratch);
  }
  launch({call.op, "field_kernel", call.scope, owners * parts.count, kThreads}, field_kernel, in, parts, to,
         static_cast<int>(owners), 1);
  if (parts.count == 1) return;
  const int64_t blocks = ceil_div(in.B, kThreads);
  launch({call.op, "finish_kernel", call.scope, blocks, kThreads}, finish_kernel<float, Task::kField>, in, to,
         parts.count, in.B, static_cast<int>(blocks), nullptr, 0, Outputs<float>{nullptr, field});
}

}  // namespace
}  // namespace visdet::gaussian_field

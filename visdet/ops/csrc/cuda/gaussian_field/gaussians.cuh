// What every kernel of Gaussians reads: the tensors of a call, a Gaussian as the inner loops want it, and its two
// triangular systems.
#pragma once

#include <algorithm>

#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "gaussian_field.h"

namespace visdet::gaussian_field {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 128;

template <typename A>
struct Box {
  A low[3], high[3];
};

template <typename A>
struct Inputs {
  int64_t B, N;
  const A* points;                // [B, 3]
  const A* means;                 // [N, 3]
  const A* cholesky;              // [N, 3, 3]
  const A* weights;               // [N]
  const int64_t* point_order;     // [B], or null: as they come
  const int64_t* gaussian_order;  // [N], or null
  A cutoff;                       // tolerance / N, or 0: leave out nothing
  const Box<A>* boxes;            // [N] of Gaussians, in gaussian_order
  const Box<A>* gaussian_groups;  // of kThreads neighbours each
  const Box<A>* point_groups;
  int64_t part;  // of the split side, what a block takes
};

// The i-th of `count` points or Gaussians in an order. An order that is no permutation leads to no stray access.
__device__ __forceinline__ int64_t in_order(const int64_t* order, int64_t i, int64_t count) {
  return min(max(order[i], int64_t{0}), count - 1);
}

// exp(-distance / 2) is 2^-|v'|^2 with v' = v * kScale in float32, where 2^x is one instruction.
template <typename A>
struct Exponent;
template <>
struct Exponent<float> {
  static constexpr float kScale = 0.84932180028801907f;  // sqrt(log2(e) / 2)
  static __device__ __forceinline__ float apply(float square) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(-square));
    return result;
  }
};
template <>
struct Exponent<double> {
  static constexpr double kScale = 1.0;
  static __device__ __forceinline__ double apply(double square) { return exp(-0.5 * square); }
};

// In a field, a Gaussian thinner than this is 0 wherever floating point tells a point from its plane. Its reciprocal is
// kept within numbers whose squares are finite, so that the gradients of its zeros are zero, not zero times infinity.
template <typename A>
constexpr A kThinnest = sizeof(A) == 4 ? A(1e-18) : A(1e-150);

// A Gaussian as the inner loops want it: the factor divided by the exponent's scale, its diagonal inverted. A diagonal
// that is not positive makes everything NaN.
template <typename A>
struct alignas(16) Gaussian {
  A x, y, z, weight;
  A i00, l10, i11, l20;
  A l21, i22, reserved, reserved_too;
};

template <typename A>
__device__ __forceinline__ Gaussian<A> read_gaussian(const Inputs<A>& in, int64_t n, A scale) {
  const A *mean = in.means + 3 * n, *l = in.cholesky + 9 * n;
  const bool is_valid = l[0] > 0 && l[4] > 0 && l[8] > 0;
  const A nan = quiet_nan<A>();
  // Without weights the distance is asked for, which a thin Gaussian has, too.
  const A thinnest = in.weights ? kThinnest<A> : A(0);
  return {mean[0],
          mean[1],
          is_valid ? mean[2] : nan,
          in.weights ? in.weights[n] : A(0),
          scale / max(l[0], thinnest),
          l[3] / scale,
          scale / max(l[4], thinnest),
          l[6] / scale,
          l[7] / scale,
          scale / max(l[8], thinnest),
          A(0),
          A(0)};
}

// v = L^-1 (point - mean); returns |v|^2.
template <typename A>
__device__ __forceinline__ A whiten(const Gaussian<A>& g, A x, A y, A z, A (&v)[3]) {
  const A dx = x - g.x, dy = y - g.y, dz = z - g.z;
  v[0] = dx * g.i00;
  v[1] = (dy - g.l10 * v[0]) * g.i11;
  v[2] = (dz - g.l20 * v[0] - g.l21 * v[1]) * g.i22;
  return v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
}

// u = L^-T v.
template <typename A>
__device__ __forceinline__ void whiten_back(const Gaussian<A>& g, const A (&v)[3], A (&u)[3]) {
  u[2] = v[2] * g.i22;
  u[1] = (v[1] - g.l21 * u[2]) * g.i11;
  u[0] = (v[0] - g.l10 * u[1] - g.l20 * u[2]) * g.i00;
}

template <typename A>
Inputs<A> inputs_of(const GaussianProblem& problem, const Tensor& points, const Tensor& means, const Tensor& cholesky) {
  Inputs<A> in{};
  in.B = problem.B, in.N = problem.N;
  in.points = points.const_data_ptr<A>();
  in.means = means.const_data_ptr<A>();
  in.cholesky = cholesky.const_data_ptr<A>();
  return in;
}

template <typename F>
void dispatch_float(const Tensor& points, const F& f) {
  points.scalar_type() == ScalarType::Double ? f(double{}) : f(float{});
}

}  // namespace
}  // namespace visdet::gaussian_field

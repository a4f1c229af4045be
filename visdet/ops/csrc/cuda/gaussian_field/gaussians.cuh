// What the kernels of mahalanobis_distance and gaussian_field read: the tensors of a call, a Gaussian in the form that
// the inner loops want, and its two triangular systems.
#pragma once

#include "common/launch.h"
#include "common/values.cuh"
#include "gaussian_field.h"

namespace visdet::gaussian_field {
namespace {

constexpr int kThreads = 128;

// A box along the axes.
struct Box {
  float low[3], high[3];
};

template <typename A>
struct Inputs {
  int64_t B, N;
  const A* points;    // [B, 3]
  const A* means;     // [N, 3]
  const A* cholesky;  // [N, 3, 3]
  const A* weights;   // [N], or null for distances
  int64_t part;       // how many points or Gaussians a block looks at, of the side that is divided among blocks

  // For the path that leaves out pairs. The orders are permutations that bring neighbours together.
  const int64_t* point_order;     // [B]
  const int64_t* gaussian_order;  // [N]
  A cutoff;                       // tolerance / N: terms below it may be left out
  const Box* boxes;               // [N] around each Gaussian, in gaussian_order
  const Box* gaussian_groups;     // around kThreads neighbouring Gaussians each
  const Box* point_groups;        // around kThreads neighbouring points each
};

// exp(-distance / 2). In float32 it is 2^-|v'|^2 with v' = v * kScale, where 2^x is one instruction.
template <typename A>
struct Exponential;
template <>
struct Exponential<float> {
  static constexpr float kScale = 0.84932180028801907f;  // sqrt(log2(e) / 2)
  static __device__ __forceinline__ float of(float square) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(-square));
    return result;
  }
};
template <>
struct Exponential<double> {
  static constexpr double kScale = 1.0;
  static __device__ __forceinline__ double of(double square) { return exp(-0.5 * square); }
};

// In a field, a Gaussian thinner than this is 0 wherever floating point tells a point from the Gaussian's plane. Its
// reciprocal is kept within numbers whose squares are finite, so that the gradients of its zeros are zero, not zero
// times infinity.
template <typename A>
constexpr A kThinnest = sizeof(A) == 4 ? A(1e-18) : A(1e-150);

// A Gaussian in the form that the inner loops want: the factor L divided by the scale of the exponential, its diagonal
// inverted. A diagonal that is not positive makes everything NaN.
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
  const A thinnest = in.weights ? kThinnest<A> : A(0);  // a thin Gaussian has distances, too
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

// Solves L v = point - mean and returns |v|^2.
template <typename A>
__device__ __forceinline__ A whiten(const Gaussian<A>& g, A x, A y, A z, A (&v)[3]) {
  const A dx = x - g.x, dy = y - g.y, dz = z - g.z;
  v[0] = dx * g.i00;
  v[1] = (dy - g.l10 * v[0]) * g.i11;
  v[2] = (dz - g.l20 * v[0] - g.l21 * v[1]) * g.i22;
  return v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
}

// Solves L^T u = v.
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
  in.points = data_of<A>(points);
  in.means = data_of<A>(means);
  in.cholesky = data_of<A>(cholesky);
  return in;
}

// As many blocks of kThreads threads as a GPU works on at a time, twice.
int64_t wanted_blocks(const DeviceScope& scope) { return 32 * scope.device().multiprocessors; }

// What a pass over all pairs of points and Gaussians is for: the field; the gradients of the field with respect to
// points and Gaussians; the gradients of distances with respect to Gaussians.
enum class Task { kField, kFieldGradients, kDistanceGradients };

// Where a pass writes, and the gradient that it reads. Null is what its task has no use for.
template <typename A>
struct Outputs {
  const A* grad_output;
  A* of_points;  // the field [B], or the gradients of points [B, 3]
  A *grad_means, *grad_cholesky, *grad_weights;
};

// A call of gaussian_field with at least one point and one Gaussian.
struct FieldCall {
  const char* op;
  const DeviceScope& scope;
  const GaussianProblem& problem;
  const Tensor &points, &means, &cholesky, &weights, &point_order, &gaussian_order;
  double tolerance;

  template <typename A>
  Inputs<A> inputs() const {
    auto in = inputs_of<A>(problem, points, means, cholesky);
    in.weights = data_of<A>(weights);
    return in;
  }
};
struct ForwardCall : FieldCall {
  static constexpr Task kTask = Task::kField;
  const Tensor& field;

  template <typename A>
  Outputs<A> outputs() const {
    return {nullptr, mutable_data_of<A>(field)};
  }
};
struct BackwardCall : FieldCall {
  static constexpr Task kTask = Task::kFieldGradients;
  const Tensor &grad_output, &grad_points, &grad_means, &grad_cholesky, &grad_weights;

  template <typename A>
  Outputs<A> outputs() const {
    return {data_of<A>(grad_output), mutable_data_of<A>(grad_points), mutable_data_of<A>(grad_means),
            mutable_data_of<A>(grad_cholesky), mutable_data_of<A>(grad_weights)};
  }
};

}  // namespace
}  // namespace visdet::gaussian_field

// What the kernels of mahalanobis_distance and gaussian_field read: the tensors of a call, a Gaussian in the form that
// the inner loops want, and its two triangular systems.
#pragma once

#include <type_traits>

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

template <typename A>
constexpr A kGreatest = sizeof(A) == 4 ? A(3.4028234663852886e38) : A(1.7976931348623157e308);
// The scaled square beyond which Exponential is 0 or below any normal number.
template <typename A>
constexpr A kFarthestTerm = sizeof(A) == 4 ? A(126) : A(1416);

// A Gaussian in the form that the inner loops want. The factor is divided by the scale of the exponential; there are
// the reciprocals of its diagonal, and the rest divided by the diagonal of its row, which does not overflow where
// factors are large. Distances are infinite where their square is above `farthest`, and `nan`, 0 or NaN, is added to
// them. A diagonal that is not positive is NaN.
template <typename A>
struct alignas(16) Gaussian {
  A x, y, z, weight;
  A i00, r10, i11, r20;
  A r21, i22, farthest, nan;
};

template <typename A>
__device__ __forceinline__ Gaussian<A> read_gaussian(const Inputs<A>& in, int64_t n, A scale) {
  const A *mean = in.means + 3 * n, *l = in.cholesky + 9 * n;
  // A thin Gaussian has distances, too.
  const A thinnest = in.weights ? kThinnest<A> : A(0), greatest = kGreatest<A>;
  const auto inverse = [&](A diagonal) { return min(1 / max(diagonal, thinnest), greatest); };
  const A i11 = inverse(l[4]), i22 = inverse(l[8]);
  Gaussian<A> g{mean[0],
                mean[1],
                mean[2],
                in.weights ? in.weights[n] : A(0),
                inverse(l[0]) * scale,
                l[3] * i11,
                i11 * scale,
                l[6] * i22,
                l[7] * i22,
                i22 * scale,
                in.weights ? kFarthestTerm<A> : greatest,
                A(0)};
  bool is_nan = !(l[0] > 0 && l[4] > 0 && l[8] > 0) || isnan(l[3]) || isnan(l[6]) || isnan(l[7]);
  for (int d = 0; d < 3; ++d) is_nan |= isnan(mean[d]);
  if (is_nan) g.nan = quiet_nan<A>();
  // A Gaussian with infinite numbers off the diagonal is infinitely far from every point.
  if (!(abs(g.r10) <= greatest && abs(g.r20) <= greatest && abs(g.r21) <= greatest)) {
    g.x = A(__builtin_huge_val()), g.r10 = g.r20 = g.r21 = 0;
  }
  return g;
}

// Points and Gaussians within these limits have finite sums: with coordinates to 10^9, reciprocals to 10^6 and numbers
// off the diagonal to 10^4, the largest, 2 * 10^9 * 10^12 * (1 + 10^4)^4, is below 10^38. Any others are wild.
template <typename A>
__device__ __forceinline__ bool is_wild(A x, A y, A z) {
  return !(abs(x) <= A(1e9) && abs(y) <= A(1e9) && abs(z) <= A(1e9));
}
template <typename A>
__device__ __forceinline__ bool is_wild(const Gaussian<A>& g) {
  return is_wild(g.x, g.y, g.z) || !(max(max(g.i00, g.i11), g.i22) <= A(1e6)) ||
         !(max(max(abs(g.r10), abs(g.r20)), abs(g.r21)) <= A(1e4)) || isnan(g.nan);
}

// Solves L v = point - mean and returns |v|^2. With WILD, where that is too far, v is 0 and the result infinite; it is
// NaN for a point or a Gaussian with a NaN. Without WILD, neither the point nor the Gaussian is wild.
template <bool WILD, typename A>
__device__ __forceinline__ A whiten(const Gaussian<A>& g, A x, A y, A z, A (&v)[3]) {
  const A dx = x - g.x, dy = y - g.y, dz = z - g.z;
  v[0] = dx * g.i00;
  v[1] = dy * g.i11 - g.r10 * v[0];
  v[2] = dz * g.i22 - g.r20 * v[0] - g.r21 * v[1];
  A square = v[0] * v[0] + v[1] * v[1] + v[2] * v[2];
  if constexpr (WILD) {
    if (!(square <= g.farthest)) square = A(__builtin_huge_val()), v[0] = v[1] = v[2] = 0;
    square += isnan(x) || isnan(y) || isnan(z) ? quiet_nan<A>() : g.nan;
  }
  return square;
}

// Calls add(std::bool_constant<WILD>) for a tile, with WILD if a thread of the block has something wild. All threads
// call it. What they wrote to the tile before is complete.
template <typename F>
__device__ __forceinline__ void for_tile(bool has_wild, const F& add) {
  if (__syncthreads_or(has_wild)) {
    add(std::true_type());
  } else {
    add(std::false_type());
  }
}

// Solves L^T u = v.
template <typename A>
__device__ __forceinline__ void whiten_back(const Gaussian<A>& g, const A (&v)[3], A (&u)[3]) {
  const A w1 = v[1] - g.r21 * v[2];
  u[0] = (v[0] - g.r10 * w1 - g.r20 * v[2]) * g.i00;
  u[1] = w1 * g.i11;
  u[2] = v[2] * g.i22;
}

template <typename A>
Inputs<A> inputs_of(const GaussianTensors& tensors) {
  Inputs<A> in{};
  in.B = tensors.problem.B, in.N = tensors.problem.N;
  in.points = data_of(tensors.points);
  in.means = data_of(tensors.means);
  in.cholesky = data_of(tensors.cholesky);
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
struct FieldCall : FieldTensors {
  const char* op;
  const DeviceScope& scope;

  template <typename A>
  Inputs<A> inputs() const {
    auto in = inputs_of<A>(*this);
    in.weights = data_of(weights);
    return in;
  }
};
struct ForwardCall : FieldCall {
  static constexpr Task kTask = Task::kField;
  const Tensor& field;

  template <typename A>
  Outputs<A> outputs() const {
    return {nullptr, data_of(field)};
  }
};
struct BackwardCall : FieldCall {
  static constexpr Task kTask = Task::kFieldGradients;
  const GaussianGradients& gradients;

  template <typename A>
  Outputs<A> outputs() const {
    return {data_of(gradients.grad_output), data_of(gradients.points), data_of(gradients.means),
            data_of(gradients.cholesky), data_of(gradients.weights)};
  }
};

}  // namespace
}  // namespace visdet::gaussian_field

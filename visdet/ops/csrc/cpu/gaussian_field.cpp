// mahalanobis_distance and gaussian_field on the CPU. The contract is in csrc/gaussian_field.h.
//
// A vector's lanes are Gaussians. A block has as many Gaussians as a vector has lanes, and is kept as rows of one
// number for each: eleven rows of means, factors and weights, and six of the box around the block. Triangular systems
// are solved by substitution: an explicit inverse costs as much and loses the digits of ill-conditioned factors.
// Forward and the gradient of points are parallel over points, the gradients of Gaussians over blocks, so there are no
// races and no dependence on the number of threads.
#include "gaussian_field.h"

#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Rows of a block: mean, factor, weight, and 0 or NaN, which is added to distances; then the box of the block (only the
// first lane of each). Of the factor there are the reciprocals of the diagonal, and the rest divided by the diagonal of
// its row, which does not overflow where factors are large.
enum { kX, kY, kZ, k00, k10, k11, k20, k21, k22, kWeight, kNaN, kLow, kHigh = kLow + 3, kRows = kHigh + 3 };

template <typename A>
constexpr A kInfinity = A(__builtin_inf());
template <typename A>
constexpr A kGreatest = sizeof(A) == 4 ? A(__FLT_MAX__) : A(__DBL_MAX__);

// Writes the rows up to kLow of one Gaussian. A Gaussian with infinite numbers off the diagonal is infinitely far from
// every point.
template <typename A>
VISDET_INLINE void prepare_gaussian(const A* mean, const A* l, A weight, bool is_field, A (&values)[kLow]) {
  // In a field, a Gaussian thinner than this is 0 wherever floating point tells a point from its plane. Its reciprocal
  // is kept within numbers whose squares are finite, so that the gradients of its zeros are zero, not zero times
  // infinity.
  constexpr A kThinnest = sizeof(A) == 4 ? A(1e-18) : A(1e-150);
  const auto inverse = [&](A d) {
    const A one = 1 / (is_field && d < kThinnest ? kThinnest : d);
    return one < kGreatest<A> ? one : kGreatest<A>;
  };
  const A i[3] = {inverse(l[0]), inverse(l[4]), inverse(l[8])};
  A r[3] = {l[3] * i[1], l[6] * i[2], l[7] * i[2]};
  A x = mean[0];
  bool is_nan = mean[0] != mean[0] || mean[1] != mean[1] || mean[2] != mean[2];
  const int below[3] = {3, 6, 7};
  for (int k = 0; k < 3; ++k) {
    is_nan |= l[below[k]] != l[below[k]];
    if (!(r[k] <= kGreatest<A> && r[k] >= -kGreatest<A>)) r[k] = 0, x = kInfinity<A>;
  }
  const A nan = is_nan ? A(__builtin_nan("")) : A(0);
  const A all[kLow] = {x, mean[1], mean[2], i[0], r[0], i[1], r[1], r[2], i[2], weight, nan};
  for (int row = 0; row < kLow; ++row) values[row] = all[row];
}

template <typename A>
int64_t prepare_blocks(const GaussianArrays<A>& a, int64_t begin, int64_t end) {
  constexpr int W = kLanes<A>;
  int64_t bad = -1;
  for (int64_t block = begin; block < end; ++block) {
    A* rows = a.blocks + block * kRows * W;
    for (int i = 0; i < kRows * W; ++i) rows[i] = 0;
    for (int d = 0; d < 3; ++d) rows[(kLow + d) * W] = A(__builtin_inf()), rows[(kHigh + d) * W] = -A(__builtin_inf());
    for (int lane = 0; lane < W && block * W + lane < a.N; ++lane) {
      const int64_t i = block * W + lane, n = a.gaussian_order ? a.gaussian_order[i] : i;
      const A *mean = a.means + 3 * n, *l = a.cholesky + 9 * n;
      if (!(l[0] > 0 && l[4] > 0 && l[8] > 0)) bad = bad < 0 ? n : bad;
      const A weight = a.weights ? a.weights[n] : A(0);
      A values[kLow];
      prepare_gaussian(mean, l, weight, a.weights != nullptr, values);
      for (int row = 0; row < kLow; ++row) rows[row * W + lane] = values[row];
      if (a.cutoff > 0) {
        const A size = weight < 0 ? -weight : weight;
        if (size <= a.cutoff) continue;  // below the tolerance everywhere
        const A radius = __builtin_sqrt(2 * __builtin_log(static_cast<double>(size / a.cutoff)));
        const A reach[3] = {radius * l[0], radius * A(__builtin_sqrt(static_cast<double>(l[3] * l[3] + l[4] * l[4]))),
                            radius * A(__builtin_sqrt(static_cast<double>(l[6] * l[6] + l[7] * l[7] + l[8] * l[8])))};
        for (int d = 0; d < 3; ++d) {
          A &low = rows[(kLow + d) * W], &high = rows[(kHigh + d) * W];
          const A below = mean[d] - reach[d], above = mean[d] + reach[d];
          low = below < low ? below : low, high = above > high ? above : high;
        }
      }
    }
  }
  return bad;
}

// Returns whether a point lies outside a block's box, where its terms are below the cutoff. A NaN point is not outside.
template <typename A>
VISDET_INLINE bool is_outside(const A* rows, const A* point) {
  constexpr int W = kLanes<A>;
  bool outside = false;
  for (int d = 0; d < 3; ++d) outside |= point[d] < rows[(kLow + d) * W] || point[d] > rows[(kHigh + d) * W];
  const A sum = point[0] + point[1] + point[2];
  return outside && sum == sum;
}

// Writes v = L^-1 (point - mean) of a block's Gaussians and returns |v|^2. Where that is above `farthest`, which
// includes every sum with an infinite number, v is 0 and the result infinite. It is NaN for a point or a Gaussian with
// a NaN.
template <typename A>
VISDET_INLINE Vec<A> whiten(const A* rows, const A* point, A farthest, Vec<A> (&v)[3]) {
  constexpr int W = kLanes<A>;
  const Vec<A> dx = point[0] - load(rows + kX * W), dy = point[1] - load(rows + kY * W),
               dz = point[2] - load(rows + kZ * W);
  v[0] = dx * load(rows + k00 * W);
  v[1] = dy * load(rows + k11 * W) - load(rows + k10 * W) * v[0];
  v[2] = dz * load(rows + k22 * W) - load(rows + k20 * W) * v[0] - load(rows + k21 * W) * v[1];
  const Vec<A> square = v[0] * v[0] + v[1] * v[1] + v[2] * v[2], zero = {};
  const auto is_near = square <= farthest;
  for (Vec<A>& one : v) one = is_near ? one : zero;
  const bool is_nan = point[0] != point[0] || point[1] != point[1] || point[2] != point[2];
  return (is_near ? square : zero + kInfinity<A>)+load(rows + kNaN * W) + (is_nan ? A(__builtin_nan("")) : A(0));
}

// The distance beyond which the term of a field is 0, or there is no distance.
template <typename A, bool IS_FIELD>
constexpr A kFarthest = IS_FIELD ? -2 * ExpOf<A>::kLeast : kGreatest<A>;

// Writes u = L^-T v.
template <typename A>
VISDET_INLINE void whiten_back(const A* rows, const Vec<A> (&v)[3], Vec<A> (&u)[3]) {
  constexpr int W = kLanes<A>;
  const Vec<A> w1 = v[1] - load(rows + k21 * W) * v[2];
  u[0] = (v[0] - load(rows + k10 * W) * w1 - load(rows + k20 * W) * v[2]) * load(rows + k00 * W);
  u[1] = w1 * load(rows + k11 * W);
  u[2] = v[2] * load(rows + k22 * W);
}

// Loads as many lanes of a row of length N as there are from `first` on; the others are zero.
template <typename A>
VISDET_INLINE Vec<A> load_part(const A* from, int64_t first, int64_t N) {
  constexpr int W = kLanes<A>;
  if (first + W <= N) return load(from + first);
  Vec<A> out = {};
  for (int64_t i = first; i < N; ++i) out[i - first] = from[i];
  return out;
}

template <typename A>
void distances_of_point(const GaussianArrays<A>& a, int64_t b) {
  constexpr int W = kLanes<A>;
  A* to = a.output + b * a.N;
  for (int64_t first = 0; first < a.N; first += W) {
    Vec<A> v[3];
    const Vec<A> distance = whiten(a.blocks + first * kRows, a.points + 3 * b, kGreatest<A>, v);
    if (first + W <= a.N) {
      store(to + first, distance);
    } else {
      for (int64_t i = first; i < a.N; ++i) to[i] = distance[i - first];
    }
  }
}

// Writes the gradient of one point, from the gradient of its field (IS_FIELD) or of its row of distances.
template <typename A, bool IS_FIELD>
void grad_of_point(const GaussianArrays<A>& a, int64_t b) {
  constexpr int W = kLanes<A>;
  Vec<A> sums[4] = {};
  const A* point = a.points + 3 * b;
  for (int64_t first = 0; first < a.N; first += W) {
    const A* rows = a.blocks + first * kRows;
    if (IS_FIELD && a.cutoff > 0 && is_outside(rows, point)) continue;
    Vec<A> v[3], u[3];
    const Vec<A> distance = whiten(rows, point, kFarthest<A, IS_FIELD>, v);
    const Vec<A> s = IS_FIELD ? load(rows + kWeight * W) * exp_nonpositive<A>(distance * A(-0.5))
                              : load_part(a.grad_output + b * a.N, first, a.N);
    whiten_back(rows, v, u);
    for (int d = 0; d < 3; ++d) sums[d] += s * u[d];
  }
  A total[4];
  horizontal_sums(sums, total);
  const A factor = IS_FIELD ? -a.grad_output[b] : A(2);
  for (int d = 0; d < 3; ++d) a.grad_points[3 * b + d] = factor * total[d];
}

// Writes the field at one point.
template <typename A>
void field_of_point(const GaussianArrays<A>& a, int64_t b) {
  constexpr int W = kLanes<A>;
  Vec<A> sums[4] = {};
  const A* point = a.points + 3 * b;
  for (int64_t first = 0; first < a.N; first += W) {
    const A* rows = a.blocks + first * kRows;
    if (a.cutoff > 0 && is_outside(rows, point)) continue;
    Vec<A> v[3];
    sums[0] += load(rows + kWeight * W) * exp_nonpositive<A>(whiten(rows, point, kFarthest<A, true>, v) * A(-0.5));
  }
  A total[4];
  horizontal_sums(sums, total);
  a.output[b] = total[0];
}

// Writes the gradients of one block of Gaussians. IS_FIELD is as above.
template <typename A, bool IS_FIELD>
void grad_of_block(const GaussianArrays<A>& a, int64_t block) {
  constexpr int W = kLanes<A>;
  const A* rows = a.blocks + block * kRows * W;
  const int64_t first = block * W;
  Vec<A> sum = {}, sum_v[3] = {}, sum_vv[6] = {};  // of s, s v, s v v^T
  for (int64_t b = 0; b < a.B; ++b) {
    const A* point = a.points + 3 * b;
    if (IS_FIELD && a.cutoff > 0 && is_outside(rows, point)) continue;
    Vec<A> v[3];
    const Vec<A> distance = whiten(rows, point, kFarthest<A, IS_FIELD>, v);
    const Vec<A> s = IS_FIELD ? a.grad_output[b] * exp_nonpositive<A>(distance * A(-0.5))
                              : load_part(a.grad_output + b * a.N, first, a.N);
    sum += s;
    for (int i = 0, k = 0; i < 3; ++i) {
      const Vec<A> sv = s * v[i];
      sum_v[i] += sv;
      for (int j = 0; j <= i; ++j, ++k) sum_vv[k] += sv * v[j];
    }
  }
  // d distance / d (mean, L) = -2 (u, tril(u v^T)); d field / d distance = -weight exp / 2.
  const Vec<A> factor = IS_FIELD ? load(rows + kWeight * W) : Vec<A>{} - A(2);
  Vec<A> grad_mean[3], column[3][3];
  whiten_back(rows, sum_v, grad_mean);
  const int at[3][3] = {{0, 1, 3}, {1, 2, 4}, {3, 4, 5}};  // of the symmetric sum_vv
  for (int j = 0; j < 3; ++j) {
    const Vec<A> vv[3] = {sum_vv[at[0][j]], sum_vv[at[1][j]], sum_vv[at[2][j]]};
    whiten_back(rows, vv, column[j]);
  }
  for (int lane = 0; lane < W && first + lane < a.N; ++lane) {
    const int64_t i = first + lane, n = a.gaussian_order ? a.gaussian_order[i] : i;
    if (a.grad_weights) a.grad_weights[n] = sum[lane];
    for (int d = 0; d < 3; ++d) {
      a.grad_means[3 * n + d] = (grad_mean[d] * factor)[lane];
      for (int j = 0; j < 3; ++j) a.grad_cholesky[9 * n + 3 * d + j] = j <= d ? (column[j][d] * factor)[lane] : A(0);
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(GaussianKernels, kLanes<A>, kLanes<A>* kRows, prepare_blocks<A>, distances_of_point<A>,
                   grad_of_point<A, false>, grad_of_block<A, false>, field_of_point<A>, grad_of_point<A, true>,
                   grad_of_block<A, true>)

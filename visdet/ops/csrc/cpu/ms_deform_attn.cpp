// ms_deform_attn on the CPU. The contract is in ../ms_deform_attn.h; how this file is compiled, in vec.h.
//
// A row is one (b, q, g). Its samples are located a block at a time, in vector code: four row offsets and four weights
// each, in arrays; then each sample's four rows of channels are walked, without branches (a sample that does not count
// has weight zero). Forward: parallel over tiles of queries, one head after another in a tile. Backward: parallel over
// (b, g); one task owns all of grad_value[b, :, g, :], which it sums in a contiguous [S, C] scratch, so there are no
// races and the result does not depend on the number of threads.
#include "../common/bilinear.h"
#include "vec.h"

namespace visdet {

// The tensors of one call, all contiguous.
template <typename T, typename A>
struct MsDeformAttnArrays {
  int64_t B, S, G, C, Q, K;  // K = L * P samples a row
  // Of each of the K samples: the geometry of its level.
  const int32_t* H;      // [K]
  const int32_t* W;      // [K]
  const int64_t* start;  // [K]

  const int64_t* order;  // [Q] the order in which queries are worked on, or null for their own
  const T* value;        // [B, S, G, C] forward, [B, G, S, C] backward
  const A* locations;    // [B, Q, G, K, 2]
  const A* weights;      // [B, Q, G, K]
  T* output;             // [B, Q, G, C]     forward
  const T* grad_output;  // [B, Q, G, C]     backward
  T* grad_value;         // [B, S, G, C]
  A* grad_locations;     // [B, Q, G, K, 2]
  A* grad_weights;       // [B, Q, G, K]
};

namespace VISDET_ISA {

// Rows of one head are G * K samples apart, which the hardware does not foresee: ask for them this many rows ahead.
constexpr int kAhead = 2;

template <typename T, typename A>
VISDET_INLINE void prefetch_row(const MsDeformAttnArrays<T, A>& a, int64_t row) {
  const char* location = reinterpret_cast<const char*>(a.locations + row * a.K * 2);
  const char* weight = reinterpret_cast<const char*>(a.weights + row * a.K);
  const int64_t bytes = a.K * static_cast<int64_t>(sizeof(A));
  for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(location + at);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weight + at);
}

constexpr int kBlock = 32;  // samples located at a time: the arrays below take 3 KB of the first-level cache

// The blocks of some queries' samples, one after another. The next step's samples are located, and their rows asked
// for, before this step's are summed: the reads are all over the pyramid, and would otherwise be waited for.
struct Steps {
  int64_t K, blocks, total;
  Steps(int64_t queries, int64_t K) : K(K), blocks((K + kBlock - 1) / kBlock), total(queries * blocks) {}
  int64_t query(int64_t step) const { return step / blocks; }
  int64_t first(int64_t step) const { return step % blocks * kBlock; }
  int count(int64_t step) const {
    const int64_t left = K - first(step);
    return static_cast<int>(left < kBlock ? left : kBlock);
  }
  bool is_first(int64_t step) const { return step % blocks == 0; }
  bool is_last(int64_t step) const { return step % blocks == blocks - 1; }
};

// Forward: the samples k0 .. k0 + count of a row.
template <typename A>
struct Samples {
  int64_t offset[4][kBlock];  // element of value where each corner's channels begin
  A weight[4][kBlock];        // attention weight * corner weight
};

template <typename T, typename A>
VISDET_INLINE void locate_samples(const MsDeformAttnArrays<T, A>& a, int64_t row, int64_t k0, int count,
                                  int64_t texel_stride, Samples<A>& out) {
  const A* location = a.locations + (row * a.K + k0) * 2;
  const A* weight = a.weights + row * a.K + k0;
  const int32_t *H = a.H + k0, *W = a.W + k0;
  const int64_t* start = a.start + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Bilinear<A> at;
    const bool counts = locate(location[2 * i] * W[i] - A(0.5), location[2 * i + 1] * H[i] - A(0.5), H[i], W[i], at);
    A corner_weight[4];
    at.corner_weights(corner_weight);
    const A w = counts ? weight[i] : A(0);
    for (int k = 0; k < 4; ++k) {
      out.offset[k][i] = (start[i] + at.index[k]) * texel_stride;
      out.weight[k][i] = corner_weight[k] * w;
    }
  }
}

// Ask for the C numbers at each corner of the samples, which are read (or written) one step later.
template <typename T>
VISDET_INLINE void prefetch_corners(const int64_t (&offset)[4][kBlock], int count, const T* from, int64_t C) {
  const int64_t bytes = C * static_cast<int64_t>(sizeof(T));
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < 4; ++k) {
      const char* row = reinterpret_cast<const char*>(from + offset[k][i]);
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
    }
  }
}

// acc[c] += the samples, for NV registers of channels. A sum for each corner: four chains of additions instead of one.
template <int NV, typename T, typename A>
VISDET_INLINE void sum_samples(const Samples<A>& samples, int count, const T* value, A* acc) {
  constexpr int W = kLanes<A>;
  Vec<A> sum[4][NV] = {};
  for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const T* row = value + samples.offset[k][i];
      const A w = samples.weight[k][i];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[k][v] += load(row + v * W) * w;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    store(acc + v * W, load(acc + v * W) + ((sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v])));
  }
}

template <typename T, typename A>
VISDET_INLINE void sum_all_channels(const Samples<A>& samples, int count, const T* value, A* acc, int64_t C) {
  constexpr int W = kLanes<A>;
  int64_t c = 0;
  for (; c + 4 * W <= C; c += 4 * W) sum_samples<4>(samples, count, value + c, acc + c);
  for (; c + 2 * W <= C; c += 2 * W) sum_samples<2>(samples, count, value + c, acc + c);
  for (; c + W <= C; c += W) sum_samples<1>(samples, count, value + c, acc + c);
  if (c == C) return;
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < 4; ++k) {
      const T* row = value + samples.offset[k][i];
      for (int64_t t = c; t < C; ++t) acc[t] += to_accumulate(row[t]) * samples.weight[k][i];
    }
  }
}

// Queries [begin, end) of the working order, batch entry b, one head after another: the samples of a tile's queries and
// one head lie in a window that fits the second-level cache. acc is a scratch of C numbers.
template <typename T, typename A>
void forward_tile(const MsDeformAttnArrays<T, A>& a, A* acc, int64_t b, int64_t begin, int64_t end) {
  const int64_t texel_stride = a.G * a.C;
  const auto row_of = [&](int64_t i, int64_t g) { return (b * a.Q + (a.order ? a.order[i] : i)) * a.G + g; };
  const Steps steps(end - begin, a.K);
  Samples<A> samples[2];
  for (int64_t g = 0; g < a.G; ++g) {
    const T* value = a.value + (b * a.S * a.G + g) * a.C;
    const auto prepare = [&](int64_t s) {
      const int64_t i = begin + steps.query(s);
      prefetch_row(a, row_of(i + kAhead < end ? i + kAhead : i, g));
      locate_samples(a, row_of(i, g), steps.first(s), steps.count(s), texel_stride, samples[s % 2]);
      prefetch_corners(samples[s % 2].offset, steps.count(s), value, a.C);
    };
    if (steps.total > 0) prepare(0);
    for (int64_t s = 0; s < steps.total; ++s) {
      if (s + 1 < steps.total) prepare(s + 1);
      if (steps.is_first(s)) {
        for (int64_t c = 0; c < a.C; ++c) acc[c] = 0;
      }
      sum_all_channels(samples[s % 2], steps.count(s), value, acc, a.C);
      if (steps.is_last(s)) {
        const int64_t row = row_of(begin + steps.query(s), g);
        for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], a.output[row * a.C + c]);
      }
    }
  }
}

// Backward: the same samples, with what their gradients need.
template <typename A>
struct GradSamples {
  int64_t offset[4][kBlock];   // element of the head's value and gradient, both [S, C]
  A corner_weight[4][kBlock];  // zero for a corner or a sample that does not count
  A weight[kBlock];            // attention weight, zero for a sample that does not count
  A is_inside[4][kBlock];      // 1 or 0
  A fx[kBlock], fy[kBlock];
  A dot[4][kBlock];  // <grad_output, corner>
};

template <typename T, typename A>
VISDET_INLINE void locate_grad_samples(const MsDeformAttnArrays<T, A>& a, int64_t row, int64_t k0, int count,
                                       GradSamples<A>& out) {
  const A* location = a.locations + (row * a.K + k0) * 2;
  const A* weight = a.weights + row * a.K + k0;
  const int32_t *H = a.H + k0, *W = a.W + k0;
  const int64_t* start = a.start + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Bilinear<A> at;
    const bool counts = locate(location[2 * i] * W[i] - A(0.5), location[2 * i + 1] * H[i] - A(0.5), H[i], W[i], at);
    A corner_weight[4];
    at.corner_weights(corner_weight);
    for (int k = 0; k < 4; ++k) {
      out.offset[k][i] = (start[i] + at.index[k]) * a.C;
      out.corner_weight[k][i] = corner_weight[k];
      out.is_inside[k][i] = at.is_inside[k] ? A(1) : A(0);
    }
    out.weight[i] = counts ? weight[i] : A(0);
    out.fx[i] = at.fx;
    out.fy[i] = at.fy;
  }
}

// From the dots to grad_weights and grad_locations.
template <typename T, typename A>
VISDET_INLINE void finish_grad_samples(const MsDeformAttnArrays<T, A>& a, int64_t row, int64_t k0, int count,
                                       const GradSamples<A>& in) {
  A* grad_location = a.grad_locations + (row * a.K + k0) * 2;
  A* grad_weight = a.grad_weights + row * a.K + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    A d[4], sum = 0;
    for (int k = 0; k < 4; ++k) {
      d[k] = in.is_inside[k][i] != 0 ? in.dot[k][i] : A(0);
      sum += in.corner_weight[k][i] * d[k];
    }
    const A fx = in.fx[i], fy = in.fy[i], w = in.weight[i];
    grad_weight[i] = sum;
    grad_location[2 * i] = a.W[k0 + i] * w * ((1 - fy) * (d[1] - d[0]) + fy * (d[3] - d[2]));
    grad_location[2 * i + 1] = a.H[k0 + i] * w * ((1 - fx) * (d[2] - d[0]) + fx * (d[3] - d[1]));
  }
}

// For NV registers of channels of one sample: dots[k] += <g, corner k>, and its grad row += coefficient[k] * g.
template <int NV, typename T, typename A>
VISDET_INLINE void scatter_block(const A* g, const T* const (&rows)[4], A* const (&grads)[4], const A (&coefficient)[4],
                                 Vec<A> (&dots)[4]) {
  constexpr int W = kLanes<A>;
  Vec<A> g_vec[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) g_vec[v] = load(g + v * W);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      dots[k] += load(rows[k] + v * W) * g_vec[v];
      store(grads[k] + v * W, load(grads[k] + v * W) + g_vec[v] * coefficient[k]);
    }
  }
}

template <typename T, typename A>
VISDET_INLINE void scatter_samples(const MsDeformAttnArrays<T, A>& a, const A* g, const T* value, A* grad, int count,
                                   GradSamples<A>& samples) {
  constexpr int W = kLanes<A>;
  for (int i = 0; i < count; ++i) {
    const T* rows[4];
    A* grads[4];
    A coefficient[4], sums[4];
    Vec<A> dots[4] = {};
    for (int k = 0; k < 4; ++k) {
      rows[k] = value + samples.offset[k][i];
      grads[k] = grad + samples.offset[k][i];
      coefficient[k] = samples.corner_weight[k][i] * samples.weight[i];
    }
    int64_t c = 0;
    const auto advance = [&](int64_t by) {
      c += by;
      for (int k = 0; k < 4; ++k) rows[k] += by, grads[k] += by;
    };
    for (; c + 2 * W <= a.C; advance(2 * W)) scatter_block<2>(g + c, rows, grads, coefficient, dots);
    for (; c + W <= a.C; advance(W)) scatter_block<1>(g + c, rows, grads, coefficient, dots);
    horizontal_sums(dots, sums);
    for (int k = 0; k < 4; ++k) {
      for (int64_t t = 0; c + t < a.C; ++t) {
        sums[k] += to_accumulate(rows[k][t]) * g[c + t];
        grads[k][t] += coefficient[k] * g[c + t];
      }
      samples.dot[k][i] = sums[k];
    }
  }
}

// One task: all gradients of batch entry b and head g; value is [B, G, S, C]. grad is a scratch of S * C numbers, g_row
// one of C.
template <typename T, typename A>
void backward_head(const MsDeformAttnArrays<T, A>& a, A* grad, A* g_row, int64_t b, int64_t g) {
  const T* value = a.value + (b * a.G + g) * a.S * a.C;
  const auto row_of = [&](int64_t i) { return (b * a.Q + (a.order ? a.order[i] : i)) * a.G + g; };
  std::memset(grad, 0, sizeof(A) * static_cast<size_t>(a.S * a.C));
  const Steps steps(a.Q, a.K);
  GradSamples<A> samples[2];
  const auto prepare = [&](int64_t s) {
    const int64_t i = steps.query(s);
    prefetch_row(a, row_of(i + kAhead < a.Q ? i + kAhead : i));
    locate_grad_samples(a, row_of(i), steps.first(s), steps.count(s), samples[s % 2]);
    prefetch_corners(samples[s % 2].offset, steps.count(s), value, a.C);
    prefetch_corners(samples[s % 2].offset, steps.count(s), grad, a.C);
  };
  if (steps.total > 0) prepare(0);
  for (int64_t s = 0; s < steps.total; ++s) {
    if (s + 1 < steps.total) prepare(s + 1);
    const int64_t row = row_of(steps.query(s));
    if (steps.is_first(s)) {
      for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
    }
    scatter_samples(a, g_row, value, grad, steps.count(s), samples[s % 2]);
    finish_grad_samples(a, row, steps.first(s), steps.count(s), samples[s % 2]);
  }
  for (int64_t s = 0; s < a.S; ++s) {
    T* out = a.grad_value + ((b * a.S + s) * a.G + g) * a.C;
    for (int64_t c = 0; c < a.C; ++c) from_accumulate(grad[s * a.C + c], out[c]);
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                    \
  template void forward_tile<T, A>(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t, int64_t); \
  template void backward_head<T, A>(const MsDeformAttnArrays<T, A>&, A*, A*, int64_t, int64_t);
VISDET_INSTANTIATE(float, float)
VISDET_INSTANTIATE(double, double)
VISDET_INSTANTIATE(Float16, float)
VISDET_INSTANTIATE(BFloat16, float)
#undef VISDET_INSTANTIATE

}  // namespace VISDET_ISA
}  // namespace visdet

#if defined(VISDET_ISA_BASELINE)

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../ms_deform_attn.h"
#include "dispatch.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                          \
  namespace isa {                                                                    \
  template <typename T, typename A>                                                  \
  void forward_tile(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t, int64_t); \
  template <typename T, typename A>                                                  \
  void backward_head(const MsDeformAttnArrays<T, A>&, A*, A*, int64_t, int64_t);     \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// Queries of a tile. An encoder's queries are the texels of the pyramid itself; taken in 8 x 8 squares, their samples
// share most of their texels. Other queries are taken in order.
constexpr int64_t kTileSide = 8, kTileQueries = kTileSide * kTileSide;

// The queries in the order they are worked on, or nothing for their own order. It is a matter of locality alone:
// results do not depend on it.
std::vector<int64_t> query_order(const MsDeformAttnProblem& problem, const int64_t* level_shapes) {
  std::vector<int64_t> order;
  if (problem.Q != problem.S) return order;
  order.reserve(static_cast<size_t>(problem.Q));
  int64_t start = 0;
  for (int64_t l = 0; l < problem.L; ++l) {
    const int64_t H = level_shapes[2 * l], W = level_shapes[2 * l + 1];
    for (int64_t y0 = 0; y0 < H; y0 += kTileSide) {
      for (int64_t x0 = 0; x0 < W; x0 += kTileSide) {
        for (int64_t y = y0; y < std::min(y0 + kTileSide, H); ++y) {
          for (int64_t x = x0; x < std::min(x0 + kTileSide, W); ++x) order.push_back(start + y * W + x);
        }
      }
    }
    start += H * W;
  }
  return order;
}

// The level of each of a row's K samples, and the order of queries.
struct Geometry {
  std::vector<int32_t> H, W;
  std::vector<int64_t> start, order;

  Geometry(const MsDeformAttnProblem& problem, const int64_t* level_shapes, const int64_t* level_starts)
      : order(query_order(problem, level_shapes)) {
    for (int64_t l = 0; l < problem.L; ++l) {
      H.insert(H.end(), static_cast<size_t>(problem.P), static_cast<int32_t>(level_shapes[2 * l]));
      W.insert(W.end(), static_cast<size_t>(problem.P), static_cast<int32_t>(level_shapes[2 * l + 1]));
      start.insert(start.end(), static_cast<size_t>(problem.P), level_starts[l]);
    }
  }
};

// value [B, S, G, C] as [B, G, S, C]: a backward task walks one head's values and gradients at the same offsets.
Tensor headwise(const Tensor& value) { return contiguous(torch::stable::transpose(value, 1, 2)); }

template <typename T, typename A>
MsDeformAttnArrays<T, A> arrays_of(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value,
                                   const Tensor& locations, const Tensor& weights) {
  MsDeformAttnArrays<T, A> a{};
  a.B = problem.B, a.S = problem.S, a.G = problem.G, a.C = problem.C, a.Q = problem.Q, a.K = problem.L * problem.P;
  a.H = geometry.H.data(), a.W = geometry.W.data(), a.start = geometry.start.data();
  a.order = geometry.order.empty() ? nullptr : geometry.order.data();
  a.value = static_cast<const T*>(value.const_data_ptr());
  a.locations = static_cast<const A*>(locations.const_data_ptr());
  a.weights = static_cast<const A*>(weights.const_data_ptr());
  return a;
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  const Tensor value = contiguous(value_in), level_shapes = contiguous(level_shapes_in),
               level_starts = contiguous(level_starts_in), locations = contiguous(locations_in),
               weights = contiguous(weights_in);
  check_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  const Geometry geometry(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());

  Tensor output = new_empty(value_in, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.L * problem.P == 0) return zero_(output);

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value, locations, weights);

    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(forward_tile, T, A);
    const int64_t tiles = (problem.Q + kTileQueries - 1) / kTileQueries;
    torch::stable::parallel_for(0, problem.B * tiles, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> acc(problem.C);
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile % tiles * kTileQueries;
        run(a, acc.data(), tile / tiles, first, std::min(first + kTileQueries, problem.Q));
      }
    });
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool /*deterministic: always*/) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = contiguous(grad_output_in), value = headwise(value_in),
               level_shapes = contiguous(level_shapes_in), level_starts = contiguous(level_starts_in),
               locations = contiguous(locations_in), weights = contiguous(weights_in);
  check_levels(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  const Geometry geometry(problem, level_shapes.const_data_ptr<int64_t>(), level_starts.const_data_ptr<int64_t>());
  Tensor grad_value = new_empty(value, value_in.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.Q == 0 || problem.C == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value, locations, weights);
    a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_value = static_cast<T*>(grad_value.mutable_data_ptr());
    a.grad_locations = static_cast<A*>(grad_locations.mutable_data_ptr());
    a.grad_weights = static_cast<A*>(grad_weights.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(backward_head, T, A);
    torch::stable::parallel_for(0, problem.B * problem.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> grad(problem.S * problem.C), g_row(problem.C);
      for (int64_t task = begin; task < end; ++task) {
        run(a, grad.data(), g_row.data(), task / problem.G, task % problem.G);
      }
    });
  });
  return {grad_value, grad_locations, grad_weights};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
}

#endif  // VISDET_ISA_BASELINE

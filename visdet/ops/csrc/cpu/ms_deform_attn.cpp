// ms_deform_attn on the CPU. The contract is in ../ms_deform_attn.h; how this file is compiled, in vec.h.
//
// A row is one (b, q, g). Its samples are located a block at a time, in vector code: four row offsets and four weights
// each, in arrays; then each sample's four rows of channels are walked, without branches (a sample that does not count
// has weight zero). Forward: parallel over tiles of queries, one head after another in a tile. Backward: parallel over
// (b, g); one task owns all of grad_value[b, :, g, :], which it sums in a contiguous [S, C] scratch, or, where samples
// are few, in place: no races, and a result that does not depend on the number of threads.
#include <type_traits>

#include "../common/bilinear.h"
#include "vec.h"

namespace visdet {

// The tensors of one call, all contiguous.
template <typename T, typename A>
struct MsDeformAttnArrays {
  int64_t B, S, G, C, Q, L, K;  // K samples a row
  // Of each of the K samples: its level and that level's geometry.
  const int32_t* level;  // [K]
  const int32_t* H;      // [K]
  const int32_t* W;      // [K]
  const int64_t* start;  // [K]

  const int64_t* order;  // [Q] the order in which queries are worked on, or null for their own
  const T* value;        // [B, S, G, C]; backward without `sums`: [B, G, S, C]
  const A* locations;    // [B, Q, G, K, 2]
  const A* weights;      // [B, Q, G, K]
  T* output;             // [B, Q, G, C]     forward
  const T* grad_output;  // [B, Q, G, C]     backward
  T* grad_value;         // [B, S, G, C]
  A* sums;               // [B, S, G, C] zeros, to add the gradient of value to, instead of grad_value; or null
  A* grad_locations;     // [B, Q, G, K, 2]
  A* grad_weights;       // [B, Q, G, K]

  // The fused form has these instead of locations, weights and their gradients.
  const A* reference_points;  // [B, Q, L, 2 or 4], or null: the plain form
  const A* share;             // [K] 0.5 / points of the level
  bool boxes;                 // 4
  bool wide;                  // offsets and logits, and their gradients, are of type A; else of type T
  const void* offsets;        // [B, Q, G, K, 2]
  const void* logits;         // [B, Q, G, K]
  void* grad_offsets;         // [B, Q, G, K, 2]
  void* grad_logits;          // [B, Q, G, K]
  A* grad_reference;          // [B, G, Q, L, 2 or 4], the part of each head; null if nobody asks
};

constexpr int64_t kRowScratch = 8;

namespace VISDET_ISA {

// exp(x) for x <= 0 to two units in the last place, in vector code: 2^n * exp(r), |r| <= ln(2) / 2, by its Taylor
// polynomial. Results under 2^-126 are zero; NaN stays NaN.
VISDET_INLINE float exp_of_negative(float x) {
  const float n = __builtin_floorf(x * 1.44269504f + 0.5f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln(2) in two parts: n times the first is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const bool is_normal = n >= -126.0f;
  const int32_t bits = (static_cast<int32_t>(is_normal ? n : 0.0f) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return is_normal ? p * power : (x == x ? 0.0f : x);
}
VISDET_INLINE double exp_of_negative(double x) { return __builtin_exp(x); }

// Rows of one head are G * K samples apart, which the hardware does not foresee: ask for them this many rows ahead.
constexpr int kAhead = 2;

template <typename T, typename A>
VISDET_INLINE void prefetch_row(const MsDeformAttnArrays<T, A>& a, int64_t row) {
  const bool fused = a.reference_points != nullptr;
  const int64_t bytes = a.K * static_cast<int64_t>(fused && !a.wide ? sizeof(T) : sizeof(A));
  const char* location = static_cast<const char*>(fused ? a.offsets : a.locations) + row * bytes * 2;
  const char* weight = static_cast<const char*>(fused ? a.logits : a.weights) + row * bytes;
  for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(location + at);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weight + at);
}

// One row's samples. The plain form reads and writes the tensors; the fused form works a row out in a scratch of
// kRowScratch * K numbers.
template <typename A>
struct Row {
  const A* locations;  // [K, 2]
  const A* weights;    // [K]
  A* grad_locations;   // [K, 2]
  A* grad_weights;     // [K]
};

// Numbers [row * count, (row + 1) * count) of a tensor of type A or T.
template <typename T, typename A>
VISDET_INLINE void read_numbers(const void* from, bool wide, int64_t row, int64_t count, A* to) {
  if (wide) {
    std::memcpy(to, static_cast<const A*>(from) + row * count, sizeof(A) * static_cast<size_t>(count));
  } else {
    const T* numbers = static_cast<const T*>(from) + row * count;
    for (int64_t i = 0; i < count; ++i) to[i] = to_accumulate(numbers[i]);
  }
}
template <typename T, typename A>
VISDET_INLINE void write_numbers(const A* from, bool wide, int64_t row, int64_t count, void* to) {
  if (wide) {
    std::memcpy(static_cast<A*>(to) + row * count, from, sizeof(A) * static_cast<size_t>(count));
  } else {
    T* numbers = static_cast<T*>(to) + row * count;
    for (int64_t i = 0; i < count; ++i) from_accumulate(from[i], numbers[i]);
  }
}

// weights = softmax of the logits in them.
template <typename A>
VISDET_INLINE void softmax(A* weights, int64_t K) {
  A largest = std::is_same<A, float>::value ? A(-3.4028234663852886e38) : A(-1.7976931348623157e308), sum = 0;
  for (int64_t k = 0; k < K; ++k) largest = weights[k] > largest ? weights[k] : largest;
#pragma GCC ivdep
  for (int64_t k = 0; k < K; ++k) weights[k] = exp_of_negative(weights[k] - largest);
  for (int64_t k = 0; k < K; ++k) sum += weights[k];
  for (int64_t k = 0; k < K; ++k) weights[k] /= sum;
}

// Of a sample's offset, what one unit is worth in locations.
template <typename T, typename A>
VISDET_INLINE void offset_scale(const MsDeformAttnArrays<T, A>& a, const A* reference, int64_t k, A& x, A& y) {
  const A* box = reference + a.level[k] * 4;
  x = a.boxes ? box[2] * a.share[k] : A(1) / a.W[k];
  y = a.boxes ? box[3] * a.share[k] : A(1) / a.H[k];
}

template <typename T, typename A>
VISDET_INLINE Row<A> row_of(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) {
    return {a.locations + row * a.K * 2, a.weights + row * a.K, a.grad_locations + row * a.K * 2,
            a.grad_weights + row * a.K};
  }
  return {scratch, scratch + 2 * a.K, scratch + 3 * a.K, scratch + 5 * a.K};
}

// The fused form: from offsets and logits to the row's locations and weights.
template <typename T, typename A>
VISDET_INLINE void begin_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  const int64_t K = a.K, D = a.boxes ? 4 : 2;
  A *locations = scratch, *weights = scratch + 2 * K;
  read_numbers<T>(a.offsets, a.wide, row, 2 * K, locations);
  read_numbers<T>(a.logits, a.wide, row, K, weights);
  softmax(weights, K);
  const A* reference = a.reference_points + row / a.G * a.L * D;
  for (int64_t k = 0; k < K; ++k) {
    A scale_x, scale_y;
    offset_scale(a, reference, k, scale_x, scale_y);
    locations[2 * k] = reference[a.level[k] * D] + locations[2 * k] * scale_x;
    locations[2 * k + 1] = reference[a.level[k] * D + 1] + locations[2 * k + 1] * scale_y;
  }
}

// The fused form: from the gradients of the row's locations and weights to those of its offsets, logits and reference
// points. A sample that does not count gives zero, whatever the box.
template <typename T, typename A>
VISDET_INLINE void end_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  const int64_t K = a.K, D = a.boxes ? 4 : 2, query = row / a.G;
  const A* weights = scratch + 2 * K;
  A *grad_locations = scratch + 3 * K, *grad_weights = scratch + 5 * K, *offsets = scratch + 6 * K, mean = 0;
  const A* reference = a.reference_points + query * a.L * D;
  for (int64_t k = 0; k < K; ++k) mean += weights[k] * grad_weights[k];
  for (int64_t k = 0; k < K; ++k) grad_weights[k] = weights[k] * (grad_weights[k] - mean);
  write_numbers<T>(grad_weights, a.wide, row, K, a.grad_logits);
  if (a.grad_reference != nullptr) {
    const int64_t b = query / a.Q, q = query - b * a.Q, g = row - query * a.G;
    A* sums = a.grad_reference + ((b * a.G + g) * a.Q + q) * a.L * D;
    for (int64_t i = 0; i < a.L * D; ++i) sums[i] = 0;
    read_numbers<T>(a.offsets, a.wide, row, 2 * K, offsets);
    for (int64_t k = 0; k < K; ++k) {
      A* sum = sums + a.level[k] * D;
      for (int64_t i = 0; i < 2; ++i) {
        const A grad = grad_locations[2 * k + i];
        sum[i] += grad;
        if (a.boxes && grad != 0) sum[2 + i] += grad * offsets[2 * k + i] * a.share[k];
      }
    }
  }
  for (int64_t k = 0; k < K; ++k) {
    A scale[2];
    offset_scale(a, reference, k, scale[0], scale[1]);
    for (int64_t i = 0; i < 2; ++i) {
      A& grad = grad_locations[2 * k + i];
      grad = grad == 0 ? A(0) : grad * scale[i];
    }
  }
  write_numbers<T>(grad_locations, a.wide, row, 2 * K, a.grad_offsets);
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
VISDET_INLINE void locate_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, int64_t k0, int count,
                                  int64_t texel_stride, Samples<A>& out) {
  const A* location = row.locations + k0 * 2;
  const A* weight = row.weights + k0;
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
  if (C > W) {  // the last W channels, of which the new ones count
    A tail[W] = {};
    sum_samples<1>(samples, count, value + C - W, tail);
    for (; c < C; ++c) acc[c] += tail[c - (C - W)];
    return;
  }
  for (int i = 0; i < count; ++i) {
    for (int k = 0; k < 4; ++k) {
      const T* row = value + samples.offset[k][i];
      for (int64_t t = c; t < C; ++t) acc[t] += to_accumulate(row[t]) * samples.weight[k][i];
    }
  }
}

// Queries [begin, end) of the working order, batch entry b, one head after another: the samples of a tile's queries and
// one head lie in a window that fits the second-level cache. scratch: C numbers, and a row's.
template <typename T, typename A>
void forward_tile(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t begin, int64_t end) {
  const int64_t texel_stride = a.G * a.C;
  A *acc = scratch, *row_scratch = scratch + a.C;
  const auto row_at = [&](int64_t i, int64_t g) { return (b * a.Q + (a.order ? a.order[i] : i)) * a.G + g; };
  const Steps steps(end - begin, a.K);
  Samples<A> samples[2];
  for (int64_t g = 0; g < a.G; ++g) {
    const T* value = a.value + (b * a.S * a.G + g) * a.C;
    const auto prepare = [&](int64_t s) {
      const int64_t i = begin + steps.query(s), row = row_at(i, g);
      prefetch_row(a, row_at(i + kAhead < end ? i + kAhead : i, g));
      if (steps.is_first(s)) begin_row(a, row, row_scratch);
      locate_samples(a, row_of(a, row, row_scratch), steps.first(s), steps.count(s), texel_stride, samples[s % 2]);
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
        const int64_t row = row_at(begin + steps.query(s), g);
        for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], a.output[row * a.C + c]);
      }
    }
  }
}

// Backward: the same samples, with what their gradients need.
template <typename A>
struct GradSamples {
  int64_t offset[4][kBlock];   // element of the head's value and gradient, which lie alike
  A corner_weight[4][kBlock];  // zero for a corner or a sample that does not count
  A weight[kBlock];            // attention weight, zero for a sample that does not count
  A is_inside[4][kBlock];      // 1 or 0
  A fx[kBlock], fy[kBlock];
  A dot[4][kBlock];  // <grad_output, corner>
};

template <typename T, typename A>
VISDET_INLINE void locate_grad_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, int64_t k0, int count,
                                       int64_t texel_stride, GradSamples<A>& out) {
  const A* location = row.locations + k0 * 2;
  const A* weight = row.weights + k0;
  const int32_t *H = a.H + k0, *W = a.W + k0;
  const int64_t* start = a.start + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Bilinear<A> at;
    const bool counts = locate(location[2 * i] * W[i] - A(0.5), location[2 * i + 1] * H[i] - A(0.5), H[i], W[i], at);
    A corner_weight[4];
    at.corner_weights(corner_weight);
    for (int k = 0; k < 4; ++k) {
      out.offset[k][i] = (start[i] + at.index[k]) * texel_stride;
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
VISDET_INLINE void finish_grad_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, int64_t k0, int count,
                                       const GradSamples<A>& in) {
  A* grad_location = row.grad_locations + k0 * 2;
  A* grad_weight = row.grad_weights + k0;
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

// One task: all gradients of batch entry b and head g. scratch: S * C numbers unless there are `sums`, C, and two rows'
// (the next row begins before the current one ends).
template <typename T, typename A>
void backward_head(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t g) {
  const bool in_place = a.sums != nullptr;
  const int64_t texel_stride = in_place ? a.G * a.C : a.C;
  const int64_t head = in_place ? (b * a.S * a.G + g) * a.C : (b * a.G + g) * a.S * a.C;
  const T* value = a.value + head;
  A *grad = in_place ? a.sums + head : scratch, *g_row = in_place ? scratch : scratch + a.S * a.C,
    *row_scratch = g_row + a.C;
  const auto row_at = [&](int64_t i) { return (b * a.Q + (a.order ? a.order[i] : i)) * a.G + g; };
  if (!in_place) std::memset(grad, 0, sizeof(A) * static_cast<size_t>(a.S * a.C));
  const Steps steps(a.Q, a.K);
  GradSamples<A> samples[2];
  const auto scratch_of = [&](int64_t i) { return row_scratch + i % 2 * kRowScratch * a.K; };
  const auto prepare = [&](int64_t s) {
    const int64_t i = steps.query(s), row = row_at(i);
    prefetch_row(a, row_at(i + kAhead < a.Q ? i + kAhead : i));
    if (steps.is_first(s)) begin_row(a, row, scratch_of(i));
    locate_grad_samples(a, row_of(a, row, scratch_of(i)), steps.first(s), steps.count(s), texel_stride, samples[s % 2]);
    prefetch_corners(samples[s % 2].offset, steps.count(s), value, a.C);
    prefetch_corners(samples[s % 2].offset, steps.count(s), grad, a.C);
  };
  if (steps.total > 0) prepare(0);
  for (int64_t s = 0; s < steps.total; ++s) {
    if (s + 1 < steps.total) prepare(s + 1);
    const int64_t i = steps.query(s), row = row_at(i);
    if (steps.is_first(s)) {
      for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
    }
    scatter_samples(a, g_row, value, grad, steps.count(s), samples[s % 2]);
    finish_grad_samples(a, row_of(a, row, scratch_of(i)), steps.first(s), steps.count(s), samples[s % 2]);
    if (steps.is_last(s)) end_row(a, row, scratch_of(i));
  }
  for (int64_t s = 0; !in_place && s < a.S; ++s) {
    T* out = a.grad_value + ((b * a.S + s) * a.G + g) * a.C;
    for (int64_t c = 0; c < a.C; ++c) from_accumulate(grad[s * a.C + c], out[c]);
  }
}

#define VISDET_INSTANTIATE(T, A)                                                                    \
  template void forward_tile<T, A>(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t, int64_t); \
  template void backward_head<T, A>(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t);
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
  void backward_head(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t);         \
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

// The level of each of a row's K samples, and the order of queries. num_points: of each level, or null for P on each.
struct Geometry {
  std::vector<int32_t> level, H, W;
  std::vector<int64_t> start, points, order;

  Geometry(const MsDeformAttnProblem& problem, const Tensor& level_shapes, const Tensor& level_starts,
           const int64_t* num_points) {
    const Tensor dense_shapes = contiguous(level_shapes), dense_starts = contiguous(level_starts);
    const int64_t* shapes = dense_shapes.const_data_ptr<int64_t>();
    const int64_t* starts = dense_starts.const_data_ptr<int64_t>();
    check_levels(problem, shapes, starts);
    order = query_order(problem, shapes);
    for (int64_t l = 0; l < problem.L; ++l) {
      const int64_t P = num_points == nullptr ? problem.P : num_points[l];
      level.insert(level.end(), static_cast<size_t>(P), static_cast<int32_t>(l));
      H.insert(H.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l]));
      W.insert(W.end(), static_cast<size_t>(P), static_cast<int32_t>(shapes[2 * l + 1]));
      start.insert(start.end(), static_cast<size_t>(P), starts[l]);
      points.insert(points.end(), static_cast<size_t>(P), P);
    }
  }
};

// value [B, S, G, C] as [B, G, S, C]: a backward task walks one head's values and gradients at the same offsets.
Tensor headwise(const Tensor& value) { return contiguous(torch::stable::transpose(value, 1, 2)); }

// What both forms of a call have; the arrays of samples are the caller's to fill in.
template <typename T, typename A>
MsDeformAttnArrays<T, A> arrays_of(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value) {
  MsDeformAttnArrays<T, A> a{};
  a.B = problem.B, a.S = problem.S, a.G = problem.G, a.C = problem.C, a.Q = problem.Q, a.L = problem.L, a.K = problem.K;
  a.level = geometry.level.data();
  a.H = geometry.H.data(), a.W = geometry.W.data(), a.start = geometry.start.data();
  a.order = geometry.order.empty() ? nullptr : geometry.order.data();
  a.value = static_cast<const T*>(value.const_data_ptr());
  return a;
}

// fill(arrays) adds the samples.
template <typename Fill>
Tensor forward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value, const Fill& fill) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.K == 0) return zero_(output);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.output = static_cast<T*>(output.mutable_data_ptr());
    const auto run = VISDET_BEST_ISA(forward_tile, T, A);
    const int64_t tiles = (problem.Q + kTileQueries - 1) / kTileQueries;
    torch::stable::parallel_for(0, problem.B * tiles, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(problem.C + kRowScratch * problem.K);
      for (int64_t tile = begin; tile < end; ++tile) {
        const int64_t first = tile % tiles * kTileQueries;
        run(a, scratch.data(), tile / tiles, first, std::min(first + kTileQueries, problem.Q));
      }
    });
  });
  return output;
}

// fill(arrays) adds the samples and their gradients, none of which is empty.
template <typename Fill>
void backward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& grad_output,
              const Tensor& value_in, Tensor& grad_value, const Fill& fill) {
  // Fewer samples than texels (a decoder) do not pay for value and its gradient being laid out anew.
  const bool in_place = problem.Q * problem.K <= problem.S;
  const Tensor value = in_place ? contiguous(value_in) : headwise(value_in);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_value = static_cast<T*>(grad_value.mutable_data_ptr());
    Tensor sums;
    if (in_place) {
      sums =
          std::is_same<T, A>::value ? zero_(grad_value) : new_zeros(grad_value, grad_value.sizes(), ScalarType::Float);
      a.sums = static_cast<A*>(sums.mutable_data_ptr());
    }
    const auto run = VISDET_BEST_ISA(backward_head, T, A);
    torch::stable::parallel_for(0, problem.B * problem.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(((in_place ? 0 : problem.S) + 1) * problem.C + 2 * kRowScratch * problem.K);
      for (int64_t task = begin; task < end; ++task) {
        run(a, scratch.data(), task / problem.G, task % problem.G);
      }
    });
    if (in_place && !std::is_same<T, A>::value) copy_(grad_value, sums);
  });
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  const Tensor value = contiguous(value_in), locations = contiguous(locations_in), weights = contiguous(weights_in);
  const Geometry geometry(problem, level_shapes, level_starts, nullptr);
  return forward(problem, geometry, value, [&](auto& a) {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.locations = static_cast<const A*>(locations.const_data_ptr());
    a.weights = static_cast<const A*>(weights.const_data_ptr());
  });
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes, const Tensor& level_starts,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool /*deterministic: always*/) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = contiguous(grad_output_in), locations = contiguous(locations_in),
               weights = contiguous(weights_in);
  const Geometry geometry(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_empty(value_in, value_in.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.Q == 0 || problem.C == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.locations = static_cast<const A*>(locations.const_data_ptr());
    a.weights = static_cast<const A*>(weights.const_data_ptr());
    a.grad_locations = static_cast<A*>(grad_locations.mutable_data_ptr());
    a.grad_weights = static_cast<A*>(grad_weights.mutable_data_ptr());
  });
  return {grad_value, grad_locations, grad_weights};
}

// The inputs of the fused form, contiguous.
struct FusedInputs {
  Tensor reference, offsets, logits;
  std::vector<double> share;  // [K] 0.5 / points of the level
  std::vector<float> share_float;

  FusedInputs(const Geometry& geometry, const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in)
      : reference(contiguous(reference_in)), offsets(contiguous(offsets_in)), logits(contiguous(logits_in)) {
    for (const int64_t points : geometry.points) {
      share.push_back(0.5 / static_cast<double>(points));
      share_float.push_back(0.5f / static_cast<float>(points));
    }
  }

  const float* share_of(float) const { return share_float.data(); }
  const double* share_of(double) const { return share.data(); }

  template <typename Arrays>
  void fill(Arrays& a) const {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.reference_points = static_cast<const A*>(reference.const_data_ptr());
    a.boxes = reference.size(3) == 4;
    a.wide = offsets.scalar_type() == reference.scalar_type();
    a.offsets = offsets.const_data_ptr(), a.logits = logits.const_data_ptr();
    a.share = share_of(A{});
  }
};

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                            const Tensor& reference_points, const Tensor& offsets, const Tensor& logits,
                            std::vector<int64_t> num_points) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  const Tensor value = contiguous(value_in);
  const Geometry geometry(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  return forward(problem, geometry, value, [&](auto& a) { inputs.fill(a); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ms_deform_attn_fused_backward(
    const Tensor& grad_output_in, const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
    const Tensor& reference_points, const Tensor& offsets, const Tensor& logits, std::vector<int64_t> num_points,
    bool needs_reference, bool /*deterministic: always*/) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  const Tensor grad_output = contiguous(grad_output_in);
  const Geometry geometry(problem, level_shapes, level_starts, num_points.data());
  const FusedInputs inputs(geometry, reference_points, offsets, logits);
  Tensor grad_value = new_empty(value_in, value_in.sizes()), grad_offsets = new_empty(offsets, offsets.sizes()),
         grad_logits = new_empty(logits, logits.sizes());
  const int64_t D = inputs.reference.size(3);
  const std::vector<int64_t> part_sizes{problem.B, problem.G, problem.Q, problem.L, D}, nothing{0};
  Tensor parts = new_empty(inputs.reference, needs_reference ? part_sizes : nothing);
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
    zero_(grad_value), zero_(grad_offsets), zero_(grad_logits), zero_(parts);
  } else {
    backward(problem, geometry, grad_output, value_in, grad_value, [&](auto& a) {
      using A = std::remove_pointer_t<decltype(a.grad_weights)>;
      inputs.fill(a);
      a.grad_offsets = grad_offsets.mutable_data_ptr(), a.grad_logits = grad_logits.mutable_data_ptr();
      a.grad_reference = needs_reference ? static_cast<A*>(parts.mutable_data_ptr()) : nullptr;
    });
  }
  const int64_t heads[] = {1};
  return {grad_value, needs_reference ? sum(parts, torch::headeronly::IntHeaderOnlyArrayRef(heads, 1)) : parts,
          grad_offsets, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn_fused));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn_fused_backward));
}

#endif  // VISDET_ISA_BASELINE

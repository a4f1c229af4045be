// The backward of ms_deform_attn: which gradients a call owns is said in arrays.h, how a row's samples are walked in
// walk.h.
#include "cpu/ms_deform_attn/fused.h"

namespace visdet::VISDET_ISA {

// GradSamples has the samples of a block with what their gradients need.
template <typename A>
struct GradSamples {
  Block block;
  int64_t offset[4][kBlock];                                   // element of the head's value and gradient
  A coefficient[4][kBlock];                                    // attention weight * corner weight
  A left[kBlock], right[kBlock], top[kBlock], bottom[kBlock];  // 1 or 0: columns and rows within the map
  A fx[kBlock], fy[kBlock];
  A weight[kBlock];  // attention weight, zero for a sample that does not count
  A dot[kBlock][4];  // <grad_output, corner>
};

template <typename T, typename A>
VISDET_INLINE void locate_grad_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, int64_t texel_stride,
                                       GradSamples<A>& out) {
  const int64_t k0 = out.block.first;
  const ReadableSamples<A> from(a, row, out.block);
  const A *location = from.location, *weight = from.weight;
  const int count = whole_registers<A>(out.block.count);
  const int32_t *H = a.H + k0, *W = a.W + k0;
  const int64_t* start = a.start + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Bilinear<A> at;
    const bool counts = locate(location[2 * i] * W[i] - A(0.5), location[2 * i + 1] * H[i] - A(0.5), H[i], W[i], at);
    const A w = counts ? weight[i] : A(0);
    put_corner_weights(at, w, i, out.coefficient);
    for (int k = 0; k < 4; ++k) out.offset[k][i] = (start[i] + at.index[k]) * texel_stride;
    out.left[i] = at.left ? A(1) : A(0);
    out.right[i] = at.right ? A(1) : A(0);
    out.top[i] = counts & at.top ? A(1) : A(0);
    out.bottom[i] = counts & at.bottom ? A(1) : A(0);
    out.fx[i] = at.fx;
    out.fy[i] = at.fy;
    out.weight[i] = w;
  }
}

// Turns the dots into grad_weights and grad_locations.
template <typename T, typename A>
VISDET_INLINE void finish_grad_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, const GradSamples<A>& in) {
  const int64_t k0 = in.block.first;
  const int count = whole_registers<A>(in.block.count);
  A location_copy[2 * kBlock], weight_copy[kBlock];
  // The fused form's scratch has room for whole registers, except behind the last block of some rows of several blocks.
  const bool has_room = a.reference_points != nullptr && k0 + count <= scratch_samples(a.K);
  const bool is_whole = count == in.block.count || has_room;
  A* grad_location = is_whole ? row.grad_locations + k0 * 2 : location_copy;
  A* grad_weight = is_whole ? row.grad_weights + k0 : weight_copy;
  const int32_t *H = a.H + k0, *W = a.W + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    const bool left = in.left[i] != 0, right = in.right[i] != 0, top = in.top[i] != 0, bottom = in.bottom[i] != 0;
    const A d0 = left & top ? in.dot[i][0] : A(0), d1 = right & top ? in.dot[i][1] : A(0);
    const A d2 = left & bottom ? in.dot[i][2] : A(0), d3 = right & bottom ? in.dot[i][3] : A(0);
    const A fx = in.fx[i], fy = in.fy[i], w = in.weight[i];
    grad_weight[i] = (1 - fy) * ((1 - fx) * d0 + fx * d1) + fy * ((1 - fx) * d2 + fx * d3);
    grad_location[2 * i] = W[i] * w * ((1 - fy) * (d1 - d0) + fy * (d3 - d2));
    grad_location[2 * i + 1] = H[i] * w * ((1 - fx) * (d2 - d0) + fx * (d3 - d1));
  }
  if (is_whole) return;
  for (int i = 0; i < 2 * in.block.count; ++i) row.grad_locations[k0 * 2 + i] = grad_location[i];
  for (int i = 0; i < in.block.count; ++i) row.grad_weights[k0 + i] = grad_weight[i];
}

// Takes NV registers of channels of sample i: adds <g, corner k> to dots[k], and coefficient * g to the corner's
// gradient.
template <int NV, typename T, typename A>
VISDET_INLINE void scatter_channels(const GradSamples<A>& samples, int i, const A* g, const T* value, A* grad,
                                    Vec<A> (&dots)[4]) {
  constexpr int W = kLanes<A>;
  Vec<A> g_vec[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) g_vec[v] = load(g + v * W);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const T* row = value + samples.offset[k][i];
    A* grad_row = grad + samples.offset[k][i];
    const A coefficient = samples.coefficient[k][i];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      dots[k] += load(row + v * W) * g_vec[v];
      store(grad_row + v * W, load(grad_row + v * W) + g_vec[v] * coefficient);
    }
  }
}

template <typename T, typename A>
VISDET_INLINE void scatter_samples(GradSamples<A>& samples, const GradSamples<A>& later, const A* g, const T* value,
                                   A* grad, int64_t C) {
  constexpr int W = kLanes<A>;
  const int count = samples.block.count;
  for (int i = 0; i < count; ++i) {
    prefetch_corners<Into::kAllCaches>(C, [&](int k) { return value + later.offset[k][i]; });
    prefetch_corners<Into::kAllCaches>(C, [&](int k) { return grad + later.offset[k][i]; });
    // A sample that does not count adds nothing, not even zero times a gradient that is infinite or NaN.
    if (samples.top[i] + samples.bottom[i] == 0) continue;
    Vec<A> dots[4] = {};
    int64_t c = 0;
    for (; c + 2 * W <= C; c += 2 * W) scatter_channels<2>(samples, i, g + c, value + c, grad + c, dots);
    for (; c + W <= C; c += W) scatter_channels<1>(samples, i, g + c, value + c, grad + c, dots);
    horizontal_sums(dots, samples.dot[i]);
    for (; c < C; ++c) {
      for (int k = 0; k < 4; ++k) {
        samples.dot[i][k] += to_accumulate(value[samples.offset[k][i] + c]) * g[c];
        grad[samples.offset[k][i] + c] += samples.coefficient[k][i] * g[c];
      }
    }
  }
}

// Copies rows of whole registers back to rows of C values at a stride.
template <typename T, typename A>
VISDET_INLINE void spread_rows(const A* from, int64_t S, int64_t C, T* to, int64_t stride) {
  const int64_t from_stride = whole_registers<A>(C);
  for (int64_t s = 0; s < S; ++s) {
    T* row = to + s * stride;
    for (int64_t c = 0; c < C; c += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(row + (s + kPrefetchedTexels < S ? kPrefetchedTexels * stride : 0) + c, 1);
    }
    for (int64_t c = 0; c < C; ++c) from_accumulate(from[s * from_stride + c], row[c]);
  }
}

template <typename T, typename A>
void backward_head(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t g) {
  const int64_t head = (b * a.S * a.G + g) * a.C, texel_stride = a.gathered ? whole_registers<A>(a.C) : a.G * a.C;
  const int64_t C = a.gathered ? whole_registers<A>(a.C) : a.C;
  A *row_scratch = scratch, *g_row = row_scratch + kBackwardRing * row_scratch_size(a.K);
  A* grad = a.gathered ? g_row + (C + 15) / 16 * 16 : reinterpret_cast<A*>(a.grad_value + head);
  const T* value = a.value + head;
  if (a.gathered) {
    T* values = reinterpret_cast<T*>(grad + a.S * C);
    gather_rows<A>(value, a.G * a.C, a.S, a.C, values);
    value = values;
    std::memset(grad, 0, sizeof(A) * static_cast<size_t>(a.S * C));
  }
  for (int64_t c = a.C; c < C; ++c) g_row[c] = 0;
  BlockWalk blocks({a.Q, a.G, true, a.order, a.Q, b, g, 0}, a.K);
  GradSamples<A> ring[kBackwardRing] = {};
  const auto scratch_of = [&](int64_t number) { return row_scratch + number % kBackwardRing * row_scratch_size(a.K); };
  const auto prepare = [&](GradSamples<A>& samples) {
    if (blocks.is_done()) return;
    if (blocks.first == 0) {
      prefetch_row(a, blocks.ahead.row());
      begin_row(a, blocks.rows.row(), scratch_of(blocks.number));
    }
    samples.block = blocks.next();
    locate_grad_samples(a, row_of(a, samples.block.row, scratch_of(samples.block.number)), texel_stride, samples);
  };
  for (int s = 0; s < kBackwardRing - 1; ++s) prepare(ring[s]);
  int64_t rows = a.Q;
  for (int64_t s = 0; rows > 0; ++s) {
    prepare(ring[(s + kBackwardRing - 1) % kBackwardRing]);
    GradSamples<A>& samples = ring[s % kBackwardRing];
    const int64_t row = samples.block.row;
    if (samples.block.is_first) {
      for (int64_t c = 0; c < a.C; ++c) g_row[c] = to_accumulate(a.grad_output[row * a.C + c]);
    }
    scatter_samples(samples, ring[(s + kBackwardRing - 2) % kBackwardRing], g_row, value, grad, C);
    A* row_numbers = scratch_of(samples.block.number);
    finish_grad_samples(a, row_of(a, row, row_numbers), samples);
    if (samples.block.is_last) {
      end_row(a, row, row_numbers);
      --rows;
    }
  }
  if (a.gathered) spread_rows(grad, a.S, a.C, a.grad_value + head, a.G * a.C);
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(MsDeformAttnBackward, backward_head<T, A>)

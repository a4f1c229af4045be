// The forward of ms_deform_attn: which rows a call owns is said in arrays.h, how a row's samples are walked in walk.h.
#include "cpu/ms_deform_attn/fused.h"

namespace visdet::VISDET_ISA {

template <typename A>
struct Samples {
  Block block;
  uintptr_t address[4][kBlock];  // of each corner's channels
  A weight[4][kBlock];           // attention weight * corner weight

  template <typename T>
  inline __attribute__((always_inline)) const T* corner(int k, int i) const {
    return reinterpret_cast<const T*>(address[k][i]);
  }
};

// Locates the samples of a block. copy: the rows of the levels that are copied, of this head.
template <typename T, typename A>
VISDET_INLINE void locate_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, const T* copy,
                                  Samples<A>& out) {
  const int64_t k0 = out.block.first;
  const int64_t element = sizeof(T), copy_stride = whole_registers<A>(a.C) * element, stride = a.G * a.C * element;
  const auto copy_at = reinterpret_cast<uintptr_t>(copy);
  const auto zeros_at = reinterpret_cast<uintptr_t>(a.zeros);
  const auto head_at = reinterpret_cast<uintptr_t>(a.value + (out.block.b * a.S * a.G + out.block.g) * a.C);
  const ReadableSamples<A> from(a, row, out.block);
  const A *location = from.location, *weight = from.weight;
  const int count = whole_registers<A>(out.block.count);
  const int32_t *H = a.H + k0, *W = a.W + k0;
  const int32_t* copied = a.copied + k0;
  const int64_t* start = a.copy_start + k0;
#pragma GCC ivdep
  for (int i = 0; i < count; ++i) {
    Bilinear<A> at;
    const bool counts = locate(location[2 * i] * W[i] - A(0.5), location[2 * i + 1] * H[i] - A(0.5), H[i], W[i], at);
    const A w = counts ? weight[i] : A(0);
    put_corner_weights(at, w, i, out.weight);
    const int64_t step = copied[i] ? copy_stride : stride;
    const uintptr_t level = copied[i] ? copy_at : head_at;
    // A sample that does not count reads zeros: zero times a texel would be NaN where that is infinite or NaN.
    const uintptr_t texel = level + static_cast<uintptr_t>((start[i] + at.index[0]) * step);
    const uintptr_t first = counts ? texel : zeros_at;
    const uintptr_t right = counts & at.left & at.right ? step : 0,
                    below = counts & at.top & at.bottom ? W[i] * step : 0;
    out.address[0][i] = first, out.address[1][i] = first + right;
    out.address[2][i] = first + below, out.address[3][i] = first + below + right;
  }
}

// Adds the samples' channels from c on, NV registers of them, to acc, or writes them there if they are the row's first.
// Each corner has a sum of its own, so that there are four chains of additions instead of one. The rows of `later` are
// prefetched, except those of copied levels (`copied`), because the copy is in the caches.
template <int NV, typename T, typename A>
VISDET_INLINE void sum_samples(const Samples<A>& samples, const Samples<A>& later, const int32_t* copied, int64_t c,
                               A* acc) {
  constexpr int W = kLanes<A>;
  Vec<A> sum[4][NV] = {};
  const int count = samples.block.count;
  for (int i = 0; i < count; ++i) {
    if (!copied[i]) {
      prefetch_corners<Into::kSecondLevel>(NV * W, [&](int k) { return later.template corner<T>(k, i) + c; });
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const T* row = samples.template corner<T>(k, i) + c;
      const A w = samples.weight[k][i];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[k][v] += load(row + v * W) * w;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const Vec<A> total = (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]);
    store(acc + v * W, samples.block.is_first ? total : load(acc + v * W) + total);
  }
}

template <typename T, typename A>
VISDET_INLINE void sum_all_channels(const Samples<A>& samples, const Samples<A>& later, const int32_t* copied, A* acc,
                                    int64_t C) {
  constexpr int W = kLanes<A>;
  int64_t c = 0;
  for (; c + 4 * W <= C; c += 4 * W) sum_samples<4, T>(samples, later, copied, c, acc + c);
  for (; c + 2 * W <= C; c += 2 * W) sum_samples<2, T>(samples, later, copied, c, acc + c);
  for (; c + W <= C; c += W) sum_samples<1, T>(samples, later, copied, c, acc + c);
  if (c == C) return;
  const bool is_first = samples.block.is_first;
  if (C > W) {  // takes the last W channels, and keeps those from c on
    A tail[W];
    std::memcpy(tail, acc + C - W, sizeof(tail));
    sum_samples<1, T>(samples, later, copied, C - W, tail);
    for (; c < C; ++c) acc[c] = tail[c - (C - W)];
    return;
  }
  for (int64_t t = 0; is_first && t < C; ++t) acc[t] = 0;
  for (int i = 0; i < samples.block.count; ++i) {
    if (!copied[i]) prefetch_corners<Into::kSecondLevel>(C, [&](int k) { return later.template corner<T>(k, i); });
    for (int k = 0; k < 4; ++k) {
      const T* row = samples.template corner<T>(k, i);
      for (int64_t t = 0; t < C; ++t) acc[t] += to_accumulate(row[t]) * samples.weight[k][i];
    }
  }
}

template <typename T, typename A>
void forward_rows(const MsDeformAttnArrays<T, A>& a, A* scratch, int64_t b, int64_t g, int64_t first, int64_t rows) {
  const bool copies = a.copy_rows > 0;
  const int64_t C = copies ? whole_registers<A>(a.C) : a.C;
  A *acc = scratch, *row_scratch = scratch + (C + 15) / 16 * 16;
  T* copy = reinterpret_cast<T*>(row_scratch + row_scratch_size(a.K));
  for (int64_t k = 0; copies && k < a.K; ++k) {
    if (!a.copied[k] || (k > 0 && a.level[k] == a.level[k - 1])) continue;
    const T* level = a.value + ((b * a.S + a.start[k]) * a.G + g) * a.C;
    gather_rows<A>(level, a.G * a.C, int64_t{a.H[k]} * a.W[k], a.C, copy + a.copy_start[k] * C);
  }
  BlockWalk blocks({a.Q, a.G, copies, a.order, rows, b, g, first}, a.K);
  Samples<A> ring[kForwardRing] = {};
  const auto prepare = [&](Samples<A>& samples) {
    if (blocks.is_done()) return;
    if (blocks.first == 0) {
      prefetch_row(a, blocks.ahead.row());
      begin_row(a, blocks.rows.row(), row_scratch);
    }
    samples.block = blocks.next();
    locate_samples(a, row_of(a, samples.block.row, row_scratch), copy, samples);
  };
  for (int s = 0; s < kForwardRing - 1; ++s) prepare(ring[s]);
  for (int64_t s = 0; rows > 0; ++s) {
    prepare(ring[(s + kForwardRing - 1) % kForwardRing]);
    const Samples<A>&samples = ring[s % kForwardRing], &later = ring[(s + kForwardRing - 2) % kForwardRing];
    sum_all_channels<T>(samples, later, a.copied + later.block.first, acc, C);
    if (samples.block.is_last) {
      T* out = a.output + samples.block.row * a.C;
      for (int64_t c = 0; c < a.C; ++c) from_accumulate(acc[c], out[c]);
      --rows;
    }
  }
}

}  // namespace visdet::VISDET_ISA

VISDET_KERNELS(MsDeformAttnForward, forward_rows<T, A>)

// ms_deform_attn on the CPU. The contract is in ../ms_deform_attn.h; how this file is compiled, in vec.h.
//
// A row is one (b, q, g). Its samples are located a block at a time, in vector code: four row offsets and four weights
// each, in arrays; then each sample's four rows of channels are walked, without branches (a sample that does not count
// has weight zero). Blocks are located some steps ahead of their use, and while one is summed the rows of a later one
// are prefetched, sample by sample: the reads are all over the pyramid, and in one burst would wait for each other.
// Forward: parallel over rows, all heads of a query before the next query, or, where levels of a head have enough
// samples to pay for their rows being copied into one piece, a head after the other. Backward: parallel over (b, g);
// one task owns all of grad_value[b, :, g, :], which it sums in a contiguous [S, C] scratch, or, where samples are few,
// in place: no races, and a result that does not depend on the number of threads.
#include <type_traits>

#include "common/bilinear.h"
#include "cpu/exp.h"
#include "cpu/vec.h"

namespace visdet {

// The tensors of one call, all contiguous.
template <typename T, typename A>
struct MsDeformAttnArrays {
  int64_t B, S, G, C, Q, L, K;  // K samples a row
  // Of each of the K samples: its level and that level's geometry. The last three have kBlock numbers more.
  const int32_t* level;  // [K]
  const int32_t* H;      // [K + kBlock]
  const int32_t* W;      // [K + kBlock]
  const int64_t* start;  // [K + kBlock]
  // Forward: levels of which a head's rows are copied into one piece before they are sampled.
  const int32_t* copied;      // [K + kBlock] whether the sample's level is one of them
  const int64_t* copy_start;  // [K + kBlock] the level's first row in the copy, else in value
  int64_t copy_rows;          // of one head, in all
  const T* zeros;             // [C up to a whole register] what a sample that does not count reads

  const int64_t* order;  // [Q] the order in which queries are worked on, or null for their own
  bool gathered;         // backward: a head's values and sums are laid out in one piece
  const T* value;        // [B, S, G, C]
  const A* locations;    // [B, Q, G, K, 2]
  const A* weights;      // [B, Q, G, K]
  T* output;             // [B, Q, G, C]     forward
  const T* grad_output;  // [B, Q, G, C]     backward
  T* grad_value;         // [B, S, G, C]
  A* grad_locations;     // [B, Q, G, K, 2]
  A* grad_weights;       // [B, Q, G, K]

  // The fused form has these instead of locations, weights and their gradients.
  const A* reference_points;  // [B, Q, L, 2 or 4], or null: the plain form
  const int32_t* center;      // [K + kBlock, 2] where the sample's point is in reference_points[b, q]
  const A* scale;             // [K + kBlock, 2] an offset's unit in locations, or in widths and heights of the box
  bool boxes;                 // 4
  bool wide;                  // offsets and logits, and their gradients, are of type A; else of type T
  const void* offsets;        // [B, Q, G, K, 2]
  const void* logits;         // [B, Q, G, K]
  void* grad_offsets;         // [B, Q, G, K, 2]
  void* grad_logits;          // [B, Q, G, K]
  A* grad_reference;          // [B, G, Q, L, 2 or 4], the part of each head; null if nobody asks
};

constexpr int kBlock = 32;  // samples located at a time: the arrays below take 3 KB of the first-level cache

// A row's scratch is of eight numbers a sample, for samples that fill registers of 16, and what a block may read past
// them.
constexpr int64_t scratch_samples(int64_t K) { return (K + 15) / 16 * 16; }
constexpr int64_t row_scratch_size(int64_t K) { return 8 * scratch_samples(K) + 2 * kBlock; }

namespace VISDET_ISA {

// Loops over a block's samples run to a whole number of registers: the rest would be scalar code, in which four samples
// cost as much as sixteen. They read the next row's samples, and past the tables of levels, which are longer than K.
template <typename A, typename I>
constexpr I whole_registers(I count) {
  return (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

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
// row_scratch_size(K) numbers.
template <typename A>
struct Row {
  const A* locations;  // [K, 2]
  const A* weights;    // [K]
  A* grad_locations;   // [K, 2]
  A* grad_weights;     // [K]
};

// to[0..count) = from[0..count), in registers as far as `from` can be read (`readable` numbers): what was written in
// parts is slow to read whole.
template <typename T, typename A>
VISDET_INLINE void copy_numbers(const T* from, int64_t readable, int64_t count, A* to) {
  int64_t i = 0;
  for (; i < count && i + kLanes<A> <= readable; i += kLanes<A>) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_accumulate(from[i]);
}

// Of `rows` times `count` numbers of a tensor of type A or T, those of one row. May write up to a register past them.
template <typename T, typename A>
VISDET_INLINE void read_numbers(const void* from, bool wide, int64_t rows, int64_t row, int64_t count, A* to) {
  const int64_t first = row * count, readable = rows * count - first;
  if (wide) {
    copy_numbers(static_cast<const A*>(from) + first, readable, count, to);
  } else {
    copy_numbers(static_cast<const T*>(from) + first, readable, count, to);
  }
}
template <typename T, typename A>
VISDET_INLINE void write_numbers(const A* from, bool wide, int64_t row, int64_t count, void* to) {
  if (wide) {
    copy_numbers(from, count, count, static_cast<A*>(to) + row * count);
  } else {
    T* numbers = static_cast<T*>(to) + row * count;
    for (int64_t i = 0; i < count; ++i) from_accumulate(from[i], numbers[i]);
  }
}

// weights = softmax of the logits in them, with zeros after the last up to a whole register. `largest` is a finite
// number, so that -inf has weight zero; a row of nothing else is NaN, as in torch, and so is one with a NaN.
template <typename A>
VISDET_INLINE void softmax(A* weights, int64_t K) {
  constexpr int W = kLanes<A>;
  const auto larger = [](Vec<A> one, Vec<A> other) { return other > one ? other : one; };
  constexpr A kLeast = std::is_same<A, float>::value ? A(-3.4028234663852886e38) : A(-1.7976931348623157e308);
  Vec<A> largest = Vec<A>{} + kLeast, sums = {};
  for (int64_t k = 0; k < K; k += W) {
    const Vec<A> logits = first_lanes<A>(load(weights + k), K - k, -static_cast<A>(__builtin_inf()));
    store(weights + k, logits);
    largest = larger(largest, logits);
  }
  const A top = across_lanes<A>(largest, larger);
  for (int64_t k = 0; k < K; k += W) {
    const Vec<A> weight = exp_nonpositive<A>(load(weights + k) - top);
    store(weights + k, weight);
    sums += weight;
  }
  const A sum = sum_of_lanes<A>(sums);
  for (int64_t k = 0; k < K; k += W) store(weights + k, load(weights + k) / sum);
}

template <typename T, typename A>
VISDET_INLINE Row<A> row_of(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) {
    return {a.locations + row * a.K * 2, a.weights + row * a.K, a.grad_locations + row * a.K * 2,
            a.grad_weights + row * a.K};
  }
  const int64_t K = scratch_samples(a.K);
  return {scratch, scratch + 2 * K, scratch + 3 * K, scratch + 5 * K};
}

// What a unit of offset is worth in locations: a register's numbers from i on, of x and y by turns.
template <typename T, typename A>
VISDET_INLINE Vec<A> offset_scale(const MsDeformAttnArrays<T, A>& a, const A* reference, int64_t i) {
  const Vec<A> scale = load(a.scale + i);
  return a.boxes ? scale * gather(reference + 2, a.center + i) : scale;
}

// The fused form: from offsets and logits to the row's locations and weights.
template <typename T, typename A>
VISDET_INLINE void begin_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  const int64_t K = a.K, D = a.boxes ? 4 : 2;
  A *locations = scratch, *weights = scratch + 2 * scratch_samples(K);
  const int64_t rows = a.B * a.Q * a.G;
  read_numbers<T>(a.offsets, a.wide, rows, row, 2 * K, locations);
  read_numbers<T>(a.logits, a.wide, rows, row, K, weights);
  softmax(weights, K);
  const A* reference = a.reference_points + row / a.G * a.L * D;
  for (int64_t i = 0; i < 2 * K; i += kLanes<A>) {
    store(locations + i, gather(reference, a.center + i) + load(locations + i) * offset_scale(a, reference, i));
  }
}

// The fused form: from the gradients of the row's locations and weights to those of its offsets, logits and reference
// points. A sample that does not count gives zero, whatever the box.
template <typename T, typename A>
VISDET_INLINE void end_row(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) return;
  constexpr int W = kLanes<A>;
  const int64_t K = a.K, N = scratch_samples(K), D = a.boxes ? 4 : 2, query = row / a.G;
  const A* weights = scratch + 2 * N;
  A *grad_locations = scratch + 3 * N, *grad_weights = scratch + 5 * N, *offsets = scratch + 6 * N;
  const A* reference = a.reference_points + query * a.L * D;
  Vec<A> products = {};
  for (int64_t k = 0; k < K; k += W) {
    products += load(weights + k) * first_lanes<A>(load(grad_weights + k), K - k, A(0));
  }
  const A mean = sum_of_lanes<A>(products);
  for (int64_t k = 0; k < K; k += W) store(grad_weights + k, load(weights + k) * (load(grad_weights + k) - mean));
  write_numbers<T>(grad_weights, a.wide, row, K, a.grad_logits);
  if (a.grad_reference != nullptr) {
    const int64_t b = query / a.Q, q = query - b * a.Q, g = row - query * a.G;
    A* sums = a.grad_reference + ((b * a.G + g) * a.Q + q) * a.L * D;
    for (int64_t i = 0; i < a.L * D; ++i) sums[i] = 0;
    read_numbers<T>(a.offsets, a.wide, a.B * a.Q * a.G, row, 2 * K, offsets);
    for (int64_t k = 0; k < K; ++k) {
      A* sum = sums + a.level[k] * D;
      for (int64_t i = 0; i < 2; ++i) {
        const A grad = grad_locations[2 * k + i];
        sum[i] += grad;
        if (a.boxes && grad != 0) sum[2 + i] += grad * offsets[2 * k + i] * a.scale[2 * k + i];
      }
    }
  }
  const Vec<A> zero = {};
  for (int64_t i = 0; i < 2 * K; i += W) {
    const Vec<A> grad = load(grad_locations + i);
    store(grad_locations + i, grad == zero ? zero : grad * offset_scale(a, reference, i));
  }
  write_numbers<T>(grad_locations, a.wide, row, 2 * K, a.grad_offsets);
}

// The rows of a loop: all heads of a query before the next query, or the queries of one head before the next head.
struct RowWalk {
  int64_t Q, G;
  bool by_head;
  const int64_t* order;
  int64_t left;     // rows to come, the current one among them
  int64_t b, g, i;  // query i of the working order

  int64_t row() const { return (b * Q + (order != nullptr ? order[i] : i)) * G + g; }
  void advance() {
    --left;
    if (by_head) {
      if (++i < Q) return;
      i = 0;
      if (++g == G) g = 0, ++b;
    } else {
      if (++g < G) return;
      g = 0;
      if (++i == Q) i = 0, ++b;
    }
  }
};

// Some of a row's samples: number first .. first + count.
struct Block {
  int64_t b, g, row;
  int64_t turn;  // the row is number `turn` of the loop
  int64_t first;
  int count;
  bool is_first, is_last;  // of the row
};

// The rows of a walk in blocks of at most kBlock samples, a row's all of about the same size.
struct BlockWalk {
  RowWalk rows, ahead;
  int64_t K, size, first = 0, turn = 0;

  BlockWalk(const RowWalk& walk, int64_t K) : rows(walk), ahead(walk), K(K) {
    const int64_t blocks = (K + kBlock - 1) / kBlock;
    size = (K + blocks - 1) / blocks;
    for (int k = 0; k < kAhead && ahead.left > 1; ++k) ahead.advance();
  }
  bool is_done() const { return rows.left == 0; }
  Block next() {
    const bool is_last = first + size >= K;
    const Block block{rows.b,     rows.g, rows.row(), turn, first, static_cast<int>(is_last ? K - first : size),
                      first == 0, is_last};
    first += size;
    if (is_last) {
      first = 0, ++turn;
      rows.advance();
      if (ahead.left > 1) ahead.advance();
    }
    return block;
  }
};

// Blocks in flight: one is summed, the rows of the last but one are asked for, and the last is located. With three, the
// forward would wait for memory (an encoder 10 % longer); with four, the backward's rows, of values and of gradients,
// push each other out of the first-level cache (9 % longer).
constexpr int kForwardRing = 4, kBackwardRing = 3;

// A block's locations and weights, to be read up to a whole number of registers: in place, or in a copy where the
// tensors end before.
template <typename A>
struct ReadableSamples {
  const A *location, *weight;
  A location_copy[2 * kBlock], weight_copy[kBlock];

  template <typename T>
  inline __attribute__((always_inline)) ReadableSamples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row,
                                                        const Block& block) {
    location = row.locations + block.first * 2;
    weight = row.weights + block.first;
    const bool is_scratch = a.reference_points != nullptr;
    const int64_t numbers = a.B * a.Q * a.G * a.K - block.row * a.K - block.first;
    if (is_scratch || numbers >= whole_registers<A>(block.count)) return;
    for (int i = 0; i < kBlock; ++i) {
      const int k = i < block.count ? i : 0;
      location_copy[2 * i] = location[2 * k], location_copy[2 * i + 1] = location[2 * k + 1];
      weight_copy[i] = weight[k];
    }
    location = location_copy, weight = weight_copy;
  }
};

// Forward.
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

// to[k][i] = weight * the corner weight of corner k.
template <typename A>
VISDET_INLINE void put_corner_weights(const Bilinear<A>& at, A weight, int i, A (&to)[4][kBlock]) {
  const A left = at.left ? 1 - at.fx : A(0), right = at.right ? at.fx : A(0);
  const A top = at.top ? (1 - at.fy) * weight : A(0), bottom = at.bottom ? at.fy * weight : A(0);
  to[0][i] = top * left;
  to[1][i] = top * right;
  to[2][i] = bottom * left;
  to[3][i] = bottom * right;
}

// copy: of the levels that are copied, of this head.
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

// Asks for the C numbers at each corner of a sample, which are read (or written) some steps later: into all caches, or
// from the second level down. A read waits 14 cycles for that one, which its neighbours hide, and the few misses that a
// first level can have at a time are free for the reads themselves (a decoder's forward 10 to 13 % shorter).
enum class Into { kAllCaches = 3, kSecondLevel = 2 };
template <Into INTO, typename Corner>
VISDET_INLINE void prefetch_corners(int64_t C, const Corner& corner) {
  const int64_t bytes = C * static_cast<int64_t>(sizeof(*corner(0)));
  for (int64_t at = 0; at < bytes; at += 64) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      __builtin_prefetch(reinterpret_cast<const char*>(corner(k)) + at, 0, static_cast<int>(INTO));
    }
  }
}

// acc[0..] = the samples' channels from c on, on top of what is there unless they are the row's first, for NV registers
// of channels. A sum for each corner: four chains of additions instead of one. copied: of `later`; the copy is in the
// caches.
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
  if (C > W) {  // the last W channels, of which the new ones count
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

// to[s, :] = from[s, :], from rows of C values at a stride to rows of whole registers, whose last numbers are zeros. A
// row of one head is short and far from the next, which the hardware does not foresee: ask for it.
constexpr int64_t kRowsAhead = 16;
template <typename A, typename T>
VISDET_INLINE void gather_rows(const T* from, int64_t stride, int64_t S, int64_t C, T* to) {
  const int64_t to_stride = whole_registers<A>(C);
  if (to_stride > C) std::memset(static_cast<void*>(to), 0, sizeof(T) * static_cast<size_t>(S * to_stride));
  for (int64_t s = 0; s < S; ++s) {
    const T* row = from + s * stride;
    for (int64_t c = 0; c < C; c += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(row + (s + kRowsAhead < S ? kRowsAhead * stride : 0) + c);
    }
    for (int64_t c = 0; c < C; ++c) to[s * to_stride + c] = row[c];
  }
}

// Numbers of scratch that forward_rows wants, with registers of up to 16: C and a row's, and the copied levels' rows.
template <typename T, typename A>
int64_t forward_scratch(const MsDeformAttnArrays<T, A>& a) {
  const int64_t C = (a.C + 15) / 16 * 16, rows = C + row_scratch_size(a.K);
  return rows + a.copy_rows * C;
}

// So many rows from query `first` of batch entry b and head g on; if levels are copied, all of this head. scratch: see
// forward_scratch.
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

// Backward: the same samples, with what their gradients need.
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

// From the dots to grad_weights and grad_locations.
template <typename T, typename A>
VISDET_INLINE void finish_grad_samples(const MsDeformAttnArrays<T, A>& a, const Row<A>& row, const GradSamples<A>& in) {
  const int64_t k0 = in.block.first;
  const int count = whole_registers<A>(in.block.count);
  A location_copy[2 * kBlock], weight_copy[kBlock];
  // The fused form's scratch has room for whole registers, but for some rows of several blocks.
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

// For NV registers of channels of sample i: dots[k] += <g, corner k>, and its gradient += coefficient * g.
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

// The same back.
template <typename T, typename A>
VISDET_INLINE void spread_rows(const A* from, int64_t S, int64_t C, T* to, int64_t stride) {
  const int64_t from_stride = whole_registers<A>(C);
  for (int64_t s = 0; s < S; ++s) {
    T* row = to + s * stride;
    for (int64_t c = 0; c < C; c += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(row + (s + kRowsAhead < S ? kRowsAhead * stride : 0) + c, 1);
    }
    for (int64_t c = 0; c < C; ++c) from_accumulate(from[s * from_stride + c], row[c]);
  }
}

// Numbers of scratch that backward_head wants: kBackwardRing rows' (a row begins before others end) and C; if gathered,
// also the head's S * C sums and its values.
template <typename T, typename A>
int64_t backward_scratch(const MsDeformAttnArrays<T, A>& a) {
  const int64_t C = (a.C + 15) / 16 * 16, rows = kBackwardRing * row_scratch_size(a.K) + C;
  return a.gathered ? rows + 2 * a.S * C : rows;
}

// One task: all gradients of batch entry b and head g. Unless gathered, grad_value holds zeros, of type A, and is added
// to. scratch: see backward_scratch.
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
  const auto scratch_of = [&](int64_t turn) { return row_scratch + turn % kBackwardRing * row_scratch_size(a.K); };
  const auto prepare = [&](GradSamples<A>& samples) {
    if (blocks.is_done()) return;
    if (blocks.first == 0) {
      prefetch_row(a, blocks.ahead.row());
      begin_row(a, blocks.rows.row(), scratch_of(blocks.turn));
    }
    samples.block = blocks.next();
    locate_grad_samples(a, row_of(a, samples.block.row, scratch_of(samples.block.turn)), texel_stride, samples);
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
    A* row_numbers = scratch_of(samples.block.turn);
    finish_grad_samples(a, row_of(a, row, row_numbers), samples);
    if (samples.block.is_last) {
      end_row(a, row, row_numbers);
      --rows;
    }
  }
  if (a.gathered) spread_rows(grad, a.S, a.C, a.grad_value + head, a.G * a.C);
}

#define VISDET_INSTANTIATE(T, A)                                                                             \
  template void forward_rows<T, A>(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t, int64_t, int64_t); \
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

#include "cpu/dispatch.h"
#include "ms_deform_attn.h"

namespace visdet {

#define VISDET_DECLARE(isa)                                                                   \
  namespace isa {                                                                             \
  template <typename T, typename A>                                                           \
  void forward_rows(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t, int64_t, int64_t); \
  template <typename T, typename A>                                                           \
  void backward_head(const MsDeformAttnArrays<T, A>&, A*, int64_t, int64_t);                  \
  }
VISDET_FOR_EACH_OTHER_ISA(VISDET_DECLARE)
#undef VISDET_DECLARE

namespace {

// An encoder's queries are the texels of the pyramid itself; taken in 8 x 8 squares, their samples share most of their
// texels. Other queries are taken in order.
constexpr int64_t kTileSide = 8;

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
    const Tensor dense_shapes = dense(level_shapes), dense_starts = dense(level_starts);
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
    H.insert(H.end(), kBlock, 1);
    W.insert(W.end(), kBlock, 1);
    start.insert(start.end(), kBlock, 0);
  }
};

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

// Whether a head has enough samples to pay for its values being laid out in one piece: a decoder has not.
bool pays_to_gather(const MsDeformAttnProblem& problem) { return problem.Q * problem.K > problem.S; }

// The levels of which the forward copies a head's rows into one piece: those of which a thread takes twice as many
// samples as they have texels.
struct Copies {
  std::vector<int32_t> copied;
  std::vector<int64_t> start;
  int64_t rows = 0;

  Copies(const MsDeformAttnProblem& problem, const Geometry& geometry)
      : copied(geometry.start.size(), 0), start(geometry.start) {
    // Rows that fill no registers of 16 are copied with zeros after them, so all of them or none.
    const bool each = problem.C % 16 == 0;
    if (problem.G == 1 || (!each && !pays_to_gather(problem))) return;
    const int64_t heads = problem.B * problem.G;
    const int64_t sharing = (torch::stable::get_num_threads() + heads - 1) / heads;  // threads that share a head
    for (size_t k = 0, next = 0; next < static_cast<size_t>(problem.K); k = next) {
      next = k + static_cast<size_t>(geometry.points[k]);
      const int64_t texels = int64_t{geometry.H[k]} * geometry.W[k];
      if (each && problem.Q * geometry.points[k] <= 2 * texels * sharing) continue;
      for (size_t i = k; i < next; ++i) copied[i] = 1, start[i] = rows;
      rows += texels;
    }
  }
};

// fill(arrays) adds the samples.
template <typename Fill>
Tensor forward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& value, const Fill& fill) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.K == 0) return zero_(output);
  const Copies copies(problem, geometry);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.output = static_cast<T*>(output.mutable_data_ptr());
    a.copied = copies.copied.data(), a.copy_start = copies.start.data(), a.copy_rows = copies.rows;
    const std::vector<A> zeros(static_cast<size_t>((problem.C + 15) / 16 * 16));
    a.zeros = reinterpret_cast<const T*>(zeros.data());
    const auto run = VISDET_BEST_ISA(forward_rows, T, A);
    const int64_t Q = problem.Q, G = problem.G;
    if (copies.rows > 0) {
      // A thread's rows have as many samples as it copies texels, or more.
      const int64_t grain = copies.rows / problem.K + 1;
      torch::stable::parallel_for(0, problem.B * G * Q, grain, [&](int64_t begin, int64_t end) {
        Scratch<A> scratch(baseline::forward_scratch(a));
        for (int64_t rows; begin < end; begin += rows) {
          const int64_t head = begin / Q, first = begin % Q;
          rows = std::min(Q - first, end - begin);
          run(a, scratch.data(), head / G, head % G, first, rows);
        }
      });
    } else {
      torch::stable::parallel_for(0, problem.B * Q, 1, [&](int64_t begin, int64_t end) {
        Scratch<A> scratch(baseline::forward_scratch(a));
        run(a, scratch.data(), begin / Q, 0, begin % Q, (end - begin) * G);
      });
    }
  });
  return output;
}

// fill(arrays) adds the samples and their gradients, none of which is empty.
template <typename Fill>
void backward(const MsDeformAttnProblem& problem, const Geometry& geometry, const Tensor& grad_output,
              const Tensor& value_in, Tensor& grad_value, const Fill& fill) {
  const Tensor value = dense(value_in);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    auto a = arrays_of<T, A>(problem, geometry, value);
    fill(a);
    a.grad_output = static_cast<const T*>(grad_output.const_data_ptr());
    a.grad_value = static_cast<T*>(grad_value.mutable_data_ptr());
    a.gathered = !std::is_same<T, A>::value || pays_to_gather(problem);
    if (!a.gathered) zero_(grad_value);
    const auto run = VISDET_BEST_ISA(backward_head, T, A);
    torch::stable::parallel_for(0, problem.B * problem.G, 1, [&](int64_t begin, int64_t end) {
      Scratch<A> scratch(baseline::backward_scratch(a));
      for (int64_t task = begin; task < end; ++task) {
        run(a, scratch.data(), task / problem.G, task % problem.G);
      }
    });
  });
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes, level_starts, locations_in, weights_in);
  const Tensor value = dense(value_in), locations = dense(locations_in), weights = dense(weights_in);
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
  const Tensor grad_output = dense(grad_output_in), locations = dense(locations_in), weights = dense(weights_in);
  const Geometry geometry(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_empty(value_in, value_in.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.Q == 0 || problem.C == 0 || problem.K == 0) {
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
  std::vector<int32_t> center;  // of MsDeformAttnArrays
  std::vector<double> scale;    // likewise
  std::vector<float> scale_float;

  FusedInputs(const Geometry& geometry, const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in)
      : reference(dense(reference_in)), offsets(dense(offsets_in)), logits(dense(logits_in)) {
    const bool boxes = reference.size(3) == 4;
    for (size_t k = 0; k < geometry.points.size(); ++k) {
      const double share = 0.5 / static_cast<double>(geometry.points[k]);
      scale.push_back(boxes ? share : 1.0 / geometry.W[k]);
      scale.push_back(boxes ? share : 1.0 / geometry.H[k]);
      center.push_back(geometry.level[k] * (boxes ? 4 : 2));
      center.push_back(center.back() + 1);
    }
    scale.insert(scale.end(), 2 * kBlock, 0.0);
    center.insert(center.end(), 2 * kBlock, 0);
    scale_float.assign(scale.begin(), scale.end());
  }

  const float* scale_of(float) const { return scale_float.data(); }
  const double* scale_of(double) const { return scale.data(); }

  template <typename Arrays>
  void fill(Arrays& a) const {
    using A = std::remove_pointer_t<decltype(a.grad_weights)>;
    a.reference_points = static_cast<const A*>(reference.const_data_ptr());
    a.boxes = reference.size(3) == 4;
    a.wide = offsets.scalar_type() == reference.scalar_type();
    a.offsets = offsets.const_data_ptr(), a.logits = logits.const_data_ptr();
    a.center = center.data(), a.scale = scale_of(A{});
  }
};

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes, const Tensor& level_starts,
                            const Tensor& reference_points, const Tensor& offsets, const Tensor& logits,
                            std::vector<int64_t> num_points) {
  const auto problem =
      check_ms_deform_attn_fused(value_in, level_shapes, level_starts, reference_points, offsets, logits, num_points);
  const Tensor value = dense(value_in);
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
  const Tensor grad_output = dense(grad_output_in);
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

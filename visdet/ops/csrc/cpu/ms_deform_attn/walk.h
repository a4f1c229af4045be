// The samples of a row in blocks, and the order of rows, for the forward and the backward of ms_deform_attn.
//
// A row is one (b, q, g). Its samples are located a block at a time, in vector code, which writes four row offsets and
// four weights of each sample to arrays. Then the four rows of channels of each sample are read, without branches: a
// sample that does not count has weight zero. Blocks are located some steps ahead of their use. While one block is
// summed, the rows of a later one are prefetched, sample by sample: the reads are all over the pyramid, and would wait
// for each other in one burst.
//
// The forward is parallel over rows. It takes all heads of a query before the next query. If a head has enough samples
// on some levels to pay for copying the rows of these levels into one piece, it takes one head after the other instead.
//
// The backward is parallel over (b, g). A task owns all of grad_value[b, :, g, :], which it sums in a contiguous [S, C]
// scratch, or in place where samples are few. So nothing races, and the result does not depend on the number of
// threads.
#pragma once

#include "common/bilinear.h"
#include "cpu/ms_deform_attn/arrays.h"
#include "cpu/vec.h"

namespace visdet::VISDET_ISA {

// Loops over a block's samples run to a whole number of registers, since a rest would be scalar code, in which four
// samples cost as much as sixteen. The loops therefore read some samples of the next row, and entries behind the first
// K of the tables of levels, which are longer.
template <typename A, typename I>
constexpr I whole_registers(I count) {
  return (count + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// Rows of one head are G * K samples apart, which the hardware's prefetcher does not foresee. So they are prefetched
// this many rows ahead.
constexpr int kPrefetchedRows = 2;

template <typename T, typename A>
VISDET_INLINE void prefetch_row(const MsDeformAttnArrays<T, A>& a, int64_t row) {
  const bool fused = a.reference_points != nullptr;
  const int64_t bytes = a.K * static_cast<int64_t>(fused && !a.in_sum_type ? sizeof(T) : sizeof(A));
  const char* location = static_cast<const char*>(fused ? a.offsets : a.locations) + row * bytes * 2;
  const char* weight = static_cast<const char*>(fused ? a.logits : a.weights) + row * bytes;
  for (int64_t at = 0; at < 2 * bytes; at += 64) __builtin_prefetch(location + at);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(weight + at);
}

// Row has one row's samples. The plain form reads and writes the tensors; the fused form works a row out in a scratch
// of row_scratch_size(K) numbers.
template <typename A>
struct Row {
  const A* locations;  // [K, 2]
  const A* weights;    // [K]
  A* grad_locations;   // [K, 2]
  A* grad_weights;     // [K]
};

template <typename T, typename A>
VISDET_INLINE Row<A> row_of(const MsDeformAttnArrays<T, A>& a, int64_t row, A* scratch) {
  if (a.reference_points == nullptr) {
    return {a.locations + row * a.K * 2, a.weights + row * a.K, a.grad_locations + row * a.K * 2,
            a.grad_weights + row * a.K};
  }
  const int64_t K = scratch_samples(a.K);
  return {scratch, scratch + 2 * K, scratch + 3 * K, scratch + 5 * K};
}

// RowWalk goes through the rows of a loop: all heads of a query before the next query, or the queries of one head
// before the next head.
struct RowWalk {
  int64_t Q, G;
  bool by_head;
  const int64_t* order;
  int64_t remaining;  // rows to come, the current one among them
  int64_t b, g, i;    // query i of the working order

  int64_t row() const { return (b * Q + (order != nullptr ? order[i] : i)) * G + g; }
  void advance() {
    --remaining;
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

// Block is some of a row's samples: number first .. first + count.
struct Block {
  int64_t b, g, row;
  int64_t number;  // of the row, in the order of the loop
  int64_t first;
  int count;
  bool is_first, is_last;  // of the row
};

// BlockWalk goes through the rows in blocks of at most kBlock samples, a row's all of about the same size.
struct BlockWalk {
  RowWalk rows, ahead;
  int64_t K, size, first = 0, number = 0;

  BlockWalk(const RowWalk& walk, int64_t K) : rows(walk), ahead(walk), K(K) {
    const int64_t blocks = (K + kBlock - 1) / kBlock;
    size = (K + blocks - 1) / blocks;
    for (int k = 0; k < kPrefetchedRows && ahead.remaining > 1; ++k) ahead.advance();
  }
  bool is_done() const { return rows.remaining == 0; }
  Block next() {
    const bool is_last = first + size >= K;
    const Block block{rows.b,     rows.g, rows.row(), number, first, static_cast<int>(is_last ? K - first : size),
                      first == 0, is_last};
    first += size;
    if (is_last) {
      first = 0, ++number;
      rows.advance();
      if (ahead.remaining > 1) ahead.advance();
    }
    return block;
  }
};

// ReadableSamples has a block's locations and weights, which can be read up to a whole number of registers: those of
// the tensors, or a copy where the tensors end before.
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

// Writes to[k][i] = weight * the corner weight of corner k.
template <typename A>
VISDET_INLINE void put_corner_weights(const Bilinear<A>& at, A weight, int i, A (&to)[4][kBlock]) {
  const A left = at.left ? 1 - at.fx : A(0), right = at.right ? at.fx : A(0);
  const A top = at.top ? (1 - at.fy) * weight : A(0), bottom = at.bottom ? at.fy * weight : A(0);
  to[0][i] = top * left;
  to[1][i] = top * right;
  to[2][i] = bottom * left;
  to[3][i] = bottom * right;
}

// Prefetches the C numbers at each corner of a sample, which are read or written some steps later, into all caches or
// only into the second level and those beyond it. A read from the second level waits for some 14 cycles, which
// neighbouring reads hide. The few misses that the first level can have at a time then stay free for the reads.
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

// Copies rows of C values at a stride to rows of whole registers, padded with zeros. The rows of one head are short and
// far apart, which the hardware's prefetcher does not foresee. So they are prefetched, this many texels ahead.
constexpr int64_t kPrefetchedTexels = 16;
template <typename A, typename T>
VISDET_INLINE void gather_rows(const T* from, int64_t stride, int64_t S, int64_t C, T* to) {
  const int64_t to_stride = whole_registers<A>(C);
  if (to_stride > C) std::memset(static_cast<void*>(to), 0, sizeof(T) * static_cast<size_t>(S * to_stride));
  for (int64_t s = 0; s < S; ++s) {
    const T* row = from + s * stride;
    for (int64_t c = 0; c < C; c += 64 / static_cast<int64_t>(sizeof(T))) {
      __builtin_prefetch(row + (s + kPrefetchedTexels < S ? kPrefetchedTexels * stride : 0) + c);
    }
    for (int64_t c = 0; c < C; ++c) to[s * to_stride + c] = row[c];
  }
}

}  // namespace visdet::VISDET_ISA

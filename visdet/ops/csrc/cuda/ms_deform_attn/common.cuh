// What the forward and the backward of ms_deform_attn share on CUDA: the levels, where samples come from, the order of
// an encoder's queries, and how a launch is put together. The contract is in ../ms_deform_attn.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/cuda_utils.cuh"
#include "common/launch.h"
#include "common/paths.h"
#include "ms_deform_attn.h"

namespace visdet {
namespace msda {

constexpr int kMaxHostLevels = 16;  // levels that travel as kernel arguments; more are copied to the device
constexpr int kMaxLevels = 256;     // levels of a table in shared memory

// Level geometry, each part by value (from the host) or by pointer (on the device).
struct Levels {
  const int64_t* shapes;  // [L, 2] on the device, or null
  const int64_t* starts;  // [L] on the device, or null
  int32_t H[kMaxHostLevels], W[kMaxHostLevels], start[kMaxHostLevels];
  int32_t P;                    // samples of a row on each level; 0: their number differs, see `end`
  int32_t end[kMaxHostLevels];  // samples of a row on the levels up to this one
  bool follow;                  // by value: the levels follow one another from row 0 to row S without a gap

  __host__ __device__ __forceinline__ bool by_value() const { return shapes == nullptr && starts == nullptr; }
};

// Samples of a row on level l.
__host__ __device__ __forceinline__ int32_t points_on(const Levels& levels, int l) {
  return levels.P > 0 ? levels.P : levels.end[l] - (l > 0 ? levels.end[l - 1] : 0);
}

struct alignas(16) Level {
  int32_t start, H, W;  // H = 0 for a level that does not lie within S
  int32_t end;          // samples of a row on the levels up to this one
};

__device__ __forceinline__ Level read_level(const Levels& levels, int l, int64_t S) {
  const int32_t end = levels.P > 0 ? (l + 1) * levels.P : levels.end[l];
  if (levels.by_value()) return {levels.start[l], levels.H[l], levels.W[l], end};
  const int64_t H = levels.shapes ? levels.shapes[2 * l] : levels.H[l],
                W = levels.shapes ? levels.shapes[2 * l + 1] : levels.W[l],
                start = levels.starts ? levels.starts[l] : levels.start[l];
  const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start + H * W <= S;
  return fits ? Level{static_cast<int32_t>(start), static_cast<int32_t>(H), static_cast<int32_t>(W), end}
              : Level{0, 0, 0, end};
}

// All threads of the block: the level table into shared memory. Returns whether the levels follow one another from row
// 0 to row S without a gap.
__device__ __forceinline__ bool load_levels(const Levels& levels, int L, int64_t S, Level* table) {
  if (levels.by_value()) {
    for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = read_level(levels, l, S);
    __syncthreads();
    return levels.follow;
  }
  bool follow = true;
#pragma unroll 1
  for (int l = threadIdx.x; l < L; l += blockDim.x) {
    const Level level = read_level(levels, l, S);
    table[l] = level;
    int64_t before = 0;
#pragma unroll 1
    for (int k = 0; k < l; ++k) {
      const Level other = read_level(levels, k, S);
      before += static_cast<int64_t>(other.H) * other.W;
    }
    follow = follow && level.H > 0 && level.start == before;
    if (l == L - 1) follow = follow && before + static_cast<int64_t>(level.H) * level.W == S;
  }
  return __syncthreads_and(follow);
}

// Reads what is needed once, so that it takes no place in the first-level cache. LINE: what lies beside it, 16 values
// in all, is needed soon and comes into the second-level cache with it.
template <bool LINE = false, typename V>
__device__ __forceinline__ V load_once(const V* from) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  uint32_t words[sizeof(V) / 4];
#if __CUDA_ARCH__ >= 750
  constexpr bool kLine = LINE;
#else
  constexpr bool kLine = false;
#endif
  if constexpr (kLine && sizeof(V) == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::64B.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else if constexpr (kLine && sizeof(V) == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from));
  } else if constexpr (sizeof(V) == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  }
  V value;
  memcpy(&value, words, sizeof(V));
  return value;
}

// Where the samples come from. fetch...() only loads, so that the loads of the next samples are in flight while the
// current ones are summed; position() and weight() then do the arithmetic. fetch_run(): N neighbouring samples of a
// row, on one level, the first one's index a multiple of N (1, 2 or 4). of_image() moves to one batch entry.
template <typename A>
struct GivenSamples {
  const A* locations;  // [B, Q, G, K, 2]
  const A* weights;    // [B, Q, G, K]

  struct Raw {
    A x, y, weight;
  };
  struct Row {};
  static constexpr bool kNeedsLevel = false;  // to fetch a position

  __device__ __forceinline__ GivenSamples of_image(int64_t, int64_t image_samples) const {
    return {locations + 2 * image_samples, weights + image_samples};
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ Raw fetch_position(Index index, Index /*query_level*/) const {
    const auto* from = reinterpret_cast<const Pack<A, 2>*>(locations) + index;
    const Pack<A, 2> location = ONCE ? load_once<LINE>(from) : *from;
    return {location.at[0], location.at[1], A(0)};
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ void fetch_weight(Index index, Raw& raw) const {
    raw.weight = ONCE ? load_once<LINE>(weights + index) : weights[index];
  }
  template <bool ONCE = false, int N, typename Index>
  __device__ __forceinline__ void fetch_run(Index index, Index query_level, Raw (&raw)[N]) const {
    if constexpr (N == 1 || sizeof(A) > 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw[i] = fetch_position<ONCE>(index + i, query_level);
        fetch_weight<ONCE>(index + i, raw[i]);
      }
    } else {
      const auto* from = reinterpret_cast<const Pack<A, 4>*>(locations + 2 * static_cast<int64_t>(index));
      const auto* weights_from = reinterpret_cast<const Pack<A, N>*>(weights + index);
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const Pack<A, 4> at = ONCE ? load_once(from + i / 2) : from[i / 2];
        raw[i] = {at.at[0], at.at[1], A(0)}, raw[i + 1] = {at.at[2], at.at[3], A(0)};
      }
      const Pack<A, N> weight = ONCE ? load_once(weights_from) : *weights_from;
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i].weight = weight.at[i];
    }
  }
  __device__ __forceinline__ void position(const Raw& raw, const Level& level, int /*points*/, A& x, A& y) const {
    x = fma(raw.x, A(level.W), A(-0.5)), y = fma(raw.y, A(level.H), A(-0.5));
  }
  __device__ __forceinline__ Row row_of_lanes(bool, uint32_t, int, int, int) const { return {}; }
  template <int LANES, int N, typename Has>
  __device__ __forceinline__ Row row_of_raw(const Raw (&)[N], const Has&) const {
    return {};
  }
  __device__ __forceinline__ Row row_at(int64_t) const { return {}; }
  __device__ __forceinline__ A weight(const Raw& raw, const Row&) const { return raw.weight; }
};

// The softmax of a row: weight = exp(logit - largest) * scale. `largest` is at least the least finite number, so that
// -inf has weight zero; a row of nothing else is NaN, as in torch.
template <typename A>
struct SoftmaxRow {
  A largest, scale;
  __device__ __forceinline__ A weight(A logit) const { return exp(logit - largest) * scale; }
};

template <typename T, typename A>
struct FusedSamples {
  const A* reference_points;  // [B, Q, L, 2 or 4]
  const char* offsets;        // [B, Q, G, K, 2], of type A if `wide`, else T
  const char* logits;         // [B, Q, G, K], likewise
  const SoftmaxRow<A>* rows;  // [B, Q, G] for row_at(), else null
  bool wide, boxes;

  struct Raw {
    A x, y, weight;  // of type T: the bits, until they are used
    A center_x, center_y, w, h;
  };
  using Row = SoftmaxRow<A>;
  static constexpr bool kNeedsLevel = true;
  static constexpr A kLeast = sizeof(A) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308;  // finite number

  __device__ __forceinline__ int element() const { return wide ? sizeof(A) : sizeof(T); }
  __device__ __forceinline__ FusedSamples of_image(int64_t image_levels, int64_t image_samples) const {
    FusedSamples image = *this;
    image.reference_points += image_levels * (boxes ? 4 : 2);
    image.offsets += image_samples * 2 * element(), image.logits += image_samples * element();
    return image;
  }
  template <typename Index>
  __device__ __forceinline__ void fetch_reference(Index query_level, Raw& raw) const {
    if (boxes) {
      const Pack<A, 4> box = reinterpret_cast<const Pack<A, 4>*>(reference_points)[query_level];
      raw.center_x = box.at[0], raw.center_y = box.at[1], raw.w = box.at[2], raw.h = box.at[3];
    } else {
      const Pack<A, 2> point = reinterpret_cast<const Pack<A, 2>*>(reference_points)[query_level];
      raw.center_x = point.at[0], raw.center_y = point.at[1];
    }
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ Raw fetch_position(Index index, Index query_level) const {
    Raw raw = {};
    if (wide) {
      const Pack<A, 2> offset = reinterpret_cast<const Pack<A, 2>*>(offsets)[index];
      raw.x = offset.at[0], raw.y = offset.at[1];
    } else if constexpr (sizeof(T) == 2) {
      raw.x = __uint_as_float(reinterpret_cast<const uint32_t*>(offsets)[index]);
    }
    fetch_reference(query_level, raw);
    return raw;
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ void fetch_weight(Index index, Raw& raw) const {
    if (wide) {
      raw.weight = reinterpret_cast<const A*>(logits)[index];
    } else if constexpr (sizeof(T) == 2) {
      raw.weight = __uint_as_float(reinterpret_cast<const uint16_t*>(logits)[index]);
    }
  }
  template <bool ONCE = false, int N, typename Index>
  __device__ __forceinline__ void fetch_run(Index index, Index query_level, Raw (&raw)[N]) const {
    if constexpr (N == 1 || sizeof(A) > 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw[i] = fetch_position(index + i, query_level);
        fetch_weight(index + i, raw[i]);
      }
    } else {
      fetch_reference(query_level, raw[0]);
#pragma unroll
      for (int i = 1; i < N; ++i) raw[i] = raw[0];
      if (wide) {
        const auto* from = reinterpret_cast<const Pack<A, 4>*>(offsets + int64_t{index} * 2 * sizeof(A));
        const auto logit = *reinterpret_cast<const Pack<A, N>*>(logits + int64_t{index} * sizeof(A));
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          const Pack<A, 4> offset = from[i / 2];
          raw[i].x = offset.at[0], raw[i].y = offset.at[1], raw[i + 1].x = offset.at[2], raw[i + 1].y = offset.at[3];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) raw[i].weight = logit.at[i];
      } else if constexpr (sizeof(T) == 2) {
        const auto offset = *reinterpret_cast<const Pack<uint32_t, N>*>(offsets + int64_t{index} * 4);
        const auto logit = *reinterpret_cast<const Pack<uint16_t, N>*>(logits + int64_t{index} * 2);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          raw[i].x = __uint_as_float(offset.at[i]), raw[i].weight = __uint_as_float(logit.at[i]);
        }
      }
    }
  }
  __device__ __forceinline__ A logit_of(A raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!wide) {
        const uint16_t bits = static_cast<uint16_t>(__float_as_uint(raw));
        return to_accumulate(*reinterpret_cast<const T*>(&bits));
      }
    }
    return raw;
  }
  __device__ __forceinline__ Pack<A, 2> offset_of(const Raw& raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!wide) {
        const uint32_t bits = __float_as_uint(raw.x);
        A offset[2];
        unpack(*reinterpret_cast<const Pack<T, 2>*>(&bits), offset);
        return {offset[0], offset[1]};
      }
    }
    return {raw.x, raw.y};
  }
  // Written with fma, so that every kernel finds the same cell.
  __device__ __forceinline__ void position(const Raw& raw, const Level& level, int points, A& x, A& y) const {
    const Pack<A, 2> offset = offset_of(raw);
    const A W = level.W, H = level.H, share = A(0.5) / points;
    const A center_x = fma(raw.center_x, W, A(-0.5)), center_y = fma(raw.center_y, H, A(-0.5));
    x = boxes ? fma(offset.at[0], raw.w * W * share, center_x) : center_x + offset.at[0];
    y = boxes ? fma(offset.at[1], raw.h * H * share, center_y) : center_y + offset.at[1];
  }
  // From the gradients of a sample's location (0 to 1) to those of its offset: zero where it does not count, whatever
  // the box.
  __device__ __forceinline__ Pack<A, 2> grad_offset(const Raw& raw, const Level& level, int points, A of_x,
                                                    A of_y) const {
    const A share = A(0.5) / points;
    const A scale_x = boxes ? raw.w * share : A(1) / level.W, scale_y = boxes ? raw.h * share : A(1) / level.H;
    return {of_x == 0 ? A(0) : of_x * scale_x, of_y == 0 ? A(0) : of_y * scale_y};
  }
  // The softmax of a row, worked out by `lanes` neighbouring threads (a power of two) that all come here.
  __device__ __forceinline__ Row row_of_lanes(bool exists, uint32_t first, int K, int lane, int lanes) const {
    constexpr int kEach = 4;  // loads in flight
    A largest = kLeast, sum = 0;
    for (int k = lane; exists && k < K; k += kEach * lanes) {
      A logit[kEach], top = largest;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        Raw raw;
        raw.weight = 0;
        if (k + i * lanes < K) fetch_weight(first + k + i * lanes, raw);
        logit[i] = k + i * lanes < K ? logit_of(raw.weight) : -static_cast<A>(INFINITY);
        top = logit[i] > top ? logit[i] : top;  // a NaN stays out, and makes the sum NaN
      }
      sum *= exp(largest - top);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += exp(logit[i] - top);
      largest = top;
    }
    A top = largest;
    for (int step = 1; step < lanes; step *= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, top, step);
      top = other > top ? other : top;
    }
    sum *= exp(largest - top);
    for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return {top, A(1) / sum};
  }
  // The same where LANES threads hold the row's logits already; has(i): whether the i-th of this one exists.
  template <int LANES, int N, typename Has>
  __device__ __forceinline__ Row row_of_raw(const Raw (&raw)[N], const Has& has) const {
    A largest = kLeast, sum = 0, logit[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      logit[i] = has(i) ? logit_of(raw[i].weight) : -static_cast<A>(INFINITY);
      largest = logit[i] > largest ? logit[i] : largest;  // a NaN stays out, and makes the sum NaN
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp(logit[i] - largest);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return {largest, A(1) / sum};
  }
  __device__ __forceinline__ Row row_at(int64_t row) const { return rows[row]; }
  __device__ __forceinline__ A weight(const Raw& raw, const Row& row) const { return row.weight(logit_of(raw.weight)); }
};

// v in 0..1; NaN becomes 0.
__device__ __forceinline__ float saturate(float v) { return __saturatef(v); }
__device__ __forceinline__ double saturate(double v) { return fmin(fmax(v, 0.0), 1.0); }
// Towards zero; numbers beyond the integers become the nearest one.
__device__ __forceinline__ int32_t truncate(float v) { return __float2int_rz(v); }
__device__ __forceinline__ int32_t truncate(double v) { return __double2int_rz(v); }

// Along one axis of `size` texels: the first of the two texels that a sample at x reads, the fraction of the way to the
// second, and the part of the sample that falls inside the map (NaN: none).
template <typename A>
__device__ __forceinline__ int32_t place(A x, int32_t size, A& fraction, A& part) {
  const int32_t first = min(truncate(fmax(x, A(0))), max(size - 2, 0));
  fraction = saturate(x - static_cast<A>(first));
  part = saturate(fmin(x + A(1), static_cast<A>(size) - x));
  return first;
}

// The order of an encoder's queries: the image is cut into regions, bands of columns, the same ones on every level, so
// that queries that follow each other lie together on all levels. What every block works out before its first query
// delays it: so there are no divisions but the last one, and loops that run once are not unrolled, whose instructions
// come from memory.
constexpr int kRegionHeight = 16, kRegionWidth = 8;  // texels of the largest level
constexpr int kMaxRegions = 512, kMaxParts = 128;    // in all; bands and columns together
constexpr int32_t kMaxSide = 1 << 24;                // texels: kMaxParts times as many are 31 bits

// A side cut into parts.
struct Parts {
  int32_t count;
  uint32_t share;  // 2^32 / count
  __host__ __device__ static Parts of(int32_t count) { return {count, count > 1 ? 0xffffffffu / count + 1 : 0u}; }
  // The first texel of a part, along a side of so many; of part `count`, the end.
  __device__ __forceinline__ int32_t first(int32_t side, int32_t part) const {
    return part < count ? __umulhi(static_cast<uint32_t>(side) * part, share) : side;
  }
};

struct Regions {
  Parts bands, columns;
  bool fit;  // else a side is too long

  // level_at(l): the level, of L.
  template <typename LevelAt>
  __host__ __device__ static Regions of(int L, const LevelAt& level_at) {
    int32_t H = 1, W = 1;
#pragma unroll 1
    for (int l = 0; l < L; ++l) {
      const Level level = level_at(l);
      H = level.H > H ? level.H : H, W = level.W > W ? level.W : W;
    }
    int32_t bands = (H - 1) / kRegionHeight + 1, columns = (W - 1) / kRegionWidth + 1;
#pragma unroll 1
    while (bands * static_cast<int64_t>(columns) > kMaxRegions || bands + columns > kMaxParts) {
      bands = (bands + 1) / 2, columns = (columns + 1) / 2;
    }
    return {Parts::of(bands), Parts::of(columns), H < kMaxSide && W < kMaxSide};
  }
};

// Of levels that the host knows; else they are found on the device.
inline Regions known_regions(const Levels& levels, int L) {
  if (!levels.by_value()) return {};
  return Regions::of(L, [&](int l) { return Level{0, levels.H[l], levels.W[l], 0}; });
}

struct Region {
  uint32_t start;  // places before it
  uint16_t band, column;
};
struct Span {
  int32_t first, size;
};
// Of shared memory for the regions of L levels; without `regions`, which the host may not know, for as many as there
// may be. Less of it is more first-level cache: an encoder's forward takes 13 KB, for which a multiprocessor sets aside
// 16 of its 256; with all regions it would set aside 32.
inline size_t region_bytes(int64_t L, const Regions& regions) {
  const int64_t bands = regions.bands.count, columns = regions.columns.count;
  return bands == 0 ? sizeof(Region) * kMaxRegions + sizeof(Span) * kMaxParts * L
                    : sizeof(Region) * bands * columns + sizeof(Span) * (bands + columns) * L;
}

// The regions in shared memory. level_at(l): the level, of L.
template <typename LevelAt>
struct RegionTable {
  const Regions& regions;
  const LevelAt& level_at;
  const int L;
  Region* const region;  // [bands * columns]
  Span* const spans;     // [L, bands + columns]

  // All threads of the block, a multiple of a warp. memory: of region_bytes(L).
  __device__ __forceinline__ RegionTable(const Regions& regions, int L, const LevelAt& level_at, char* memory)
      : regions(regions),
        level_at(level_at),
        L(L),
        region(reinterpret_cast<Region*>(memory)),
        spans(reinterpret_cast<Span*>(region + regions.bands.count * regions.columns.count)) {
    const Parts &bands = regions.bands, &columns = regions.columns;
#pragma unroll 1
    for (int l = threadIdx.x / 32; l < L; l += blockDim.x / 32) {
      const Level level = level_at(l);
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < bands.count + columns.count; i += 32) {
        const bool is_band = i < bands.count;
        const Parts& parts = is_band ? bands : columns;
        const int32_t side = is_band ? level.H : level.W, part = is_band ? i : i - bands.count;
        const int32_t first = parts.first(side, part);
        spans_of(l)[i] = {first, parts.first(side, part + 1) - first};
      }
    }
    __syncthreads();  // the spans are complete
#pragma unroll 1
    for (int i = threadIdx.x; i < bands.count * columns.count; i += blockDim.x) {
      const int band = columns.count > 1 ? __umulhi(i, columns.share) : i, column = i - band * columns.count;
      uint32_t before = 0;
#pragma unroll 1
      for (int l = 0; l < L; ++l) {
        const Span rows = spans_of(l)[band], texels = spans_of(l)[bands.count + column];
        before += level_at(l).W * rows.first + rows.size * texels.first;
      }
      region[i] = {before, static_cast<uint16_t>(band), static_cast<uint16_t>(column)};
    }
    __syncthreads();  // the regions are complete
  }

  __device__ __forceinline__ Span* spans_of(int l) const {
    return spans + l * (regions.bands.count + regions.columns.count);
  }

  // The query at a place of the pyramid in the order of regions.
  __device__ __forceinline__ uint32_t query_at(uint32_t place) const {
    // Region `low` begins at place or before, `high` after.
    int low = 0, high = regions.bands.count * regions.columns.count;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool begun = region[middle].start <= place;
      low = begun ? middle : low, high = begun ? high : middle;
    }
    const Region at = region[low];
    uint32_t rest = place - at.start;
#pragma unroll 1
    for (int l = 0; l < L; ++l) {
      const Span rows = spans_of(l)[at.band], texels = spans_of(l)[regions.bands.count + at.column];
      const uint32_t size = rows.size * texels.size;
      if (rest < size) {
        const Level level = level_at(l);
        const uint32_t x = rest / static_cast<uint32_t>(rows.size), y = rest - x * rows.size;
        return level.start + (rows.first + y) * level.W + texels.first + x;
      }
      rest -= size;
    }
    return 0;
  }
};

// num_points: of each level, or null for P on every one.
inline Levels levels_of(const MsDeformAttnProblem& problem, const Tensor& shapes, const Tensor& starts,
                        const int64_t* num_points) {
  Levels levels{};
  if (num_points == nullptr) {
    levels.P = static_cast<int32_t>(problem.P);
  } else {
    VISDET_CHECK("ms_deform_attn_fused", problem.L <= kMaxHostLevels, "level_shapes may name ", kMaxHostLevels,
                 " levels at the most, got ", problem.L);
    int32_t end = 0;
    for (int64_t l = 0; l < problem.L; ++l) levels.end[l] = end += static_cast<int32_t>(num_points[l]);
  }
  const bool host_shapes = shapes.is_cpu(), host_starts = starts.is_cpu();
  VISDET_CHECK("ms_deform_attn", problem.L <= kMaxHostLevels || (!host_shapes && !host_starts),
               "level_shapes and level_starts on the CPU may name ", kMaxHostLevels, " levels at the most, got ",
               problem.L, "; pass them on value's device");
  // A plan's tables on the device have no address; what they hold is not read, but it is not null.
  static const int64_t nowhere = 0;
  const auto data_of = [](const Tensor& table) {
    const int64_t* data = table.const_data_ptr<int64_t>();
    return data == nullptr ? &nowhere : data;
  };
  const int64_t *shape_data = data_of(shapes), *start_data = data_of(starts);
  if (host_shapes) {
    check_levels(problem, shape_data, host_starts ? start_data : nullptr);
    for (int64_t l = 0; l < problem.L; ++l) {
      levels.H[l] = static_cast<int32_t>(shape_data[2 * l]), levels.W[l] = static_cast<int32_t>(shape_data[2 * l + 1]);
    }
  } else {
    levels.shapes = shape_data;
  }
  if (host_starts) {
    for (int64_t l = 0; l < problem.L; ++l) {
      VISDET_CHECK("ms_deform_attn", start_data[l] >= 0 && start_data[l] <= problem.S, "level_starts[", l,
                   "] must be a row of value, 0 to ", problem.S, ", got ", start_data[l]);
      levels.start[l] = static_cast<int32_t>(start_data[l]);
    }
  } else {
    levels.starts = start_data;
  }
  if (problem.levels_on_host) {
    int64_t row = 0;
    levels.follow = true;
    for (int64_t l = 0; l < problem.L; ++l) {
      levels.follow = levels.follow && levels.start[l] == row;
      row += int64_t{levels.H[l]} * levels.W[l];
    }
    levels.follow = levels.follow && row == problem.S;
  }
  return levels;
}

inline void check_sizes(const MsDeformAttnProblem& problem) {
  VISDET_CHECK("ms_deform_attn", problem.L <= kMaxLevels, "level_shapes may name ", kMaxLevels,
               " levels at the most on CUDA, got ", problem.L);
  VISDET_CHECK("ms_deform_attn", problem.S <= INT32_MAX, "value must have fewer than 2^31 rows S, got ", problem.S);
  // 32-bit offsets within one image's samples and one texel's bytes.
  const double samples = 1.0 * problem.Q * problem.G * problem.K;
  VISDET_CHECK("ms_deform_attn", samples <= INT32_MAX && problem.Q * problem.G <= INT32_MAX,
               "Q * G * L * P must be under 2^31, got ", problem.Q, " * ", problem.G, " * ", problem.K);
  VISDET_CHECK("ms_deform_attn", 8.0 * problem.G * problem.C <= INT32_MAX, "G * C must be under 2^28, got ", problem.G,
               " * ", problem.C);
  VISDET_CHECK("ms_deform_attn", problem.B * problem.G <= INT32_MAX, "B * G must be under 2^31, got ", problem.B, " * ",
               problem.G);
}

// x: blocks of a head; y and z: heads, read back as y + 65535 * z.
inline Grid head_grid(int64_t blocks, int64_t heads) {
  return {blocks, std::min<int64_t>(heads, 65535), ceil_div(heads, 65535)};
}

// How threads share a row of C channels: `lanes` of them, a power of two, take `vec` channels each by one load. vec is
// 16 bytes' worth where channels and addresses allow it, else 1. lanes cover the row, or are the most that a path has,
// and then take several turns.
struct RowSplit {
  int64_t vec, lanes;
};

template <typename T>
constexpr int kRowVec = 16 / static_cast<int>(sizeof(T));

inline RowSplit row_split(int64_t C, bool is_aligned, int64_t vec, int64_t most_lanes) {
  if (C % vec != 0 || !is_aligned) return {1, std::min<int64_t>(most_lanes * vec, 32)};
  int64_t lanes = 4;
  while (lanes < most_lanes && lanes * vec < C) lanes *= 2;
  return {vec, lanes};
}

// Calls f(VEC, LANES) with the constants of a row_split(C, is_aligned, VEC, MOST).
template <int VEC, int MOST, typename F>
void dispatch_row(const RowSplit& row, const F& f) {
  if (row.vec == 1) {
    return f(std::integral_constant<int, 1>{}, std::integral_constant<int, least(MOST * VEC, 32)>{});
  }
  const std::integral_constant<int, VEC> vec;
  if constexpr (MOST >= 32) {
    if (row.lanes == 32) return f(vec, std::integral_constant<int, 32>{});
  }
  if constexpr (MOST >= 16) {
    if (row.lanes == 16) return f(vec, std::integral_constant<int, 16>{});
  }
  if constexpr (MOST >= 8) {
    if (row.lanes == 8) return f(vec, std::integral_constant<int, 8>{});
  }
  f(vec, std::integral_constant<int, 4>{});
}

// The two forms of the operator: where samples come from, as contiguous tensors.
struct GivenForm {
  const Tensor &locations, &weights;

  template <typename T, typename A>
  GivenSamples<A> source() const {
    return {static_cast<const A*>(locations.const_data_ptr()), static_cast<const A*>(weights.const_data_ptr())};
  }
};
struct FusedForm {
  const Tensor &reference, &offsets, &logits;

  template <typename T, typename A>
  FusedSamples<T, A> source() const {
    const bool wide = offsets.scalar_type() == reference.scalar_type(), boxes = reference.size(3) == 4;
    return {static_cast<const A*>(reference.const_data_ptr()),
            static_cast<const char*>(offsets.const_data_ptr()),
            static_cast<const char*>(logits.const_data_ptr()),
            nullptr,
            wide,
            boxes};
  }
};

// Up to so many samples a texel, adding directly is faster than sorting.
constexpr int64_t kDirectSamples = 4;

// Channels to fill rows up to before the kernels run, so that they can be read 16 bytes at a time: C itself where they
// can already be, and where samples are too few to pay for the copies.
inline int64_t filled_channels(const MsDeformAttnProblem& problem, const Tensor& value) {
  const int64_t vec = 16 / static_cast<int64_t>(value.element_size());
  const bool pays = problem.C >= vec && problem.Q * problem.K > kDirectSamples * problem.S;
  return pays ? ceil_div(problem.C, vec) * vec : problem.C;
}
inline Tensor fill_rows(const Tensor& tensor, const MsDeformAttnProblem& problem, int64_t channels) {
  const Tensor rows = view(tensor, {problem.B, tensor.size(1), problem.G, problem.C});
  const int64_t before_and_after[] = {0, channels - problem.C};
  return pad(rows, {before_and_after, 2});
}

}  // namespace msda
}  // namespace visdet

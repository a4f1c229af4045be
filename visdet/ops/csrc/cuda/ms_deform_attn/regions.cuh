// The order in which kernels take an encoder's queries, which are the texels of the pyramid itself.
//
// The image is cut into rectangular regions, bands times columns, and the same cuts are made on every level:
//
//      level 0               level 1
//      +---+---+---+---+     +--+--+--+--+
//      | 0 | 1 | 2 | 3 |     |0 |1 |2 |3 |    Region 0 holds the texels marked 0 of every level, region 1 those
//      +---+---+---+---+     +--+--+--+--+    marked 1, and so on. The order takes region after region; within a
//      | 4 | 5 | 6 | 7 |     |4 |5 |6 |7 |    region level after level; within a level column after column.
//      +---+---+---+---+     +--+--+--+--+
//
// Queries that are neighbours in this order lie close together in the image, whatever their level, and therefore read
// texels that are close together on every level: the first-level cache serves most of their reads.
//
// A block works its table of regions out before its first query, so this code has no division but one, and loops that
// run once are not unrolled, because their instructions would have to be fetched from memory first.
#pragma once

#include "cuda/ms_deform_attn/levels.cuh"

// Keeps the compiler of device code from unrolling a loop of host and device code. The host's does not know the pragma.
#ifdef __CUDA_ARCH__
#define VISDET_ROLLED _Pragma("unroll 1")
#else
#define VISDET_ROLLED
#endif

namespace visdet::ms_deform_attn {

constexpr int kRegionHeight = 16, kRegionWidth = 8;  // the size of a region in texels of the largest level
constexpr int kMaxRegions = 512;                     // the most regions: bands times columns
constexpr int kMaxParts = 128;                       // the most bands and columns together
constexpr int32_t kMaxSide = 1 << 24;                // of a level, in texels: times kMaxParts it still has 31 bits

// A side of the image that is cut into `count` parts of equal length, up to rounding.
struct Parts {
  int32_t count;
  uint32_t reciprocal;  // 2^32 / count
  __host__ __device__ static Parts of(int32_t count) { return {count, count > 1 ? 0xffffffffu / count + 1 : 0u}; }
  // Returns the first texel of a part on a level whose side has this many texels; for part `count`, the side.
  __device__ __forceinline__ int32_t first(int32_t side, int32_t part) const {
    return part < count ? __umulhi(static_cast<uint32_t>(side) * part, reciprocal) : side;
  }
};

struct Regions {
  Parts bands, columns;
  bool fit;  // Every side is shorter than kMaxSide; otherwise the order cannot be used.

  // level_at(l) returns level l of L.
  template <typename LevelAt>
  __host__ __device__ static Regions of(int L, const LevelAt& level_at) {
    int32_t H = 1, W = 1;
    VISDET_ROLLED
    for (int l = 0; l < L; ++l) {
      const Level level = level_at(l);
      H = level.H > H ? level.H : H, W = level.W > W ? level.W : W;
    }
    int32_t bands = (H - 1) / kRegionHeight + 1, columns = (W - 1) / kRegionWidth + 1;
    VISDET_ROLLED
    while (bands * static_cast<int64_t>(columns) > kMaxRegions || bands + columns > kMaxParts) {
      bands = (bands + 1) / 2, columns = (columns + 1) / 2;
    }
    return {Parts::of(bands), Parts::of(columns), H < kMaxSide && W < kMaxSide};
  }
};

// Returns the regions if the host knows the levels, else none: the kernel then works them out.
inline Regions known_regions(const Levels& levels, int L) {
  if (!levels.by_value()) return {};
  return Regions::of(L, [&](int l) { return Level{0, levels.H[l], levels.W[l], 0}; });
}

struct Region {
  uint32_t start;  // the number of queries in the regions before this one
  uint16_t band, column;
};
struct Span {
  int32_t first, size;
};
// Returns the bytes of shared memory that the table of regions takes for L levels. If `regions` is empty, because the
// host does not know the levels, they are the bytes of the largest table. A small table leaves more of a
// multiprocessor's memory to its first-level cache.
inline size_t region_bytes(int64_t L, const Regions& regions) {
  const int64_t bands = regions.bands.count, columns = regions.columns.count;
  return bands == 0 ? sizeof(Region) * kMaxRegions + sizeof(Span) * kMaxParts * L
                    : sizeof(Region) * bands * columns + sizeof(Span) * (bands + columns) * L;
}

// The table of regions in shared memory. level_at(l) returns level l of L.
template <typename LevelAt>
struct RegionTable {
  const Regions& regions;
  const LevelAt& level_at;
  const int L;
  Region* const region;  // [bands * columns]
  Span* const spans;     // [L, bands + columns]: the rows of each band, then the columns of texels of each column

  // All threads of the block, whole warps, construct the table in `memory`, which has region_bytes(L, regions).
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
    __syncthreads();  // The spans are complete.
#pragma unroll 1
    for (int i = threadIdx.x; i < bands.count * columns.count; i += blockDim.x) {
      const int band = columns.count > 1 ? __umulhi(i, columns.reciprocal) : i, column = i - band * columns.count;
      uint32_t before = 0;
#pragma unroll 1
      for (int l = 0; l < L; ++l) {
        const Span rows = spans_of(l)[band], texels = spans_of(l)[bands.count + column];
        before += level_at(l).W * rows.first + rows.size * texels.first;
      }
      region[i] = {before, static_cast<uint16_t>(band), static_cast<uint16_t>(column)};
    }
    __syncthreads();  // The regions are complete.
  }

  __device__ __forceinline__ Span* spans_of(int l) const {
    return spans + l * (regions.bands.count + regions.columns.count);
  }

  // Returns the query that is number `rank` in the order of regions.
  __device__ __forceinline__ uint32_t query_at(uint32_t rank) const {
    // Bisection: region `low` starts at or before this rank, region `high` after it.
    int low = 0, high = regions.bands.count * regions.columns.count;
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      const bool begun = region[middle].start <= rank;
      low = begun ? middle : low, high = begun ? high : middle;
    }
    const Region at = region[low];
    uint32_t rest = rank - at.start;
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

}  // namespace visdet::ms_deform_attn

// The kernels of nms. Boxes lie in the order of their classes and, within a class, of their scores. A position is a
// place in that order, and a rank one in the order of scores alone.
//
// A block owns a tile of 64 positions. Every row, the box at a position, is compared with the boxes of its class before
// it, tile by tile, by several threads. Of an earlier tile only the boxes that its block has kept count, so that a
// block waits for the blocks of the tiles before its own, as far back as its first class goes; before it waits for one
// tile, it compares its rows with all of the next. Rows of a class that begins in the tile wait for no other and are
// settled first, so that no class waits for another. Blocks take their tiles in the order in which they start, and
// every block that is waited for has therefore started. The time is that of one class's chain of tiles, or of the
// comparisons with kept boxes, and the memory grows with the number of boxes alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cells.cuh"
#include "common/warp.cuh"

namespace visdet::nms {

constexpr int kTile = 64;  // bits of a word
constexpr int kParts = 8;  // threads of a row, which share the comparisons; with 4 the chain is slower
constexpr int kThreads = kTile * kParts;
constexpr int kPrepareThreads = 256;
constexpr int kSelectThreads = 256;
constexpr int kFlagsOfThread = 16;  // that it loads at once

// What all blocks have in common. A tile has two words, for 32 rows each: which are kept, and, from bit 32 on, of which
// this is known. A word is written as a whole, so that no other memory has to be ordered with it.
struct Progress {
  volatile uint64_t* words;
  uint32_t* next_tile;
};

// A thread owns a position: it copies its box, and finds where its class begins. Those of boxes that take no part are
// negative: ~start.
template <typename Boxes, typename A>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const A* __restrict__ boxes, const int64_t* __restrict__ order, const int64_t* __restrict__ ranks,
                   const int64_t* __restrict__ classes, const bool* __restrict__ is_candidate, int32_t N,
                   typename Boxes::Box* __restrict__ sorted, int32_t* __restrict__ starts) {
  const int64_t position = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (position >= N) return;
  const int64_t index = order[ranks == nullptr ? position : ranks[position]];
  sorted[position] = Boxes::box_of(boxes + Boxes::kNumbers * index);
  int32_t start = 0;
  if (classes != nullptr) {
    int32_t end = static_cast<int32_t>(position);
    while (start < end) {
      const int32_t middle = start + (end - start) / 2;
      if (classes[middle] < classes[position]) {
        start = middle + 1;
      } else {
        end = middle;
      }
    }
  }
  starts[position] = is_candidate != nullptr && !is_candidate[index] ? ~start : start;
}

// For all lanes of a warp: whether it is known of the rows that each lane `needs` in a tile which of them are kept.
__device__ __forceinline__ bool read_kept(const volatile uint64_t* words, uint64_t needs, uint64_t& kept) {
  const uint64_t word = words[threadIdx.x % 2];
  const uint64_t low = __shfl_sync(kAllLanes, word, 0), high = __shfl_sync(kAllLanes, word, 1);
  kept = (low & 0xffffffffu) | high << 32;
  return __all_sync(kAllLanes, (needs & ~(low >> 32 | (high & ~uint64_t{0xffffffffu}))) == 0);
}

// For all lanes of a warp.
__device__ __forceinline__ void publish(volatile uint64_t* words, const uint32_t (&kept)[2],
                                        const uint32_t (&known)[2]) {
  const int lane = threadIdx.x % 32;
  if (lane < 2)
    words[lane] =
        lane == 0 ? static_cast<uint64_t>(known[0]) << 32 | kept[0] : static_cast<uint64_t>(known[1]) << 32 | kept[1];
}

// The boxes of a tile from position `start` on.
__device__ __forceinline__ uint64_t from_start(int32_t start, int32_t tile) {
  const int32_t before = start - tile * kTile;
  return before <= 0 ? ~uint64_t{0} : before >= kTile ? 0 : ~uint64_t{0} << before;
}

// Those of the boxes in `columns` which suppress `mine`, of the ones that `among` names. A thread compares every
// fourth.
template <typename Boxes>
__device__ __forceinline__ uint64_t suppressors(const Boxes& rule, const typename Boxes::Box* columns,
                                                const typename Boxes::Box& mine, uint64_t among) {
  constexpr int kUnrolled = Boxes::kUnrolled;
  const int part = threadIdx.x % kParts;
  uint64_t found = 0;
  among >>= part;
#pragma unroll kUnrolled
  for (int i = 0; i < kTile; i += kParts) {
    if (among >> i & 1 && rule.suppresses(columns[i + part], mine)) found |= uint64_t{1} << i;
  }
  return found << part;
}

// For all threads of a block.
template <typename Box>
__device__ __forceinline__ void load_tile(const Box* boxes, int32_t tile, int32_t N, Box* columns) {
  constexpr int kWords = sizeof(Box) / sizeof(uint32_t);
  const int64_t first = static_cast<int64_t>(tile) * kTile;
  const int count = static_cast<int>(N - first < kTile ? N - first : kTile) * kWords;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(boxes + first);
  for (int i = threadIdx.x; i < count; i += kThreads) reinterpret_cast<uint32_t*>(columns)[i] = from[i];
}

enum class Row : uint8_t { out, first, later };  // `first` if its class begins in the tile

// For all lanes of a warp: adds to `kept` the rows of this state that are kept, as each is unless it has a kept rival.
// rivals: the earlier rows that each one overlaps too much. Every round settles all rows whose rivals are settled.
__device__ __forceinline__ void settle(const uint64_t* rivals, const Row* rows, Row state, uint32_t (&kept)[2]) {
  const int lane = threadIdx.x % 32;
  const uint64_t mine[2] = {rivals[lane], rivals[lane + 32]};
  uint32_t open[2] = {__ballot_sync(kAllLanes, rows[lane] == state),
                      __ballot_sync(kAllLanes, rows[lane + 32] == state)};
  while (open[0] | open[1]) {
    const uint64_t winners = kept[0] | static_cast<uint64_t>(kept[1]) << 32;
    const uint64_t unsettled = open[0] | static_cast<uint64_t>(open[1]) << 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool is_open = open[half] >> lane & 1, loses = is_open && (mine[half] & winners) != 0;
      const bool wins = is_open && (mine[half] & (winners | unsettled)) == 0;
      const uint32_t won = __ballot_sync(kAllLanes, wins), lost = __ballot_sync(kAllLanes, loses);
      kept[half] |= won, open[half] &= ~(won | lost);
    }
  }
}

// is_kept: by rank, and 0 behind the last box in its tile.
template <typename Boxes>
__global__ void __launch_bounds__(kThreads)
    suppress_kernel(const Boxes rule, const typename Boxes::Box* __restrict__ boxes, const int32_t* __restrict__ starts,
                    const int64_t* __restrict__ ranks, int32_t N, const Progress progress,
                    uint8_t* __restrict__ is_kept) {
  using Box = typename Boxes::Box;
  __shared__ Box columns[2][kTile];
  __shared__ uint64_t rivals[kTile];
  __shared__ Row rows[kTile];
  __shared__ int32_t tile_of_block;
  if (threadIdx.x == 0) tile_of_block = static_cast<int32_t>(atomicAdd(progress.next_tile, 1u));
  __syncthreads();  // the tile is known
  const int32_t tile = tile_of_block, row = threadIdx.x / kParts, position = tile * kTile + row;
  const int32_t start = position < N ? starts[position] : -1, first = starts[tile * kTile];
  const int32_t begin = (first < 0 ? ~first : first) / kTile;
  const Box mine = boxes[position < N ? position : N - 1];
  bool waits = start >= 0 && start < tile * kTile;
  const auto words_of = [&](int32_t other) { return progress.words + 2 * static_cast<int64_t>(other); };
  const auto either = [](uint64_t a, uint64_t b) { return a | b; };

  load_tile(boxes, tile, N, columns[0]);
  __syncthreads();  // the columns are there
  uint64_t found = start < 0 ? 0 : from_start(start, tile) & ((uint64_t{1} << row) - 1);
  found = reduce_lanes(suppressors(rule, columns[0], mine, found), either, 1, kParts);
  if (threadIdx.x % kParts == 0) {
    rivals[row] = found;
    rows[row] = start < 0 ? Row::out : waits ? Row::later : Row::first;
  }
  if (begin < tile) load_tile(boxes, begin, N, columns[1]);
  __syncthreads();  // the rows' states and the columns are there
  uint32_t kept[2] = {0, 0};
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    const uint32_t known[2] = {__ballot_sync(kAllLanes, rows[lane] != Row::later),
                               __ballot_sync(kAllLanes, rows[lane + 32] != Row::later)};
    settle(rivals, rows, Row::first, kept);
    if (known[0] | known[1]) publish(words_of(tile), kept, known);
  }

  const auto needs = [&](int32_t other) { return waits ? from_start(start, other) : 0; };
  if (begin < tile) found = suppressors(rule, columns[1], mine, needs(begin));
  for (int32_t other = begin; other < tile; ++other) {
    uint64_t kept_there, next_found = 0;
    if (other + 1 < tile) {
      if (__syncthreads_and(!waits)) break;  // also: the columns have been read
      Box* next = columns[(other - begin) % 2];
      load_tile(boxes, other + 1, N, next);
      const bool is_known = read_kept(words_of(other + 1), needs(other + 1), kept_there);
      __syncthreads();  // the columns are there
      next_found = suppressors(rule, next, mine, needs(other + 1) & (is_known ? kept_there : ~uint64_t{0}));
    }
    while (!read_kept(words_of(other), needs(other), kept_there)) {
      if (other + 1 < tile) __nanosleep(100);  // The next block but one would delay the one that has no time.
    }
    if (reduce_lanes(found & kept_there, either, 1, kParts) != 0) waits = false, rows[row] = Row::out;
    found = next_found;
  }
  __syncthreads();  // all rows have been compared
  if (threadIdx.x >= 32) return;

  const int lane = threadIdx.x;
  settle(rivals, rows, Row::later, kept);
  publish(words_of(tile), kept, {kAllLanes, kAllLanes});
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = static_cast<int64_t>(tile) * kTile + 32 * half + lane;
    is_kept[at < N && ranks != nullptr ? ranks[at] : at] = kept[half] >> lane & 1;
  }
}

// A block counts the kept boxes before its own, and writes the indices of its own in the order of their ranks. The last
// one writes how many all are.
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const uint8_t* __restrict__ is_kept, const int64_t* __restrict__ order, int64_t flags,
                  int64_t* __restrict__ keep, int64_t* __restrict__ count) {
  const auto flags_from = [&](int64_t first) {
    return first < flags ? *reinterpret_cast<const uint4*>(is_kept + first) : uint4{0, 0, 0, 0};
  };
  const auto number_of = [](const uint4& words) {
    return __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
  };
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSelectThreads * kFlagsOfThread;
  int32_t mine = 0, before, total;
  for (int64_t i = threadIdx.x * kFlagsOfThread; i < begin; i += kSelectThreads * kFlagsOfThread) {
    mine += number_of(flags_from(i));
  }
  exclusive_sum_block<kSelectThreads>(mine, before);
  const int64_t first = begin + threadIdx.x * kFlagsOfThread;
  const uint4 words = flags_from(first);
  int64_t to = before + exclusive_sum_block<kSelectThreads>(number_of(words), total);
  const uint32_t of_thread[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < kFlagsOfThread; ++i) {
    if (of_thread[i / 4] >> 8 * (i % 4) & 1) keep[to++] = order[first + i];
  }
  if (threadIdx.x == 0 && begin + kSelectThreads * kFlagsOfThread >= flags) *count = before + total;
}

}  // namespace visdet::nms

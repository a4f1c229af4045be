// The kernels of nms. Boxes lie in the order of their classes and, within a class, of their scores. A position is a
// place in that order, and a rank one in the order of scores alone.
//
// A block owns a tile of 64 positions. Every row, the box at a position, is compared with the boxes of its class before
// it, tile by tile, by 4 threads. Of an earlier tile only the boxes that its block has kept count, so that a block
// waits for the blocks of the tiles before its own, as far back as its first class goes; while it waits, it compares
// its rows with all of the next tile. Blocks take their tiles in the order in which they start, and every block that is
// waited for has therefore started. The time is that of one class's chain of tiles, or of the comparisons with kept
// boxes, and the memory grows with the number of boxes alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cells.cuh"
#include "common/warp.cuh"

namespace visdet::nms {

constexpr int kTile = 64;  // bits of a word
constexpr int kParts = 4;  // threads of a row; fewer would make the chain slower, more take more exchanges
constexpr int kThreads = kTile * kParts;
constexpr int kPrepareThreads = 256;
constexpr int kSelectThreads = 1024;  // of the one block that counts
constexpr int kFlagsOfThread = 16;    // that it loads at once

// What all blocks have in common. A tile has two words, for 32 rows each: the kept ones, and bit 32, which says that
// they are known. A word is written once, as a whole, so that no other memory has to be ordered with it.
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

// For all lanes of a warp: whether the kept rows of a tile are known, and which they are.
__device__ __forceinline__ bool read_kept(const volatile uint64_t* words, uint64_t& kept) {
  const uint64_t word = words[threadIdx.x % 2];
  if (!__all_sync(kAllLanes, word >> 32 != 0)) return false;
  kept = (__shfl_sync(kAllLanes, word, 0) & 0xffffffffu) | __shfl_sync(kAllLanes, word, 1) << 32;
  return true;
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

// For all lanes of a warp: which rows of a tile are kept, as each row is unless it has a kept rival. rivals: the
// earlier rows that each one overlaps too much. Every round settles all rows whose rivals are settled.
__device__ __forceinline__ void settle(const uint64_t* rivals, const bool* is_out, uint32_t (&kept)[2]) {
  const int lane = threadIdx.x % 32;
  const uint64_t mine[2] = {rivals[lane], rivals[lane + 32]};
  uint32_t open[2] = {__ballot_sync(kAllLanes, !is_out[lane]), __ballot_sync(kAllLanes, !is_out[lane + 32])};
  kept[0] = kept[1] = 0;
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
  __shared__ Box columns[kTile];
  __shared__ uint64_t rivals[kTile];
  __shared__ bool is_row_out[kTile];
  __shared__ int32_t tile_of_block;
  if (threadIdx.x == 0) tile_of_block = static_cast<int32_t>(atomicAdd(progress.next_tile, 1u));
  __syncthreads();  // the tile is known
  const int32_t tile = tile_of_block, row = threadIdx.x / kParts, position = tile * kTile + row;
  const int32_t start = position < N ? starts[position] : -1, first = starts[tile * kTile];
  const Box mine = boxes[position < N ? position : N - 1];
  bool is_out = start < 0;

  load_tile(boxes, tile, N, columns);
  __syncthreads();  // the columns are there
  uint64_t before = is_out ? 0 : from_start(start, tile) & ((uint64_t{1} << row) - 1);
  before = suppressors(rule, columns, mine, before);
  before |= __shfl_xor_sync(kAllLanes, before, 1);
  before |= __shfl_xor_sync(kAllLanes, before, 2);
  if (threadIdx.x % kParts == 0) rivals[row] = before;

  for (int32_t other = (first < 0 ? ~first : first) / kTile; other < tile; ++other) {
    if (__syncthreads_and(is_out)) break;  // also: the columns have been read
    load_tile(boxes, other, N, columns);
    const volatile uint64_t* words = progress.words + 2 * static_cast<int64_t>(other);
    uint64_t kept = ~uint64_t{0};
    const bool is_known = read_kept(words, kept);
    __syncthreads();  // the columns are there
    uint64_t found = suppressors(rule, columns, mine, is_out ? 0 : from_start(start, other) & kept);
    if (!is_known) {
      // The next block but one has time, and would delay the one that has none.
      while (!read_kept(words, kept)) {
        if (other + 1 < tile) __nanosleep(200);
      }
      found &= kept;
    }
    bool is_hit = found != 0;
    is_hit |= __shfl_xor_sync(kAllLanes, is_hit, 1);
    is_hit |= __shfl_xor_sync(kAllLanes, is_hit, 2);
    is_out |= is_hit;
  }
  if (threadIdx.x % kParts == 0) is_row_out[row] = is_out;
  __syncthreads();  // all rows have been compared
  if (threadIdx.x >= 32) return;

  uint32_t kept[2];
  settle(rivals, is_row_out, kept);
  const int lane = threadIdx.x;
  if (lane < 2) {
    progress.words[2 * static_cast<int64_t>(tile) + lane] = uint64_t{1} << 32 | (lane == 0 ? kept[0] : kept[1]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = static_cast<int64_t>(tile) * kTile + 32 * half + lane;
    is_kept[at < N && ranks != nullptr ? ranks[at] : at] = kept[half] >> lane & 1;
  }
}

// One block writes the indices of the kept boxes in the order of their ranks, and how many they are.
__global__ void __launch_bounds__(kSelectThreads)
    select_kernel(const uint8_t* __restrict__ is_kept, const int64_t* __restrict__ order, int64_t flags,
                  int64_t* __restrict__ keep, int64_t* __restrict__ count) {
  int64_t found = 0;
  for (int64_t begin = 0; begin < flags; begin += kSelectThreads * kFlagsOfThread) {
    const int64_t first = begin + threadIdx.x * kFlagsOfThread;
    uint4 words = {0, 0, 0, 0};
    if (first < flags) words = *reinterpret_cast<const uint4*>(is_kept + first);
    int32_t total;
    const int32_t mine = __popc(words.x) + __popc(words.y) + __popc(words.z) + __popc(words.w);
    int64_t to = found + exclusive_sum_block<kSelectThreads>(mine, total);
    const uint32_t of_thread[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < kFlagsOfThread; ++i) {
      if (of_thread[i / 4] >> 8 * (i % 4) & 1) keep[to++] = order[first + i];
    }
    found += total;
  }
  if (threadIdx.x == 0) *count = found;
}

}  // namespace visdet::nms

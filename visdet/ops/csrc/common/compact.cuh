// Compaction: the kept entries of a block in order, without gaps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/warp.cuh"

namespace visdet {

// Bytes of shared memory that compact_block() declares, up to the next multiple of 16.
template <int THREADS, int ROUNDS = 1>
constexpr int64_t kCompactShared = (sizeof(int32_t) * ROUNDS * (THREADS / 32) + 15) / 16 * 16;

// For all threads of a block: there are THREADS entries a round, a thread has one of each. Calls put(round, position)
// for every entry for which keeps(round) holds, its position being the number of kept entries before it, and returns
// how many are kept. `rounds`: those of the ROUNDS that exist, the same for all threads. What put() wrote to shared
// memory can be read by all threads afterwards.
template <int THREADS, int ROUNDS = 1, typename Keeps, typename Put>
__device__ __forceinline__ int compact_block(int rounds, const Keeps& keeps, const Put& put) {
  constexpr int kWarps = THREADS / 32;
  __shared__ int32_t counts[ROUNDS * kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned ballots[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    ballots[round] = 0;
    if (ROUNDS > 1 && round >= rounds) break;
    ballots[round] = __ballot_sync(kAllLanes, keeps(round));
    if (lane == 0) counts[round * kWarps + warp] = __popc(ballots[round]);
  }
  __syncthreads();  // the counts of all warps are known
  int total = 0;
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    if (ROUNDS > 1 && round >= rounds) break;
    int position = total + rank_in_ballot(ballots[round]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) position += counts[round * kWarps + w];
      total += counts[round * kWarps + w];
    }
    if (ballots[round] >> lane & 1) put(round, position);
  }
  __syncthreads();  // the counts have been read, and what put() wrote is complete
  return total;
}

}  // namespace visdet

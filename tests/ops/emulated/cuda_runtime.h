// Runs device code of csrc/common on the CPU, a block of threads at a time, so that it can be tested without a GPU.
//
// Each thread of the block is a coroutine. One runs until it waits for others, at a barrier of the block or at an
// exchange within its warp; then the next one runs. Atomics need no more than that. Memory that a function declares as
// __shared__ is static, so that all threads of the block that runs have it in common. There is no dynamic shared memory.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct Index {
  unsigned x, y;
} threadIdx, blockIdx, blockDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulated {

constexpr size_t kStackBytes = 1 << 18;

struct Thread {
  ucontext_t context;
  bool is_done = false;
};
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads of a block, for one block after the other

// Threads wait here until as many as it expects have come.
struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int expected);
};

struct Warp {
  alignas(16) char values[32][16];
  std::map<unsigned, Barrier> barriers;  // by their masks
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barrier;
  int votes = 0;
  ucontext_t scheduler;
  std::function<void()> body;
};
inline Block* block;

inline void yield() {
  Thread& thread = block->threads[threadIdx.x];
  swapcontext(&thread.context, &block->scheduler);
}

inline void Barrier::wait(int expected) {
  const int mine = generation;
  if (++arrived == expected) {
    arrived = 0, ++generation;
  } else {
    while (generation == mine) yield();
  }
}

inline void run_thread() {
  block->body();
  block->threads[threadIdx.x].is_done = true;
  yield();
}

// Calls body() in each of `count` threads, whole warps. A block whose threads wait for each other in vain never ends.
inline void run_block(int count, std::function<void()> body) {
  Block of_call{std::vector<Thread>(count), std::vector<Warp>(count / 32), {}, 0, {}, std::move(body)};
  block = &of_call, blockDim.x = count;
  while (stacks.size() < of_call.threads.size()) stacks.emplace_back(new char[kStackBytes]);
  for (int i = 0; i < count; ++i) {
    Thread& thread = of_call.threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i].get();
    thread.context.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.context, run_thread, 0);
  }
  for (bool is_done = false; !is_done;) {
    is_done = true;
    for (int i = 0; i < count; ++i) {
      if (of_call.threads[i].is_done) continue;
      threadIdx.x = i, is_done = false;
      swapcontext(&of_call.scheduler, &of_call.threads[i].context);
    }
  }
  block = nullptr;
}

// Calls body() in each thread of a grid of x times y blocks, one block after the other.
inline void run_grid(unsigned x, unsigned y, int threads, const std::function<void()>& body) {
  for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block(threads, body);
  }
}

inline void sync_warp(unsigned mask) {
  if (!(mask >> threadIdx.x % 32 & 1)) std::abort();  // A thread outside the mask may not call such a function.
  block->warps[threadIdx.x / 32].barriers[mask].wait(__builtin_popcount(mask));
}

// Calls read(lane, value) for the lanes of the mask, once all of them have brought their values.
template <typename T, typename Read>
void exchange(unsigned mask, T value, const Read& read) {
  Warp& warp = block->warps[threadIdx.x / 32];
  static_assert(sizeof(T) <= sizeof(warp.values[0]));
  std::memcpy(warp.values[threadIdx.x % 32], &value, sizeof(T));
  sync_warp(mask);
  for (int lane = 0; lane < 32; ++lane) {
    T other;
    std::memcpy(&other, warp.values[lane], sizeof(T));
    if (mask >> lane & 1) read(lane, other);
  }
  sync_warp(mask);
}

}  // namespace emulated

inline void __syncthreads() { emulated::block->barrier.wait(static_cast<int>(emulated::block->threads.size())); }
inline bool __syncthreads_and(bool holds) {
  emulated::block->votes += holds;
  __syncthreads();
  const bool all = emulated::block->votes == static_cast<int>(emulated::block->threads.size());
  __syncthreads();
  emulated::block->votes = 0;
  __syncthreads();
  return all;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::sync_warp(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  T found = value;
  emulated::exchange(mask, value, [&](int lane, T other) { found = lane == source ? other : found; });
  return found;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ step);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) - step);
}
inline unsigned __ballot_sync(unsigned mask, bool holds) {
  unsigned ballot = 0;
  emulated::exchange(mask, holds, [&](int lane, bool other) { ballot |= static_cast<unsigned>(other) << lane; });
  return ballot;
}
inline bool __all_sync(unsigned mask, bool holds) { return __ballot_sync(mask, holds) == mask; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  unsigned same = 0;
  emulated::exchange(mask, value, [&](int lane, T other) { same |= static_cast<unsigned>(other == value) << lane; });
  return same;
}

// The CPU for which this is compiled has no fused operations.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline void __nanosleep(unsigned) {}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
template <typename T>
T atomicAdd(T* at, T value) {
  return std::exchange(*at, *at + value);
}
template <typename T>
T atomicOr(T* at, T bits) {
  return std::exchange(*at, *at | bits);
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}

// The forward of a decoder: a few hundred queries that read the whole pyramid.
//
// A block owns neighbouring queries of one head (blockIdx.y is the head, blockIdx.z the image). Each multiprocessor has
// about one block, or up to kMaxBlocksEach one after the other. As in forward_rows.cuh, a group of LANES * SPLIT
// threads owns a row: LANES threads own its channels, VEC each, and SPLIT sets of lanes divide its samples among them.
// Every level has a multiple of four samples of a row, so that each run of kRun samples lies on one level.
//
// A group takes its row in chunks of kChunk samples. Its threads first prepare the samples of the chunk in shared
// memory (forward_sample.cuh). If the group has fewer threads than the chunk has samples, each thread fetches pairs of
// neighbouring samples by one load. Then each set of lanes adds its samples of every run, while the texels of the next
// kInFlight samples are being loaded.
//
//   a group of 8 threads, LANES = 4, SPLIT = 2:
//      thread       0     1     2    ...     7
//      prepares    0,1   2,3   4,5   ...   14,15     of the chunk's 16 samples
//      threads 0-3 sum samples 0, 2, 4, ... and threads 4-7 samples 1, 3, 5, ...
//
// Half of the warps start in the middle of the chunk. So at any time some warps read fine levels, whose texels come
// from the second-level cache, while others read coarse ones, whose texels the first-level cache holds, and the warps
// do not all wait for the same cache. An image of value has less than 2^32 bytes. Each output is written once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/warp.cuh"
#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kChunk = 16;        // samples that a group prepares at a time
constexpr int kMaxInRuns = 1024;  // samples of a row, since the levels of their runs are in shared memory

// The levels of the runs of any row, from which the kernel fills a table in shared memory. The host lists the first
// ones, as far as it knows the levels: searching them in the kernel would delay every block.
struct RunLevels {
  int64_t S;
  int32_t count;    // the runs that `level` lists
  Level level[16];  // The level's number stands in `end`.
  Levels levels;

  __device__ __forceinline__ Level at(int r) const {
    if (r < count) return level[r];
    int l = 0;
    while (r * kRun >= (levels.P > 0 ? (l + 1) * levels.P : levels.end[l])) ++l;
    Level found = read_level(levels, l, S);
    found.end = l;
    return found;
  }
};

inline RunLevels run_levels(const Levels& levels, const MsDeformAttnProblem& problem) {
  RunLevels runs{};
  runs.S = problem.S, runs.levels = levels;
  if (!levels.by_value()) return runs;
  constexpr int kMost = sizeof(runs.level) / sizeof(Level);
  for (int l = 0; l < problem.L; ++l) {
    for (int i = 0; i < points_on(levels, l) / kRun && runs.count < kMost; ++i) {
      runs.level[runs.count++] = {levels.start[l], levels.H[l], levels.W[l], l};
    }
  }
  return runs;
}

struct DecoderSizes {
  int64_t image_bytes;                               // of value
  uint32_t image_rows, image_samples, image_levels;  // Q * G, Q * G * K and Q * L
  uint32_t Q, texel_bytes;
  int32_t G, C, L, K;
};

// The bytes of shared memory that a group's samples take; 16 more let neighbouring groups use different banks.
constexpr int kChunkBytes = sizeof(Sample<float>) * kChunk + 16;

template <typename T, typename Source, int VEC, int LANES, int SPLIT>
__global__ void __maxnreg__(kForwardRegisters)
    decoder_kernel(const T* __restrict__ value, const Source source, T* __restrict__ output, const DecoderSizes sizes,
                   const __grid_constant__ RunLevels runs) {
  constexpr int kGroup = LANES * SPLIT;
  constexpr int kEach = greatest(1, kChunk / kGroup), kPairs = kEach / 2;  // samples, and pairs, that a thread prepares
  constexpr int kSteps = kRun / SPLIT;                                     // the samples of a run that a thread sums
  // In 16 bit a thread sums twice as many channels of a sample, and one sample in flight is enough.
  constexpr int kInFlight = sizeof(T) == 2 && SPLIT > 1 ? 1 : least(2, kSteps);
  extern __shared__ __align__(16) char shared[];
  const int groups = blockDim.x / kGroup, group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C, g = blockIdx.y;
  const uint32_t b = blockIdx.z;
  auto* my_samples = reinterpret_cast<Sample<float>*>(shared + group * kChunkBytes);
  // [K / kRun]: of each run, the level, with its number in `end`.
  auto* table = reinterpret_cast<Level*>(shared + groups * kChunkBytes);
  const uint32_t query = blockIdx.x * groups + group;
  const bool exists = query < sizes.Q;
  const uint32_t row = exists ? query * G + g : 0;
  const Source image =
      source.of_image(static_cast<uint64_t>(b) * sizes.image_levels, static_cast<uint64_t>(b) * sizes.image_samples);

  typename Source::Raw raw[kEach];
  // Returns the number of raw[i] among the samples of the chunk: pairs are dealt to the threads of the group in order.
  const auto sample_of = [&](int i) { return kPairs > 0 ? (i / 2 * kGroup + lane) * 2 + i % 2 : lane; };
  const auto level_of = [&](int k) { return table[min(k, K - 1) / kRun]; };
  const auto fetch = [&](int k0) {
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      const int k = k0 + sample_of(i);
      typename Source::Raw pair[2] = {};
      if (exists && k < K && sample_of(i) < kChunk) {
        const uint32_t index = row * K + k, query_level = query * L + (Source::kNeedsLevel ? level_of(k).end : 0);
        if constexpr (kPairs > 0) {
          image.fetch_run(index, query_level, pair);
        } else {
          pair[0] = image.fetch_position(index, query_level);
          image.fetch_weight(index, pair[0]);
        }
      }
      raw[i] = pair[0];
      if constexpr (kPairs > 0) raw[i + 1] = pair[1];
    }
  };
  if (!Source::kNeedsLevel) fetch(0);
  for (int r = threadIdx.x; r < K / kRun; r += blockDim.x) table[r] = runs.at(r);
  __syncthreads();  // The table is complete.
  const typename Source::Row softmax = image.row_of_lanes(exists, row * K, K, lane, kGroup);
  if (Source::kNeedsLevel) fetch(0);

  const int channel_lane = lane % LANES, split = lane / LANES, c = channel_lane * VEC;
  // Lanes past the last channel read the first channels.
  const uint32_t texel_bytes = sizes.texel_bytes, row_offset = c < C ? c * sizeof(T) : 0;
  const char* base = reinterpret_cast<const char*>(value) + b * sizes.image_bytes + g * C * sizeof(T);
  float sum[VEC] = {};
#pragma unroll 1
  for (int k0 = 0;;) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = k0 + sample_of(i);
      const int first_of_pair = k0 + sample_of(i / 2 * 2);  // It lies on the same level.
      const Level level = level_of(first_of_pair);
      const int points = Source::kNeedsLevel ? points_on(runs.levels, level.end) : 0;
      const Sample<float> sample = make_sample<float>(image, raw[i], softmax, level, points, exists && k < K);
      if (kGroup <= kChunk || lane < kChunk) my_samples[sample_of(i)] = sample;
    }
    __syncwarp();  // These samples are complete.

    const int count = min(kChunk, K - k0) / kRun;
    int run = threadIdx.x / 128 % 2 * (count / 2);
    uint32_t right, below;  // from a texel of this run to its neighbours, in bytes
    const auto enter_run = [&] {
      const Level level = table[k0 / kRun + run];
      right = level.W > 1 ? texel_bytes : 0, below = level.H > 1 ? level.W * texel_bytes : 0;
    };
    Sample<float> at[kInFlight];
    Pack<T, VEC> texels[kInFlight][4];
    const auto load = [&](int slot, int step) {
      at[slot] = my_samples[run * kRun + step * SPLIT + split];
      const uint32_t upper = at[slot].texel * texel_bytes + row_offset, lower = upper + below;
      const uint32_t corner[4] = {upper, upper + right, lower, lower + right};
#pragma unroll
      for (int j = 0; j < 4; ++j) texels[slot][j] = *reinterpret_cast<const Pack<T, VEC>*>(base + corner[j]);
    };
    enter_run();
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) load(i, i);
    // Sums the samples of a run, and loads the first ones of the next run unless it is the last.
    const auto sum_run = [&](auto is_last) {
      constexpr bool kLast = decltype(is_last)::value;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (!kLast && step + kInFlight == kSteps) {
          if (++run == count) run = 0;
          enter_run();
        }
        add_texels(at[step % kInFlight], texels[step % kInFlight], sum);
        if (!kLast || step + kInFlight < kSteps) load(step % kInFlight, (step + kInFlight) % kSteps);
      }
    };
#pragma unroll 1
    for (int remaining = count; remaining > 1; --remaining) sum_run(std::false_type{});
    sum_run(std::true_type{});
    k0 += kChunk;
    if (k0 >= K) break;
    fetch(k0);
    __syncwarp();  // The threads have read the samples.
  }
  // The threads that own the same channels add their sums up, and the first of them writes the row.
  sum_lanes(sum, LANES, kGroup);
  if (split == 0 && c < C && exists) {
    store_pack<T, VEC>(output + (static_cast<uint64_t>(b) * sizes.image_rows + row) * C + c, sum);
  }
}

constexpr int kForwardThreads = 1024;  // the most threads of a block

// How a head's queries are spread over blocks if there are to be about as many blocks as multiprocessors, as decoders
// want it: all queries of a head then meet in few first-level caches. `split` sets of lanes work on a row.
struct FewBlocks {
  int64_t split, threads;  // threads of a block, or 0 if the queries are too many
};

// Each multiprocessor has `blocks_each` blocks. As many threads work on a row as then fit into a block. In 16 bit,
// blocks of more than 768 threads are slower with a split of four than with one of two.
template <typename Form>
FewBlocks few_blocks(const ForwardCall<Form>& call, int64_t blocks_each) {
  const int64_t lanes = call.row().lanes, heads = call.problem.B * call.problem.G;
  const int64_t blocks = blocks_each * std::max<int64_t>(1, call.scope.device().multiprocessors / heads);
  const int64_t rows = ceil_div(call.problem.Q, blocks), most_split4 = is_16_bit(call.value) ? 768 : kForwardThreads;
  const auto threads = [&](int64_t split) { return ceil_div(rows * lanes * split, 32) * 32; };
  const int64_t split4 = std::min<int64_t>(4, std::max<int64_t>(1, 16 / lanes)),
                split2 = std::min<int64_t>(2, std::max<int64_t>(1, 8 / lanes));
  if (threads(split4) <= most_split4) return {split4, threads(split4)};
  if (threads(split2) <= kForwardThreads) return {split2, threads(split2)};
  if (threads(1) <= kForwardThreads) return {1, threads(1)};
  return {1, 0};
}

// Calls f(SPLIT) with the constant of a FewBlocks whose rows have LANES lanes.
template <int LANES, typename F>
void dispatch_split(int64_t split, const F& f) {
  constexpr int kSplit4 = least(4, greatest(1, 16 / LANES)), kSplit2 = least(2, greatest(1, 8 / LANES));
  if (split == kSplit4) return f(std::integral_constant<int, kSplit4>{});
  if (split == kSplit2) return f(std::integral_constant<int, kSplit2>{});
  f(std::integral_constant<int, 1>{});
}

// Up to kMaxBlocksEach blocks on a multiprocessor, one after the other, are still faster than another path.
constexpr int64_t kMaxBlocksEach = 4;

template <typename Form>
FewBlocks decoder_blocks(const ForwardCall<Form>& call) {
  const int64_t most = call.problem.Q == call.problem.S ? 1 : kMaxBlocksEach;  // An encoder has a kernel of its own.
  for (int64_t blocks_each = 1; blocks_each <= most; ++blocks_each) {
    if (const FewBlocks blocks = few_blocks(call, blocks_each); blocks.threads > 0) return blocks;
  }
  return {1, 0};
}

template <typename Form>
int64_t decoder_shared_bytes(const ForwardCall<Form>& call, const FewBlocks& blocks) {
  return kChunkBytes * (blocks.threads / (call.row().lanes * blocks.split)) +
         static_cast<int64_t>(sizeof(Level)) * (call.problem.K / kRun);
}

// The path `decoder` serves queries so few that about kMaxBlocksEach blocks a multiprocessor hold them.
template <typename Form>
const char* decoder_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (const char* reason = call.declines_row()) return reason;
  if (problem.K == 0 || problem.K > kMaxInRuns || !points_divide(call.levels, problem, kRun)) {
    return "the samples of a row on each level are no multiple of 4, or too many";
  }
  if (problem.S * call.texel_bytes() > int64_t{UINT32_MAX}) return "an image of value has 4 GiB or more";
  if (problem.G > 65535 || problem.B > 65535) return "there are too many heads or images";
  const FewBlocks blocks = decoder_blocks(call);
  if (blocks.threads == 0) return "there are too many queries for the number of multiprocessors";
  if (decoder_shared_bytes(call, blocks) > call.scope.device().shared_block) {
    return "a block has too little shared memory for its queries";
  }
  return nullptr;
}

template <typename Form>
void decoder_launch(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const FewBlocks blocks = decoder_blocks(call);
  const int64_t rows = blocks.threads / (call.row().lanes * blocks.split), shared = decoder_shared_bytes(call, blocks);
  const DecoderSizes sizes{problem.S * call.texel_bytes(),
                           static_cast<uint32_t>(problem.Q * problem.G),
                           static_cast<uint32_t>(problem.Q * problem.G * problem.K),
                           static_cast<uint32_t>(problem.Q * problem.L),
                           static_cast<uint32_t>(problem.Q),
                           static_cast<uint32_t>(call.texel_bytes()),
                           static_cast<int32_t>(problem.G),
                           static_cast<int32_t>(problem.C),
                           static_cast<int32_t>(problem.L),
                           static_cast<int32_t>(problem.K)};
  call.visit_tuned([&]<typename T>(T, auto vec, auto lanes) {
    constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
    dispatch_split<kLanes>(blocks.split, [&](auto split) {
      const auto source = call.form.template source<T, float>();
      using Source = std::decay_t<decltype(source)>;
      launch({"ms_deform_attn",
              "decoder_kernel",
              call.scope,
              {ceil_div(problem.Q, rows), problem.G, problem.B},
              blocks.threads,
              shared},
             decoder_kernel<T, Source, kVec, kLanes, decltype(split)::value>, data_of(call.value), source,
             data_of(call.output), sizes, run_levels(call.levels, problem));
    });
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

// The forward of a decoder: a few hundred queries that read the whole pyramid.
//
// Each multiprocessor has about one block, which owns neighbouring queries of one head (blockIdx.y is the head,
// blockIdx.z the image). As in forward_rows.cuh, a group of LANES * SPLIT threads owns a row: LANES threads own its
// channels, VEC each, and SPLIT sets of lanes divide its samples among them. Every level has a multiple of four samples
// of a row, so that each run of four samples lies on one level (forward_runs.cuh).
//
// A group takes its row in chunks of kChunk samples. Its threads first prepare the samples of the chunk in shared
// memory, each of them neighbouring pairs of samples that it fetches by one load if the group has at most kChunk / 2
// threads. Then each set of lanes takes its part of every run, with the texels of kInFlight samples loading.
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
#include "cuda/ms_deform_attn/forward_rows.cuh"
#include "cuda/ms_deform_attn/forward_runs.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kMaxInRuns = 1024;  // samples of a row, since the levels of their runs are in shared memory

// The levels of the runs of any row, from which the kernel fills a table in shared memory. The host lists the first
// ones, as far as it knows the levels: searching them in the kernel would delay every block.
struct ManyRuns {
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

inline ManyRuns many_runs(const Levels& levels, const MsDeformAttnProblem& problem) {
  ManyRuns runs{};
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

template <typename T, typename Source, typename Runs, int VEC, int LANES, int SPLIT>
__global__ void __maxnreg__(kForwardRegisters)
    decoder_kernel(const T* __restrict__ value, const Source source, T* __restrict__ output, const DecoderSizes sizes,
                   const __grid_constant__ Runs runs) {
  constexpr int kGroup = LANES * SPLIT;
  constexpr int kEach = greatest(1, kChunk / kGroup), kPairs = kEach / 2;  // of samples that a thread prepares
  constexpr int kSteps = kRun / SPLIT;                                     // the samples of a run that a thread sums
  constexpr bool kFew = std::is_same_v<Runs, FewRuns>;
  // In 16 bit a thread sums twice as many channels of a sample, and one sample in flight is enough.
  constexpr int kInFlight = sizeof(T) == 2 && SPLIT > 1 ? 1 : least(2, kSteps);
  extern __shared__ __align__(16) char shared[];
  const int groups = blockDim.x / kGroup, group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int L = sizes.L, K = kFew ? kChunk : sizes.K, G = sizes.G, C = sizes.C, g = blockIdx.y;
  const uint32_t b = blockIdx.z;
  auto* my_samples = reinterpret_cast<Sample<float>*>(shared + group * kChunkBytes);
  auto* table = reinterpret_cast<Level*>(shared + groups * kChunkBytes);  // [K / kRun], unless kFew
  const uint32_t query = blockIdx.x * groups + group;
  const bool exists = query < sizes.Q;
  const uint32_t row = exists ? query * G + g : 0;
  const Source image =
      source.of_image(static_cast<uint64_t>(b) * sizes.image_levels, static_cast<uint64_t>(b) * sizes.image_samples);

  typename Source::Raw raw[kEach];
  // Returns the number of raw[i] among the samples of the chunk: pairs are dealt to the threads of the group in order.
  const auto sample_of = [&](int i) { return kPairs > 0 ? (i / 2 * kGroup + lane) * 2 + i % 2 : lane; };
  const auto level_of = [&](int k) {
    if constexpr (kFew) {
      return of_run(runs.level, k);
    } else {
      return table[min(k, K - 1) / kRun];
    }
  };
  const auto points_of = [&](int k, const Level& level) {
    if constexpr (kFew) {
      return of_run(runs.points, k);
    } else {
      return points_on(runs.levels, level.end);
    }
  };
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
  if (kFew || !Source::kNeedsLevel) fetch(0);
  typename Source::Row softmax;
  if constexpr (kFew) {
    softmax = image.template row_of_raw<kGroup>(raw, [&](int i) { return sample_of(i) < K; });
  } else {
    for (int r = threadIdx.x; r < K / kRun; r += blockDim.x) table[r] = runs.at(r);
    __syncthreads();  // The table is complete.
    softmax = image.row_of_lanes(exists, row * K, K, lane, kGroup);
    if (Source::kNeedsLevel) fetch(0);
  }

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
      const int points = Source::kNeedsLevel ? points_of(first_of_pair, level) : 0;
      const Sample<float> sample = make_sample<float>(image, raw[i], softmax, level, points, exists && k < K);
      if (kGroup <= kChunk || lane < kChunk) my_samples[sample_of(i)] = sample;
    }
    __syncwarp();  // These samples are complete.

    const int count = kFew ? K / kRun : min(kChunk, K - k0) / kRun;
    int run = threadIdx.x / 128 % 2 * (count / 2);
    uint32_t right, below;  // from a texel of this run to its neighbours, in bytes
    const auto enter_run = [&] {
      Level level;
      if constexpr (kFew) {
        level = runs.level[run];
      } else {
        level = table[k0 / kRun + run];
      }
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
    if (kFew || k0 >= K) break;
    fetch(k0);
    __syncwarp();  // The threads have read the samples.
  }
  // The threads that own the same channels add their sums up, and the first of them writes the row.
  sum_lanes(sum, LANES, kGroup);
  if (split == 0 && c < C && exists) {
    store_pack<T, VEC>(output + (static_cast<uint64_t>(b) * sizes.image_rows + row) * C + c, sum);
  }
}

// Returns whether the runs are given to the kernel as FewRuns. Only rows of the usual channels have kernels for them.
template <typename Form>
bool has_few_runs(const ForwardCall<Form>& call) {
  const RowSplit row = call.row();
  return call.levels.by_value() && call.problem.K == kChunk && row.vec * row.lanes == kUsualChannels;
}

// Up to kMaxBlocksEach blocks on a multiprocessor, one after the other, are still faster than another path.
constexpr int64_t kMaxBlocksEach = 4;

template <typename Form>
FewBlocks decoder_blocks(const ForwardCall<Form>& call) {
  const int64_t most = call.problem.Q == call.problem.S ? 1 : kMaxBlocksEach;  // An encoder has a kernel of its own.
  for (int64_t blocks_each = 1; blocks_each <= most; ++blocks_each) {
    if (const FewBlocks blocks = few_blocks(call, true, blocks_each); blocks.threads > 0) return blocks;
  }
  return {1, 0};
}

template <typename Form>
int64_t decoder_shared_bytes(const ForwardCall<Form>& call, const FewBlocks& blocks) {
  return kChunkBytes * (blocks.threads / (call.row().lanes * blocks.split)) +
         (has_few_runs(call) ? 0 : static_cast<int64_t>(sizeof(Level)) * (call.problem.K / kRun));
}

// The path `decoder` serves queries so few that about one block a multiprocessor holds them.
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
  call.visit_tuned([&](auto value_tag, auto vec, auto lanes) {
    using T = decltype(value_tag);
    constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
    dispatch_split<kLanes>(blocks.split, [&](auto split) {
      const auto source = call.form.template source<T, float>();
      using Source = std::decay_t<decltype(source)>;
      const auto start = [&](const auto& runs) {
        using Runs = std::decay_t<decltype(runs)>;
        launch({"ms_deform_attn",
                "decoder_kernel",
                call.scope,
                {ceil_div(problem.Q, rows), problem.G, problem.B},
                blocks.threads,
                shared},
               decoder_kernel<T, Source, Runs, kVec, kLanes, decltype(split)::value>,
               static_cast<const T*>(call.value.const_data_ptr()), source,
               static_cast<T*>(call.output.mutable_data_ptr()), sizes, runs);
      };
      if constexpr (kVec * kLanes == kUsualChannels) {
        if (has_few_runs(call)) return start(few_runs(call.levels, problem));
      }
      start(many_runs(call.levels, problem));
    });
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

// The forward of an encoder, whose queries are the texels of the pyramid itself.
//
// Queries are taken in the order of regions (regions.cuh). Those at work at the same time, and those taken next, then
// lie close together in the image, and the first-level cache keeps the parts of the maps that they read. The queries of
// all heads and images, in this order head after head, are divided among the blocks, one for each multiprocessor: a
// block owns a range of them, which may begin in one head and end in another.
//
// LANES threads own a row, the output of one (b, q, g): its channels, VEC of them each. So a warp works on 32 / LANES
// rows at a time, a batch: a few neighbouring queries, each with all heads whose channels lie in one line of 128 bytes.
// Queries are numbered here in the order of regions.
//
//   32 channels in float32, LANES = 8:
//      threads   0-7    8-15   16-23   24-31
//      query     q      q + 1  q + 2   q + 3
//   32 channels in bfloat16, LANES = 4, two heads a line:
//      threads   0-3   4-7   8-11   12-15   16-19   20-23   24-27   28-31
//      query     q     q     q + 1  q + 1   q + 2   q + 2   q + 3   q + 3
//      head      g     g + 1 g      g + 1   g       g + 1   g       g + 1
//
// A warp works out the queries of its batches by itself, 32 at a time, and needs no barrier of the block once the
// tables of levels and regions are complete. It takes the samples of its rows in passes. In a pass each thread fetches
// kEach neighbouring samples of its row by one load; it prepares them one after the other in shared memory, which only
// this warp reads, and after each of them the threads of the row add their channels of these LANES samples.
//
// In float32 the path from the first-level cache to the registers bounds the kernel, in 16 bit the number of
// instructions. Each output is written once. Loops that run once a block are not unrolled, since their instructions
// would have to be fetched from memory while there is no other work.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/warp.cuh"
#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"
#include "cuda/ms_deform_attn/regions.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr size_t kEncoderShared = 96 << 10;  // the most shared memory of a block
constexpr int kEncoderThreads = 640;         // a multiple of four warps: each scheduler has as many
constexpr int kEncoderRegisters = 94;
constexpr int kKnownHeads = 8;  // heads of the models that SAMPLES > 0 serves, see encoder_kernel

// Returns where a warp's samples of one of its rows begin; row 32 / lanes: how many bytes the samples of all rows take.
__host__ __device__ constexpr int row_samples_offset(int lanes, int row) {
  return samples_offset(static_cast<int>(sizeof(Sample<float>)) * lanes, row);
}

// What the host works out for the form of encoder_kernel whose rows have at most kKnownSamples samples: of each run,
// the level. The kernel reads it from its arguments, without a table in shared memory.
constexpr int kKnownSamples = 16;
constexpr int kKnownRuns = kKnownSamples / kRun;

struct KnownLevels {
  Level level[kKnownRuns];     // The level's number stands in `end`.
  int32_t points[kKnownRuns];  // the number of samples that a row has on that level
  uint32_t below[kKnownRuns];  // from a texel of that level to the one below, in bytes; 0 if there is only one row
  Regions regions;             // also for the other form, if the host knows the levels
};

// Returns the entry of `runs` for sample k of a row. It selects, because a kernel argument that each lane reads at an
// address of its own would be read lane after lane.
template <typename V>
__device__ __forceinline__ V of_run(const V (&runs)[kKnownRuns], int k) {
  V found = runs[0];
#pragma unroll
  for (int r = 1; r < kKnownRuns; ++r) {
    if (k >= r * kRun) found = runs[r];
  }
  return found;
}

inline KnownLevels known_levels(const Levels& levels, const MsDeformAttnProblem& problem, uint32_t texel_bytes) {
  KnownLevels known{};
  known.regions = known_regions(levels, static_cast<int>(problem.L));
  if (!levels.by_value() || problem.K > kKnownSamples) return known;
  int run = 0;
  for (int l = 0; l < problem.L; ++l) {
    for (int i = 0; i < points_on(levels, l) / kRun; ++i, ++run) {
      known.level[run] = {levels.start[l], levels.H[l], levels.W[l], l}, known.points[run] = points_on(levels, l);
      known.below[run] = levels.H[l] > 1 ? levels.W[l] * texel_bytes : 0;
    }
  }
  return known;
}

// Each level has a multiple of four samples of a row, so that each run of four lies on one level. There are two forms:
//   SAMPLES > 0  for what nearly every published model has: 8 heads of 32 channels, SAMPLES <= 16 samples of a row, and
//                contiguous levels of two or more columns that the host knows. A row is one pass; the levels of its
//                runs are kernel arguments, and the step to the right texel is a constant of the loads.
//   SAMPLES = 0  for all others: passes of LANES samples, with the levels of their runs in shared memory.
template <typename T, typename Source, int VEC, int LANES, int SAMPLES>
__global__ void __maxnreg__(kEncoderRegisters)
    encoder_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                   const ForwardSizes sizes, uint32_t queries_of_block, const __grid_constant__ KnownLevels known) {
  constexpr bool kKnown = SAMPLES > 0;
  constexpr int kEach = kKnown ? kKnownSamples / LANES : 1, kPass = LANES * kEach, kWarps = kEncoderThreads / 32;
  constexpr int kWarpBytes = row_samples_offset(LANES, 32 / LANES);
  constexpr int kRowBits = LANES == 4 ? 3 : LANES == 8 ? 2 : 1;  // log2 of the rows of a batch
  constexpr bool kPrefetch = kKnown || !Source::kNeedsLevel;     // The samples of the next pass or batch load early.
  constexpr bool kFull = kKnown && SAMPLES % kPass == 0;         // In every pass, each thread has samples.
  constexpr uint32_t kColumnBytes = kKnownHeads * kUsualChannels * sizeof(T);  // if kKnown, from a texel to the next
  constexpr uint32_t kNone = 0xffffffffu;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = kKnown ? SAMPLES : sizes.K, G = sizes.G, C = sizes.C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t texel_bytes = kKnown ? kColumnBytes : sizes.texel_bytes;
  auto* table = reinterpret_cast<Level*>(shared + kWarpBytes * kWarps);  // [L], unless kKnown
  auto* level_of = table + L;                                            // [K / kRun], with the level's number in `end`
  auto* steps = reinterpret_cast<Steps*>(level_of + K / kRun);           // [K / kRun], in bytes
  const auto level_at = [&](int l) { return kKnown ? Level{levels.start[l], levels.H[l], levels.W[l], 0} : table[l]; };
  bool in_regions = false;  // The queries are taken in the order of regions; else, in their own.
  Regions found;
  if constexpr (!kKnown) {
    in_regions = load_levels(levels, L, sizes.S, table);
#pragma unroll 1
    for (int i = threadIdx.x; i < K / kRun; i += kEncoderThreads) {
      int l = 0;
#pragma unroll 1
      while (i * kRun >= table[l].end) ++l;
      const Steps texels = Steps::of(table[l]);
      level_of[i] = {table[l].start, table[l].H, table[l].W, l};
      steps[i] = {texels.column * texel_bytes, texels.row * texel_bytes};
    }
    found = levels.by_value() ? known.regions : Regions::of(L, level_at);
    in_regions = in_regions && found.fit;
  }
  // The barriers of its constructor also complete level_of and steps.
  const RegionTable regions(kKnown ? known.regions : found, L, level_at,
                            kKnown ? reinterpret_cast<char*>(table) : reinterpret_cast<char*>(steps + K / kRun));

  // A task is the queries of one image and of those heads whose channels lie in one line.
  const uint32_t Q = sizes.Q, total = sizes.heads * Q, begin = blockIdx.x * queries_of_block;
  uint32_t task = begin / Q, first = begin - task * Q;
  uint32_t remaining = begin < total ? min(total - begin, queries_of_block) : 0;
  // If kKnown, a row is 128 bytes in float32, and 64 in 16 bit.
  const int head_bits = kKnown ? (sizeof(T) == 2 ? 1 : 0) : sizes.head_bits;
  const int row = lane / LANES, channel_lane = lane % LANES, head_of_row = row & ((1 << head_bits) - 1);
  const int query_of_row = row >> head_bits, query_bits = kRowBits - head_bits;  // A batch has 2^query_bits queries.
  char* const my_memory = shared + warp * kWarpBytes;
  auto* samples = reinterpret_cast<Sample<float>*>(my_memory + row_samples_offset(LANES, row));

  // The level of the samples that this thread prepares, and how many samples of a row are on it. If kKnown, every pass
  // has the same.
  Level level;
  int points = 0;
  const auto take_level = [&](int k) {
    if constexpr (kKnown) {
      level = of_run(known.level, k), points = of_run(known.points, k);
    } else {
      level = level_of[min(k, K - 1) / kRun];
      if constexpr (Source::kNeedsLevel) {
        points = table[level.end].end - (level.end > 0 ? table[level.end - 1].end : 0);
      }
    }
  };
  const auto steps_of = [&](int k) -> Steps {  // from a texel of sample k to its neighbours, in bytes
    if constexpr (kKnown) {
      return {kColumnBytes, known.below[k / kRun]};
    } else {
      return steps[k / kRun];
    }
  };
  if (kKnown) take_level(channel_lane * kEach);
#pragma unroll 1
  while (remaining > 0) {  // for each task, as far as it is this block's
    const uint32_t count = min(remaining, Q - first);
    const uint32_t tasks_of_image = static_cast<uint32_t>(kKnown ? kKnownHeads : G) >> head_bits;
    const uint32_t b = task / tasks_of_image;
    const int g = ((task - b * tasks_of_image) << head_bits) + head_of_row;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, (image_rows + g) * K);  // from head g on
    const int c = channel_lane * VEC;
    // Lanes past the last channel read the first channels.
    const char* base =
        reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));

    // The queries of this batch of the warp and of those after it, 32 in all: each lane holds one.
    uint32_t found_query = kNone;
    const auto find_queries = [&](uint32_t batch) {
      const uint32_t rank = ((batch + (lane >> query_bits) * kWarps) << query_bits) + (lane & ((1 << query_bits) - 1));
      found_query = rank >= count ? kNone : kKnown || in_regions ? regions.query_at(first + rank) : first + rank;
    };
    const auto query_of = [&](uint32_t batch) {  // the query of this thread's row
      return __shfl_sync(kAllLanes, found_query, ((batch / kWarps << query_bits) + query_of_row) % 32);
    };
    typename Source::Raw raw[kEach];
    const auto fetch = [&](uint32_t query, int k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) raw[i] = {};
      if (query == kNone || (!kFull && k >= K)) return;
      const int l = !Source::kNeedsLevel ? 0 : kKnown ? level.end : level_of[k / kRun].end;
      const uint32_t query_level = query * L + l;
      image.template fetch_run<true>(query * (G * K) + k, query_level, raw);
    };
    const uint32_t batches = (count + (1u << query_bits) - 1) >> query_bits;
    uint32_t query = kNone;
#pragma unroll 1
    for (uint32_t next = warp; next < batches + kWarps; next += kWarps) {  // `next` is the batch after the current one.
      if ((next / kWarps << query_bits) % 32 == 0) find_queries(next);
      const uint32_t next_query = query_of(next);
      if (next < kWarps) {  // There is no batch before the first.
        query = next_query;
        if (kPrefetch) fetch(query, channel_lane * kEach);
        continue;
      }
      typename Source::Row softmax;
      if constexpr (kKnown) {
        softmax = image.template row_of_raw<LANES>(raw, [&](int) { return kFull || channel_lane * kEach < K; });
      } else {
        softmax = image.row_of_lanes(query != kNone, query * (G * K), K, channel_lane, LANES);
      }
      float sum[VEC] = {};
#pragma unroll 1
      for (int k0 = 0; k0 < K; k0 += kPass) {
        const int k = k0 + channel_lane * kEach;
        if (!kPrefetch) fetch(query, k);
        if (!kKnown) take_level(k);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {  // the first sample of each thread, then the second ones
          Sample<float> prepared = make_sample<float>(image, raw[j], softmax, level, points, kFull || k < K);
          prepared.texel *= texel_bytes;
          __syncwarp();  // The threads have read the previous samples.
          samples[channel_lane] = prepared;
          __syncwarp();  // These samples are complete.
          if (kPrefetch && j == kEach - 1) {
            const bool is_last = k0 + kPass >= K;
            fetch(is_last ? next_query : query, is_last ? channel_lane * kEach : k + kPass);
          }
          constexpr int kOfRun = kRun / kEach;  // of these LANES samples, those of one run
#pragma unroll
          for (int i = 0; i < LANES; i += kOfRun) {
            if (!kFull && k0 + i * kEach >= K) break;
            const Steps step = steps_of(k0 + i * kEach);
            const char* right = base + step.column;
#pragma unroll
            for (int s = i; s < i + kOfRun; ++s) {
              const Sample<float> at = samples[s];
              const char *upper = base + at.texel, *upper_right = right + at.texel;
              const char* const corner[4] = {upper, upper_right, upper + step.row, upper_right + step.row};
              add_sample<T>(at, corner, sum);
            }
          }
        }
      }
      if (query != kNone && c < C) {
        store_pack<T, VEC>(output + (image_rows + static_cast<int64_t>(query) * G + g) * C + c, sum);
      }
      query = next_query;
    }
    remaining -= count, ++task, first = 0;
  }
}

struct EncoderPlan {
  int64_t queries_of_block, blocks, shared;  // Queries are counted once for each task.
  ForwardSizes sizes;
  bool is_known;  // The kernel has a form for the call's number of samples.
};

template <typename Form>
EncoderPlan encoder_plan(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const RowSplit row = call.row();
  EncoderPlan plan{};
  int row_bits = 0;  // log2 of the rows of a batch
  while (row.lanes << (row_bits + 1) <= 32) ++row_bits;
  plan.sizes = forward_sizes(call, heads_of_line_bits(call, row_bits));
  const int64_t total = int64_t{plan.sizes.heads} * problem.Q;
  plan.queries_of_block = std::max<int64_t>(1, ceil_div(total, call.scope.device().multiprocessors));
  plan.blocks = ceil_div(total, plan.queries_of_block);
  plan.is_known = (problem.K == 16 || problem.K == 12) && problem.C == kUsualChannels && problem.G == kKnownHeads &&
                  levels_have_two_columns(call.levels, problem) && call.levels.contiguous;
  const int64_t warps = kEncoderThreads / 32, runs = problem.K / kRun;
  const int lanes = static_cast<int>(row.lanes);
  plan.shared = row_samples_offset(lanes, 32 / lanes) * warps + static_cast<int64_t>(sizeof(Level)) * problem.L +
                static_cast<int64_t>(sizeof(Level) + sizeof(Steps)) * runs +
                static_cast<int64_t>(region_bytes(problem.L, known_regions(call.levels, static_cast<int>(problem.L))));
  return plan;
}

// 16-bit rows (b, q, g) of one level below which the kernel, whose blocks prepare a level table and regions first,
// takes longer than `rows`: 9.98 instead of 7.73 µs for 53 600 rows, 71 instead of 81 µs for 640 000 (H200).
constexpr int64_t kLeastRowsOf16Bit = 65536;

// The path `encoder` serves self-attention of a pyramid's texels.
template <typename Form>
const char* encoder_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (problem.Q != problem.S) return "the queries are not the texels of the pyramid (Q is not S)";
  if (problem.K == 0) return "there are no samples";
  if (const char* reason = call.declines_row()) return reason;
  if (is_16_bit(call.value) && problem.L == 1 && problem.B * problem.Q * problem.G < kLeastRowsOf16Bit) {
    return "the values have 16 bits, and there are few rows on one level";
  }
  if (!points_divide(call.levels, problem, kRun)) return "the samples of a row on each level are no multiple of 4";
  if (problem.S * call.texel_bytes() > int64_t{UINT32_MAX}) return "an image of value has 4 GiB or more";
  const EncoderPlan plan = encoder_plan(call);
  if (plan.blocks * plan.queries_of_block > int64_t{UINT32_MAX}) return "there are 2^32 rows or more";
  if (plan.shared > std::min<int64_t>(kEncoderShared, call.scope.device().shared_block)) {
    return "a block has too little shared memory for the level table";
  }
  return nullptr;
}

template <typename Form>
void encoder_launch(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const EncoderPlan plan = encoder_plan(call);
  const KnownLevels known = known_levels(call.levels, problem, static_cast<uint32_t>(call.texel_bytes()));
  call.visit_tuned([&]<typename T>(T, auto vec, auto lanes) {
    constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
    const auto source = call.form.template source<T, float>();
    using Source = std::decay_t<decltype(source)>;
    const auto start = [&](auto kernel) {
      launch({"ms_deform_attn", "encoder_kernel", call.scope, plan.blocks, kEncoderThreads, plan.shared}, kernel,
             data_of(call.value), call.levels, source, data_of(call.output), plan.sizes,
             static_cast<uint32_t>(plan.queries_of_block), known);
    };
    if constexpr (kVec * kLanes == kUsualChannels) {
      if (plan.is_known && problem.K == 16) return start(encoder_kernel<T, Source, kVec, kLanes, 16>);
      if (plan.is_known) return start(encoder_kernel<T, Source, kVec, kLanes, 12>);
    }
    start(encoder_kernel<T, Source, kVec, kLanes, 0>);
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

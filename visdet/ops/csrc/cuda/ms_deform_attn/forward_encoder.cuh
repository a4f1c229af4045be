// The forward of an encoder, whose queries are the texels of the pyramid itself.
//
// Queries are taken in the order of regions (regions.cuh), so that those at work at the same time lie close together in
// the image, and those that follow lie beside them: the first-level cache keeps the parts of the maps that they read.
// The queries of all heads and images, in this order head after head, are divided among the blocks, one for each
// multiprocessor: a block owns a run of them, which may begin in one head and end in another.
//
// LANES threads own a row, the output of one (b, q, g): its channels, VEC of them each. So a warp works on 32 / LANES
// rows at a time, a batch: a few neighbouring queries, each with all heads whose channels lie in one line of 128 bytes.
//
//   a warp with LANES = 8 (32 channels in float32):
//      threads  0-7        8-15       16-23      24-31
//      row      query q    q + 1      q + 2      q + 3      in the order of regions
//   LANES = 4 (32 channels in 16 bit), where two heads share a line:
//      threads  0-3    4-7    8-11   12-15  16-19  20-23  24-27  28-31
//      row      q, g   q, g+1 q+1, g q+1,   ...                  q+3, g+1
//                                    g+1
//
// A warp works out the queries of its batches by itself, 32 at a time, and needs no barrier of the block after the
// tables of levels and regions are complete. It takes the samples of its rows in passes. In a pass each thread fetches
// kEach neighbouring samples of its row by one load; it prepares them one after the other in shared memory, which only
// this warp reads, and after each the threads of the row add their channels of these LANES samples.
//
// In float32 the path from the first-level cache to the registers bounds the kernel, in 16 bit the number of
// instructions. Each output is written once. Loops that run once a block are not unrolled, since their instructions
// would have to be fetched from memory while there is no other work.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_runs.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"
#include "cuda/ms_deform_attn/regions.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr size_t kEncoderShared = 96 << 10;  // the most shared memory of a block
constexpr int kEncoderThreads = 640;         // a multiple of four warps: each scheduler has as many
constexpr int kEncoderRegisters = 94;

template <typename A, int LANES, bool WHOLE>
struct EncoderPasses {
  static constexpr int kEach = WHOLE && sizeof(A) == 4 ? greatest(1, 16 / LANES) : 1;
  static constexpr int kRows = 32 / LANES, kRowBits = LANES == 4 ? 3 : LANES == 8 ? 2 : LANES == 16 ? 1 : 0;
  static constexpr int kPass = LANES * kEach;
  __host__ __device__ static constexpr int row_offset(int row) {
    return samples_offset(sizeof(Sample<A>) * LANES, row);
  }
  static constexpr int kWarpBytes = row_offset(kRows);
};

// What the host works out of levels that it knows. `runs` and `below` are of rows of at most kChunk samples.
struct KnownLevels {
  FewRuns runs;
  uint32_t below[kChunk / kRun];  // from a texel of a run's level to the one below, in bytes; 0 if there is one row
  Regions regions;
};

inline KnownLevels known_levels(const Levels& levels, const MsDeformAttnProblem& problem, uint32_t texel_bytes) {
  KnownLevels known{few_runs(levels, problem), {}, known_regions(levels, static_cast<int>(problem.L))};
  for (int r = 0; r < kChunk / kRun; ++r) {
    const Level& level = known.runs.level[r];
    known.below[r] = level.H > 1 ? level.W * texel_bytes : 0;
  }
  return known;
}

// WHOLE: the samples of a row are a multiple of kPass, and those of a level of four. MIXED: those of a level are no
// multiple of four. COLUMN: for 8 heads of 32 channels whose levels the host knows, are contiguous, and have two
// columns or more: the bytes from a texel to its right neighbour, which loads then add as a constant; else 0. SAMPLES:
// then the samples of a row, which are one pass that need not be full; else 0.
template <typename T, typename A, typename Source, int VEC, int LANES, bool WHOLE, bool MIXED, uint32_t COLUMN = 0,
          int SAMPLES = 0>
__global__ void __maxnreg__(kEncoderRegisters)
    encoder_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                   const ForwardSizes sizes, uint32_t queries_of_block, const __grid_constant__ KnownLevels known) {
  using P = EncoderPasses<A, LANES, WHOLE>;
  constexpr int kEach = P::kEach, kPass = P::kPass, kWarps = kEncoderThreads / 32;
  constexpr int kSame = MIXED ? 1 : 4;                       // neighbouring samples that lie on one level
  constexpr int kRuns = WHOLE ? kPass / kSame : 1;           // of a pass
  constexpr bool kPrefetch = WHOLE || !Source::kNeedsLevel;  // The samples of the next pass or batch load early.
  constexpr bool kFull = WHOLE && SAMPLES % kPass == 0;      // In every pass, each thread has samples.
  constexpr uint32_t kNone = 0xffffffffu;
  constexpr bool kKnown = COLUMN > 0;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = SAMPLES > 0 ? SAMPLES : sizes.K, G = sizes.G, C = sizes.C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t texel_bytes = kKnown ? COLUMN : sizes.texel_bytes;
  auto* table = reinterpret_cast<Level*>(shared + P::kWarpBytes * kWarps);  // [L], unless kKnown
  auto* level_of = table + L;                                    // [K / kSame], with the level's number in `end`
  auto* steps = reinterpret_cast<Steps*>(level_of + K / kSame);  // [K / kSame], in bytes
  const auto level_at = [&](int l) { return kKnown ? Level{levels.start[l], levels.H[l], levels.W[l], 0} : table[l]; };
  bool in_regions = false;  // The queries are taken in the order of regions; else, in their own.
  Regions found;
  if constexpr (!kKnown) {
    in_regions = load_levels(levels, L, sizes.S, table);
#pragma unroll 1
    for (int i = threadIdx.x; i < K / kSame; i += kEncoderThreads) {
      int l = 0;
#pragma unroll 1
      while (i * kSame >= table[l].end) ++l;
      const Steps texels = Steps::of(table[l]);
      level_of[i] = {table[l].start, table[l].H, table[l].W, l};
      steps[i] = {texels.column * texel_bytes, texels.row * texel_bytes};
    }
    found = levels.by_value() ? known.regions : Regions::of(L, level_at);
    in_regions = in_regions && found.fit;
  }
  // Its barriers also complete level_of and steps.
  const RegionTable regions(kKnown ? known.regions : found, L, level_at,
                            kKnown ? reinterpret_cast<char*>(table) : reinterpret_cast<char*>(steps + K / kSame));

  // A task is the queries of the heads of one line of one image, or with more than one slice, of some of their
  // channels.
  const uint32_t Q = sizes.Q, total = sizes.heads * sizes.slices * Q, begin = blockIdx.x * queries_of_block;
  uint32_t task = begin / Q, first = begin - task * Q;
  uint32_t remaining = begin < total ? min(total - begin, queries_of_block) : 0;
  // If kKnown, a row is 128 bytes in float32, and 64 in 16 bit.
  const int head_bits = kKnown ? (sizeof(T) == 2 ? 1 : 0) : sizes.head_bits;
  const int row = lane / LANES, channel_lane = lane % LANES, head_of_row = row & ((1 << head_bits) - 1);
  const int query_of_row = row >> head_bits, query_bits = P::kRowBits - head_bits;  // A batch has 2^query_bits queries.
  char* const my_memory = shared + warp * P::kWarpBytes;
  auto* samples = reinterpret_cast<Sample<A>*>(my_memory + P::row_offset(row));

  // What a pass needs of the levels: that of this thread's samples, and the steps on those of every run. Rows of one
  // pass need them only once.
  Level level;
  int points = 0;
  Steps run_steps[kRuns];
  const auto take_level = [&](int k) {
    if constexpr (kKnown) {
      level = of_run(known.runs.level, k), points = of_run(known.runs.points, k);
    } else {
      level = level_of[min(k, K - 1) / kSame];
      if constexpr (Source::kNeedsLevel) {
        points = table[level.end].end - (level.end > 0 ? table[level.end - 1].end : 0);
      }
    }
  };
  const auto take_runs = [&](int k0) {
    take_level(k0 + channel_lane * kEach);
#pragma unroll
    for (int r = 0; !kKnown && r < kRuns; ++r) run_steps[r] = steps[k0 / kSame + r];
  };
  const auto steps_of = [&](int k0, int i) -> Steps {  // of the pass's i-th sample
    if constexpr (kKnown) {
      return {COLUMN, known.below[i / kSame]};
    } else {
      return WHOLE ? run_steps[i / kSame] : steps[(k0 + i) / kSame];
    }
  };
  if (WHOLE) take_runs(0);
#pragma unroll 1
  while (remaining > 0) {  // for each task, as far as it is this block's
    const uint32_t count = min(remaining, Q - first);
    const uint32_t head_block = kKnown ? task : task / sizes.slices;
    const uint32_t head_blocks = static_cast<uint32_t>(kKnown ? 8 : G) >> head_bits, b = head_block / head_blocks;
    const int g = ((head_block - b * head_blocks) << head_bits) + head_of_row;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, (image_rows + g) * K);  // from head g on
    const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
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
      return __shfl_sync(0xffffffffu, found_query, ((batch / kWarps << query_bits) + query_of_row) % 32);
    };
    typename Source::Raw raw[kEach];
    const auto fetch = [&](uint32_t query, int k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) raw[i] = {};
      if (query == kNone || (!kFull && k >= K)) return;
      const int l = !Source::kNeedsLevel ? 0 : kKnown ? level.end : level_of[k / kSame].end;
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
      if (SAMPLES > 0 || (WHOLE && K == kPass)) {
        softmax = image.template row_of_raw<LANES>(raw, [&](int) { return kFull || channel_lane * kEach < K; });
      } else {
        softmax = image.row_of_lanes(query != kNone, query * (G * K), K, channel_lane, LANES);
      }
      A sum[VEC] = {};
#pragma unroll 1
      for (int k0 = 0; k0 < K; k0 += kPass) {
        const int k = k0 + channel_lane * kEach;
        if (!kPrefetch) fetch(query, k);
        if (!WHOLE) {
          take_level(k);
        } else if (K > kPass) {
          take_runs(k0);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {  // the first sample of each thread, then the second ones
          Sample<A> prepared = make_sample<A>(image, raw[j], softmax, level, points, kFull || k < K);
          prepared.texel *= texel_bytes;
          __syncwarp();  // The threads have read the previous samples.
          samples[channel_lane] = prepared;
          __syncwarp();  // These samples are complete.
          if (kPrefetch && j == kEach - 1) {
            const bool is_last = k0 + kPass >= K;
            fetch(is_last ? next_query : query, is_last ? channel_lane * kEach : k + kPass);
          }
          constexpr int kOfRun = greatest(1, kSame / kEach);  // of these LANES samples, how many are of one run
#pragma unroll
          for (int i = 0; i < LANES; i += kOfRun) {
            if (!kFull && k0 + i * kEach >= K) break;
            const Steps step = steps_of(k0, i * kEach);
            const char* right = base + step.column;
#pragma unroll
            for (int s = i; s < i + kOfRun; ++s) {
              const Sample<A> at = samples[s];
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
  bool by_four, whole;  // Each level has a multiple of four samples of a row; the samples of a row fill passes.
  uint32_t column;      // of encoder_kernel
};

template <typename Form>
EncoderPlan encoder_plan(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const RowSplit row = call.row();
  EncoderPlan plan{};
  int row_bits = 0;  // log2 of the rows of a batch
  while (row.lanes << (row_bits + 1) <= 32) ++row_bits;
  plan.sizes = forward_sizes(call, heads_of_line_bits(call, row_bits));
  const int64_t total = int64_t{plan.sizes.heads} * plan.sizes.slices * problem.Q;
  plan.queries_of_block = std::max<int64_t>(1, ceil_div(total, call.scope.device().multiprocessors));
  plan.blocks = ceil_div(total, plan.queries_of_block);
  plan.by_four = points_divide(call.levels, problem, 4);
  plan.whole = plan.by_four && problem.K % (row.lanes * std::max<int64_t>(1, 16 / row.lanes)) == 0;
  // 16 or 12 samples of 8 heads of 32 channels are the sizes of nearly every published model.
  const bool usual = (problem.K == 16 || problem.K == 12) && problem.C == 32 && problem.G == 8 && problem.L <= 4 &&
                     row.vec * row.lanes == 32 && levels_have_two_columns(call.levels, problem) &&
                     call.levels.contiguous;
  if (plan.by_four && usual) plan.whole = true, plan.column = static_cast<uint32_t>(256 * call.element());
  const int64_t warps = kEncoderThreads / 32, steps = plan.by_four ? problem.K / 4 : problem.K;
  const int lanes = static_cast<int>(row.lanes);
  const int64_t warp_bytes = samples_offset(sizeof(Sample<float>) * lanes, 32 / lanes);  // EncoderPasses::kWarpBytes
  plan.shared = warp_bytes * warps + static_cast<int64_t>(sizeof(Level)) * problem.L +
                static_cast<int64_t>(sizeof(Level) + sizeof(Steps)) * steps +
                static_cast<int64_t>(region_bytes(problem.L, known_regions(call.levels, static_cast<int>(problem.L))));
  return plan;
}

template <typename Form>
const char* encoder_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (problem.Q != problem.S) return "the queries are not the texels of the pyramid (Q is not S)";
  if (problem.K == 0) return "there are no samples";
  if (call.is_double()) return "the values are float64";
  if (call.row().vec == 1) return "rows of value cannot be read 16 bytes at a time";
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
  KnownLevels known{{}, {}, known_regions(call.levels, static_cast<int>(problem.L))};
  if (plan.column > 0) known = known_levels(call.levels, problem, plan.column);
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
    if constexpr (kVec > 1 && sizeof(A) == 4) {
      const auto source = call.form.template source<T, A>();
      using Source = std::decay_t<decltype(source)>;
      const auto start = [&](auto kernel) {
        launch({"ms_deform_attn", "encoder_kernel", call.scope, plan.blocks, kEncoderThreads, plan.shared}, kernel,
               static_cast<const T*>(call.value.const_data_ptr()), call.levels, source,
               static_cast<T*>(call.output.mutable_data_ptr()), plan.sizes,
               static_cast<uint32_t>(plan.queries_of_block), known);
      };
      if constexpr (kVec * kLanes == 32) {
        constexpr uint32_t kColumn = 256 * sizeof(T);
        if (plan.column > 0 && problem.K == 16) {
          return start(encoder_kernel<T, A, Source, kVec, kLanes, true, false, kColumn, 16>);
        }
        if (plan.column > 0) return start(encoder_kernel<T, A, Source, kVec, kLanes, true, false, kColumn, 12>);
      }
      if (!plan.by_four) return start(encoder_kernel<T, A, Source, kVec, kLanes, false, true>);
      if (!plan.whole) return start(encoder_kernel<T, A, Source, kVec, kLanes, false, false>);
      start(encoder_kernel<T, A, Source, kVec, kLanes, true, false>);
    }
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

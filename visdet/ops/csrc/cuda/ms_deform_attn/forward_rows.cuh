// The forward kernel that serves every call, and the three paths that start it: `rows` for any sizes, `few_rows` for
// decoders, `half_lines` for many images of one head.
//
// A row is the output of one (b, q, g): C channels. A group of LANES * SPLIT neighbouring threads owns ROWS rows. In
// the group, LANES threads own a row's channels, VEC of them each (16 bytes of value), and SPLIT such sets of lanes
// divide the row's samples among them; at the end their sums are added up.
//
//   a group of LANES = 4, SPLIT = 2, C = 16 float32:
//      thread      0     1     2     3   |   4     5     6     7
//      channels   0-3   4-7   8-11 12-15 |  0-3   4-7   8-11 12-15
//      samples      0, 2, 4, ...         |    1, 3, 5, ...
//
// The group takes the samples of its rows in passes. First each thread prepares one sample, which it has fetched during
// the pass before, in shared memory (forward_sample.cuh); only threads of the same warp read it, so a barrier of the
// warp is enough. Then every thread adds its channels of the prepared samples, with loads that depend on no branch.
//
// A block owns neighbouring queries of one head, or of the few heads whose channels lie in one line of 128 bytes: their
// samples lie close together, so that the first-level cache serves most loads. Each output is written once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/warp.cuh"
#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

constexpr int kForwardThreads = 1024;  // the most threads of a block

// How a group of LANES * SPLIT threads takes the samples of its ROWS rows: kPass samples of kRowsAtOnce rows in a pass.
template <int LANES, int SPLIT, int ROWS>
struct Passes {
  static constexpr int kGroup = LANES * SPLIT;
  static constexpr int kRowsAtOnce = least(ROWS, greatest(1, kGroup / 4));
  static constexpr int kPass = greatest(4, kGroup / kRowsAtOnce);
  static constexpr int kBatch = kRowsAtOnce * kPass;  // the prepared samples in shared memory
  static constexpr bool kMixed = kPass > 4;  // A pass may hold samples of several levels; one of four does not.
  static_assert(kBatch == kGroup, "each thread prepares one sample");
  template <typename A>
  __host__ __device__ static constexpr int group_offset(int group) {
    return samples_offset((sizeof(Sample<A>) + (kMixed ? sizeof(Steps) : 0)) * kBatch, group);
  }
};

// For texels of 64 bytes, two of which lie in a line of the first-level cache. The left halves of all lines use the
// same banks, and so do the right halves: two groups that read a texel each at the same time are served one after the
// other if both texels are left halves, or both right halves. Of each pair of neighbouring texels, groups of even
// number therefore read the left half of a line first, and groups of odd number the right half.
//
// Of the sample returned, `texel` is the texel of the pair that is read first, in bytes, and |fx| is the fraction of
// the pair's weight that the other one has. fx is negative, or -0, if that other texel is the one to the left. `base`
// is an address in the first texel of the image.
template <typename A>
__device__ __forceinline__ Sample<A> order_half_lines(Sample<A> sample, const char* base, uint32_t group,
                                                      uint32_t texel_bytes) {
  const uint32_t half = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base)) / texel_bytes + sample.texel;
  if ((half ^ group) & 1) sample.texel += 1, sample.fx = -(A(1) - sample.fx);
  sample.texel *= texel_bytes;
  return sample;
}
template <typename T, int VEC>
__device__ __forceinline__ void add_half_lines(const Sample<float>& sample, const char* base, uint32_t row_bytes,
                                               uint32_t texel_bytes, float (&sum)[VEC]) {
  const bool right_first = __float_as_int(sample.fx) < 0;
  const int64_t second = right_first ? -static_cast<int64_t>(texel_bytes) : static_cast<int64_t>(texel_bytes);
  const char *upper = base + sample.texel, *lower = upper + row_bytes;
  const char* const corner[4] = {upper, upper + second, lower, lower + second};
  const float top_second = sample.top * fabsf(sample.fx), bottom_second = sample.bottom * fabsf(sample.fx);
  const float weights[4] = {sample.top - top_second, top_second, sample.bottom - bottom_second, bottom_second};
#pragma unroll
  for (int j = 0; j < 4; ++j) add_texel<T>(corner[j], weights[j], sum);
}

// HALF_LINES: value has one head and 64 bytes a texel, and every level has two columns or more.
template <typename T, typename A, typename Source, int VEC, int LANES, int SPLIT, int ROWS, bool HALF_LINES = false>
__global__ void __maxnreg__(kForwardRegisters)
    rows_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                const ForwardSizes sizes) {
  using P = Passes<LANES, SPLIT, ROWS>;
  constexpr bool kMixed = P::kMixed;
  extern __shared__ __align__(16) char shared[];
  const uint32_t task = blockIdx.y + blockIdx.z * 65535u, head_block = task / sizes.slices;
  if (head_block >= sizes.heads) return;
  const int groups = blockDim.x / P::kGroup, group = threadIdx.x / P::kGroup, lane = threadIdx.x % P::kGroup;
  auto* my_samples = reinterpret_cast<Sample<A>*>(shared + P::template group_offset<A>(group));
  auto* my_steps = reinterpret_cast<Steps*>(my_samples + P::kBatch);                     // of each sample, if kMixed
  auto* table = reinterpret_cast<Level*>(shared + P::template group_offset<A>(groups));  // [L]
  const int L = sizes.L, K = sizes.K, G = HALF_LINES ? 1 : sizes.G, C = HALF_LINES ? LANES * VEC : sizes.C;
  load_levels(levels, L, sizes.S, table);

  // Neighbouring groups of the block work on different heads of the same line, then on different queries.
  const uint32_t head_blocks = static_cast<uint32_t>(G) >> sizes.head_bits, b = head_block / head_blocks;
  const int g = ((head_block - b * head_blocks) << sizes.head_bits) + (group & ((1 << sizes.head_bits) - 1));
  const int group_of_head = group >> sizes.head_bits, groups_of_head = groups >> sizes.head_bits;
  const int64_t image_rows = static_cast<int64_t>(b) * sizes.Q * G;
  const Source image = source.of_image(static_cast<int64_t>(b) * sizes.Q * L, image_rows * K);

  // In step t of a pass this thread prepares samples of one row, number row_index[t] of the image.
  constexpr int kRowSteps = ROWS / P::kRowsAtOnce;
  constexpr uint32_t kNone = 0xffffffffu;
  uint32_t row_index[kRowSteps], query_levels[kRowSteps];
  typename Source::Row row[kRowSteps];
#pragma unroll
  for (int t = 0; t < kRowSteps; ++t) {
    const int r = t * P::kRowsAtOnce + lane / P::kPass;
    const int64_t e = (static_cast<int64_t>(blockIdx.x) * ROWS + r) * groups_of_head + group_of_head;
    const uint32_t query = static_cast<uint32_t>(e);
    row_index[t] = e < sizes.Q ? query * G + g : kNone;
    query_levels[t] = query * L;
    row[t] = image.row_of_lanes(e < sizes.Q, row_index[t] * K, K, lane % P::kPass, P::kPass);
  }

  const int channel_lane = lane % LANES, split = lane / LANES;
  const uint32_t texel_bytes = HALF_LINES ? LANES * VEC * sizeof(T) : sizes.texel_bytes;
  const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
  // Lanes past the last channel read the first channels, because a branch would separate the loads of this pass from
  // the preparation of the next one.
  const char* base =
      reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));
  A sum[ROWS][VEC] = {};
  typename Source::Raw raw;
  int fetch_level = 0;
  const auto fetch = [&](int step, int k) {
    raw = {};
    if (row_index[step] == kNone || k >= K) return;
    if constexpr (Source::kNeedsLevel) {
      while (k >= table[fetch_level].end) ++fetch_level;
    }
    const uint32_t index = row_index[step] * K + k;
    raw = image.fetch_position(index, query_levels[step] + fetch_level);
    image.fetch_weight(index, raw);
  };
  fetch(0, lane % P::kPass);
  int l = 0, stop = 0;
  Level level = L > 0 ? table[0] : Level{};
  const auto find_level = [&](int k) {
    while (k >= level.end) level = table[++l];
  };
  if (!kMixed && K > 0) find_level(0);
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 = stop) {
    const int k = k0 + lane % P::kPass;  // the sample that this thread prepares, of each of its rows
    if (kMixed && k < K) find_level(k);
    stop = min(k0 + P::kPass, kMixed ? K : level.end);
    const Steps level_steps = Steps::of(level);
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
      const Sample<A> sample = make_sample<A>(image, raw, row[step], level, level.end - (l > 0 ? table[l - 1].end : 0),
                                              k < stop && row_index[step] != kNone);
      __syncwarp();  // The threads have read the previous samples.
      my_samples[lane] = HALF_LINES ? order_half_lines(sample, base, group, texel_bytes) : sample;
      if constexpr (kMixed) my_steps[lane] = level_steps;
      __syncwarp();  // These samples are complete.
      const bool is_last = step + 1 == kRowSteps;
      fetch(is_last ? 0 : step + 1, is_last ? stop + lane % P::kPass : k);
      if (!kMixed && is_last && stop < K) find_level(stop);
#pragma unroll
      for (int r = 0; r < P::kRowsAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < P::kPass; i += SPLIT) {
          const Sample<A> at = my_samples[r * P::kPass + i + split];
          const Steps steps = kMixed ? my_steps[r * P::kPass + i + split] : level_steps;
          auto& to = sum[step * P::kRowsAtOnce + r];
          if constexpr (HALF_LINES) {
            add_half_lines<T>(at, base, steps.row * texel_bytes, texel_bytes, to);
          } else {
            const uint64_t column_bytes = steps.column * texel_bytes;
            const uint64_t row_bytes = static_cast<uint64_t>(steps.row) * texel_bytes;
            const char* corner[4];
            corner[0] = base + static_cast<uint64_t>(at.texel) * texel_bytes;
            corner[1] = corner[0] + column_bytes;
            corner[2] = corner[0] + row_bytes;
            corner[3] = corner[1] + row_bytes;
            add_sample<T>(at, corner, to);
          }
        }
      }
    }
  }
  // The threads that own the same channels add their sums up, and the first of them writes the row.
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int from = r % P::kRowsAtOnce * P::kPass % P::kGroup;
    const uint32_t index = __shfl_sync(kAllLanes, row_index[r / P::kRowsAtOnce], from, P::kGroup);
    sum_lanes(sum[r], LANES, P::kGroup);
    if (split == 0 && c < C && index != kNone) store_pack<T, VEC>(output + (image_rows + index) * C + c, sum[r]);
  }
}

// Starts rows_kernel in blocks of `threads` threads. joins_heads: a block works on all heads of a line.
template <int SPLIT, int ROWS, bool HALF_LINES = false, typename Form, typename T, typename A, int VEC, int LANES>
void launch_rows(const ForwardCall<Form>& call, T, A, std::integral_constant<int, VEC>,
                 std::integral_constant<int, LANES>, int64_t threads, bool joins_heads) {
  using P = Passes<LANES, SPLIT, ROWS>;
  const int64_t groups = threads / P::kGroup;
  int most_bits = 0;
  while (joins_heads && int64_t{2} << most_bits <= groups) ++most_bits;
  const ForwardSizes sizes = forward_sizes(call, heads_of_line_bits(call, most_bits));
  const auto source = call.form.template source<T, A>();
  launch({"ms_deform_attn", "rows_kernel", call.scope,
          head_grid(ceil_div(call.problem.Q, (groups >> sizes.head_bits) * ROWS), int64_t{sizes.heads} * sizes.slices),
          threads,
          P::template group_offset<A>(static_cast<int>(groups)) + static_cast<int64_t>(sizeof(Level)) * call.problem.L},
         rows_kernel<T, A, std::decay_t<decltype(source)>, VEC, LANES, SPLIT, ROWS, HALF_LINES>,
         static_cast<const T*>(call.value.const_data_ptr()), call.levels, source,
         static_cast<T*>(call.output.mutable_data_ptr()), sizes);
}

// The path `rows` serves every call. Two rows a group, in passes of four samples of one level, are the fastest, unless
// a level's samples are no multiple of four, so that its last pass would be partly empty. In 16 bit, rows of four lanes
// are faster one a group, since that makes more warps.
template <typename Form>
void rows_launch(const ForwardCall<Form>& call) {
  const bool by_four = points_divide(call.levels, call.problem, 4);
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kSplit2 = least(2, greatest(1, 8 / kLanes));
    constexpr bool kTwoRows = sizeof(value_tag) > 2 || kLanes > 4;
    if constexpr (!Passes<kLanes, 1, 2>::kMixed) {
      if (!by_four) return launch_rows<kSplit2, 1>(call, value_tag, accumulate_tag, vec, lanes, 256, true);
    }
    if constexpr (kTwoRows) {
      launch_rows<1, 2>(call, value_tag, accumulate_tag, vec, lanes, 512, true);
    } else {
      launch_rows<1, 1>(call, value_tag, accumulate_tag, vec, lanes, 256, true);
    }
  });
}

// How a head's queries are spread over blocks if there are to be about as many blocks as multiprocessors, as decoders
// want it: all queries of a head then meet in few first-level caches. `split` sets of lanes work on a row.
struct FewBlocks {
  int64_t split, threads;  // threads of a block, or 0 if the queries are too many
};

// Each multiprocessor has `blocks_each` blocks. As many threads work on a row as then fit into a block. In 16 bit,
// blocks of more than 768 threads are slower than a smaller split, which is why it is tried next; in a kernel of runs
// (`in_runs`) that holds for a split of four only.
template <typename Form>
FewBlocks few_blocks(const ForwardCall<Form>& call, bool in_runs, int64_t blocks_each) {
  const int64_t lanes = call.row().lanes, heads = call.problem.B * call.problem.G;
  const int64_t blocks = blocks_each * std::max<int64_t>(1, call.scope.device().multiprocessors / heads);
  const int64_t rows = ceil_div(call.problem.Q, blocks), most_split = call.is_16_bit() ? 768 : kForwardThreads;
  const auto threads = [&](int64_t split) { return ceil_div(rows * lanes * split, 32) * 32; };
  const int64_t split4 = std::min<int64_t>(4, std::max<int64_t>(1, 16 / lanes)),
                split2 = std::min<int64_t>(2, std::max<int64_t>(1, 8 / lanes));
  if (threads(split4) <= most_split) return {split4, threads(split4)};
  if (threads(split2) <= (in_runs ? kForwardThreads : most_split)) return {split2, threads(split2)};
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

// The path `few_rows` serves decoders that the path `decoder` declines, such as those whose levels have three samples.
// In published models, rows of such decoders have 32 channels at the most.
constexpr int kFewRowsLanes = 8;

template <typename Form>
const char* few_rows_declines(const ForwardCall<Form>& call) {
  if (const char* reason = call.declines_row()) return reason;
  if (call.row().lanes > kFewRowsLanes) return "a row of value has more than 128 bytes";
  return few_blocks(call, false, 1).threads > 0 ? nullptr
                                                : "there are too many queries for the number of multiprocessors";
}

template <typename Form>
void few_rows_launch(const ForwardCall<Form>& call) {
  const FewBlocks blocks = few_blocks(call, false, 1);
  call.visit_tuned([&](auto value_tag, auto vec, auto lanes) {
    if constexpr (decltype(lanes)::value <= kFewRowsLanes) {
      dispatch_split<decltype(lanes)::value>(blocks.split, [&](auto split) {
        launch_rows<decltype(split)::value, 1>(call, value_tag, float{}, vec, lanes, blocks.threads, false);
      });
    }
  });
}

// The path `half_lines` serves values of one head and 64 bytes a texel, for which rows_kernel has a form.
template <typename Form>
const char* half_lines_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (const char* reason = call.declines_row()) return reason;
  if (!call.is_16_bit() || problem.G != 1 || call.texel_bytes() != 64) {
    return "the texels of value are not one row of 64 bytes in 16 bit";
  }
  if (!points_divide(call.levels, problem, 4)) return "the samples of a row on each level are no multiple of 4";
  if (problem.S * call.texel_bytes() > int64_t{UINT32_MAX}) return "an image of value has 4 GiB or more";
  return levels_have_two_columns(call.levels, problem) ? nullptr : "a level may have only one column";
}

template <typename Form>
void half_lines_launch(const ForwardCall<Form>& call) {
  call.visit_tuned([&](auto value_tag, auto vec, auto lanes) {
    if constexpr (sizeof(value_tag) == 2 && decltype(lanes)::value == 4) {
      launch_rows<1, 1, true>(call, value_tag, float{}, vec, lanes, 256, false);
    }
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

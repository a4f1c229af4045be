// The forward's path `rows`, whose kernel serves every call.
//
// A row is the output of one (b, q, g): C channels. A group of LANES * SPLIT neighbouring threads owns a row: LANES
// threads own its channels, VEC of them each (16 bytes of value), and SPLIT such sets of lanes divide its samples among
// them; at the end their sums are added up.
//
//   a group of LANES = 4, SPLIT = 2, C = 16 float32:
//      thread      0     1     2     3   |   4     5     6     7
//      channels   0-3   4-7   8-11 12-15 |  0-3   4-7   8-11 12-15
//      samples      0, 2, 4, ...         |    1, 3, 5, ...
//
// The group takes the samples of its row in passes of as many samples as it has threads. First each thread prepares one
// of them, which it has fetched during the pass before, in shared memory (forward_sample.cuh); only threads of the same
// warp read it, so a barrier of the warp is enough. Then every thread adds its channels of the prepared samples, with
// loads that depend on no branch. A row of more channels than the lanes hold takes several groups.
//
// A block owns neighbouring queries of one head, or of the few heads whose channels lie in one line of 128 bytes: their
// samples lie close together, so that the first-level cache serves most loads. Each output is written once.
#pragma once

#include <type_traits>

#include "common/warp.cuh"
#include "cuda/ms_deform_attn/forward_call.cuh"
#include "cuda/ms_deform_attn/forward_sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

// Returns where the samples of a group of `size` threads begin in shared memory. A pass of a group of more than four
// threads may hold samples of several levels (`mixed`); their steps then stand behind them.
template <typename A>
__host__ __device__ constexpr int group_offset(int size, bool mixed, int group) {
  return samples_offset(static_cast<int>(sizeof(Sample<A>) + (mixed ? sizeof(Steps) : 0)) * size, group);
}

template <typename T, typename A, typename Source, int VEC, int LANES, int SPLIT>
__global__ void __maxnreg__(kForwardRegisters)
    rows_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                const ForwardSizes sizes) {
  constexpr int kGroup = LANES * SPLIT;  // also the samples of a pass
  constexpr bool kMixed = kGroup > 4;    // A pass may hold samples of several levels.
  constexpr uint32_t kNone = 0xffffffffu;
  extern __shared__ __align__(16) char shared[];
  const uint32_t task = blockIdx.y + blockIdx.z * 65535u, head_block = task / sizes.slices;
  if (head_block >= sizes.heads) return;
  const int groups = blockDim.x / kGroup, group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  auto* my_samples = reinterpret_cast<Sample<A>*>(shared + group_offset<A>(kGroup, kMixed, group));
  auto* my_steps = reinterpret_cast<Steps*>(my_samples + kGroup);  // of each sample, if kMixed
  auto* table = reinterpret_cast<Level*>(shared + group_offset<A>(kGroup, kMixed, groups));  // [L]
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C;
  load_levels(levels, L, sizes.S, table);

  // Neighbouring groups of the block work on different heads of the same line, then on different queries.
  const uint32_t head_blocks = static_cast<uint32_t>(G) >> sizes.head_bits, b = head_block / head_blocks;
  const int g = ((head_block - b * head_blocks) << sizes.head_bits) + (group & ((1 << sizes.head_bits) - 1));
  const int group_of_head = group >> sizes.head_bits, groups_of_head = groups >> sizes.head_bits;
  const int64_t image_rows = static_cast<int64_t>(b) * sizes.Q * G;
  const Source image = source.of_image(static_cast<int64_t>(b) * sizes.Q * L, image_rows * K);

  const int64_t q = static_cast<int64_t>(blockIdx.x) * groups_of_head + group_of_head;
  const uint32_t query = static_cast<uint32_t>(q);
  const uint32_t row_index = q < sizes.Q ? query * G + g : kNone;  // counted from the first row of the image
  const typename Source::Row row = image.row_of_lanes(q < sizes.Q, row_index * K, K, lane, kGroup);

  const int channel_lane = lane % LANES, split = lane / LANES;
  const uint32_t texel_bytes = sizes.texel_bytes;
  const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
  // Lanes past the last channel read the first channels, because a branch would separate the loads of this pass from
  // the preparation of the next one.
  const char* base =
      reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));
  A sum[VEC] = {};
  typename Source::Raw raw;
  int fetch_level = 0;
  const auto fetch = [&](int k) {
    raw = {};
    if (row_index == kNone || k >= K) return;
    if constexpr (Source::kNeedsLevel) {
      while (k >= table[fetch_level].end) ++fetch_level;
    }
    const uint32_t index = row_index * K + k;
    raw = image.fetch_position(index, query * L + fetch_level);
    image.fetch_weight(index, raw);
  };
  fetch(lane);
  int l = 0, stop = 0;
  Level level = L > 0 ? table[0] : Level{};
  const auto find_level = [&](int k) {
    while (k >= level.end) level = table[++l];
  };
  if (!kMixed && K > 0) find_level(0);
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 = stop) {
    const int k = k0 + lane;  // the sample that this thread prepares
    if (kMixed && k < K) find_level(k);
    stop = min(k0 + kGroup, kMixed ? K : level.end);
    const Steps level_steps = Steps::of(level);
    const Sample<A> sample = make_sample<A>(image, raw, row, level, level.end - (l > 0 ? table[l - 1].end : 0),
                                            k < stop && row_index != kNone);
    __syncwarp();  // The threads have read the previous samples.
    my_samples[lane] = sample;
    if constexpr (kMixed) my_steps[lane] = level_steps;
    __syncwarp();  // These samples are complete.
    fetch(stop + lane);
    if (!kMixed && stop < K) find_level(stop);
#pragma unroll
    for (int i = 0; i < kGroup; i += SPLIT) {
      const Sample<A> at = my_samples[i + split];
      const Steps steps = kMixed ? my_steps[i + split] : level_steps;
      const uint64_t column_bytes = steps.column * texel_bytes;
      const uint64_t row_bytes = static_cast<uint64_t>(steps.row) * texel_bytes;
      const char* corner[4];
      corner[0] = base + static_cast<uint64_t>(at.texel) * texel_bytes;
      corner[1] = corner[0] + column_bytes;
      corner[2] = corner[0] + row_bytes;
      corner[3] = corner[1] + row_bytes;
      add_sample<T>(at, corner, sum);
    }
  }
  // The threads that own the same channels add their sums up, and the first of them writes the row.
  sum_lanes(sum, LANES, kGroup);
  if (split == 0 && c < C && row_index != kNone) {
    store_pack<T, VEC>(output + (image_rows + row_index) * C + c, sum);
  }
}

constexpr int64_t kRowsThreads = 256;  // of a block

// Starts rows_kernel. A block works on all heads of a line.
template <int SPLIT, typename Form, typename T, typename A, int VEC, int LANES>
void launch_rows(const ForwardCall<Form>& call, T, A, std::integral_constant<int, VEC>,
                 std::integral_constant<int, LANES>) {
  constexpr int kGroup = LANES * SPLIT;
  constexpr int64_t groups = kRowsThreads / kGroup;
  int most_bits = 0;
  while (int64_t{2} << most_bits <= groups) ++most_bits;
  const ForwardSizes sizes = forward_sizes(call, heads_of_line_bits(call, most_bits));
  const auto source = call.form.template source<T, A>();
  launch({"ms_deform_attn", "rows_kernel", call.scope,
          head_grid(ceil_div(call.problem.Q, groups >> sizes.head_bits), int64_t{sizes.heads} * sizes.slices),
          kRowsThreads,
          group_offset<A>(kGroup, kGroup > 4, static_cast<int>(groups)) +
              static_cast<int64_t>(sizeof(Level)) * call.problem.L},
         rows_kernel<T, A, std::decay_t<decltype(source)>, VEC, LANES, SPLIT>, data_of(call.value), call.levels, source,
         data_of(call.output), sizes);
}

// A group of four threads takes four samples of one level in a pass; where a level's samples are no multiple of four,
// so that its last pass would be partly empty, groups have eight threads.
template <typename Form>
void rows_launch(const ForwardCall<Form>& call) {
  const bool by_four = points_divide(call.levels, call.problem, 4);
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    if constexpr (decltype(lanes)::value == 4) {
      if (!by_four) return launch_rows<2>(call, value_tag, accumulate_tag, vec, lanes);
    }
    launch_rows<1>(call, value_tag, accumulate_tag, vec, lanes);
  });
}

}  // namespace
}  // namespace visdet::ms_deform_attn

// Forward of ms_deform_attn on CUDA. The contract is in ../ms_deform_attn.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/paths.h"
#include "cuda/ms_deform_attn/levels.cuh"
#include "cuda/ms_deform_attn/regions.cuh"
#include "cuda/ms_deform_attn/row_split.cuh"
#include "cuda/ms_deform_attn/sample.cuh"

namespace visdet::ms_deform_attn {
namespace {

// A row is one (b, q, g). LANES neighbouring threads own a row's channels, VEC of them each (16 bytes), and SPLIT such
// groups share the row's L * P samples; a group walks ROWS rows. Its threads first compute the samples' metadata (16
// bytes in shared memory, which only their warp reads, so a warp barrier suffices), then walk them with branch-free
// loads. The next samples' locations are fetched meanwhile. A block owns neighbouring queries of one head, or of the
// few heads whose rows share a 128-byte line, so that the first-level cache serves most loads. Each output is written
// once. Most decoders and encoders have kernels of their own, decoder_kernel and pyramid_kernel.

// Registers are given by __maxnreg__: told a block's size by __launch_bounds__, the compiler orders loads in another
// way, and an encoder takes 117 us instead of 114 (bfloat16 82, 79), 48 images 767 instead of 758 (474, 463).
constexpr int kForwardThreads = 1024;  // at most
constexpr int kForwardRegisters = 64;  // hold four samples' loads in flight

// A sample as a square of texels of the map, moved inside it: corners (texel, + column) and the same one row further,
// of which no check is needed. On the fringe, where only a part of the sample falls inside, the fractions point at the
// texels that do, and the weight carries the part.
template <typename A>
struct alignas(16) Sample {
  A top, bottom;  // the weight's shares of the upper and of the lower row
  A fx;
  uint32_t texel;  // counted from the first row of value; in pyramid_kernel that row's offset in bytes
};

// Where the samples of the i-th of several groups begin in shared memory, `bytes` a group, so that a store of
// neighbouring samples and a load of one sample of each group fall into different banks.
__host__ __device__ constexpr int samples_offset(int bytes, int i) {
  return bytes >= 128 ? i * (bytes + 16) : i / 2 * (2 * bytes + 16) + i % 2 * bytes;
}

// From a texel to the next column and to the next row: 0 where a level has only one.
struct Steps {
  uint32_t column, row;
  __device__ __forceinline__ static Steps of(const Level& level) {
    return {level.W > 1 ? 1u : 0u, level.H > 1 ? static_cast<uint32_t>(level.W) : 0u};
  }
};

// points: of its row on its level.
template <typename A, typename Source>
__device__ __forceinline__ Sample<A> make_sample(const Source& source, const typename Source::Raw& raw,
                                                 const typename Source::Row& row, const Level& level, int points,
                                                 bool exists) {
  A x, y, fy, part_x, part_y;
  source.position(raw, level, points, x, y);
  Sample<A> sample;
  const int32_t first_x = first_texel(x, level.W, sample.fx, part_x);
  const int32_t first_y = first_texel(y, level.H, fy, part_y);
  const A inside = part_x * part_y;
  A weight = inside > A(0) ? source.weight(raw, row) * inside : A(0);
  if (level.H == 0) weight = quiet_nan<A>();
  if (!exists) weight = 0;
  sample.texel = level.start + first_y * level.W + first_x;
  sample.bottom = weight * fy, sample.top = fma(-weight, fy, weight);
  return sample;
}

template <typename A>
struct CornerWeights {
  A at[4];
  __device__ __forceinline__ explicit CornerWeights(const Sample<A>& sample)
      : at{fma(-sample.top, sample.fx, sample.top), sample.top * sample.fx,
           fma(-sample.bottom, sample.fx, sample.bottom), sample.bottom * sample.fx} {}
};

template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_texel(const char* from, A weight, A (&sum)[VEC]) {
  A texel[VEC];
  load_pack<T, VEC>(from, texel);
#pragma unroll
  for (int v = 0; v < VEC; ++v) sum[v] += texel[v] * weight;
}
// sum += the sample, whose corners lie at these addresses.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_sample(const Sample<A>& sample, const char* const (&corner)[4], A (&sum)[VEC]) {
  const CornerWeights<A> weights(sample);
#pragma unroll
  for (int j = 0; j < 4; ++j) add_texel<T>(corner[j], weights.at[j], sum);
}
// sum += the sample, whose corners are these texels.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void add_texels(const Sample<A>& sample, const Pack<T, VEC> (&texels)[4], A (&sum)[VEC]) {
  const CornerWeights<A> weights(sample);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    A texel[VEC];
    unpack(texels[j], texel);
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] += texel[v] * weights.at[j];
  }
}

// A sample whose texels are half a line of the first-level cache each: two groups, of which one reads the left half and
// the other the right one, do not wait for each other's banks. So the column in the half of the group's number comes
// first; `fx` counts from it, and is negative (or -0) where the left column comes second. texel: in bytes.
template <typename A>
__device__ __forceinline__ Sample<A> half_first(Sample<A> sample, const char* base, uint32_t group,
                                                uint32_t texel_bytes) {
  const uint32_t half = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(base)) / texel_bytes + sample.texel;
  if ((half ^ group) & 1) sample.texel += 1, sample.fx = -(A(1) - sample.fx);
  sample.texel *= texel_bytes;
  return sample;
}
template <typename T, int VEC>
__device__ __forceinline__ void add_half_first(const Sample<float>& sample, const char* base, uint32_t row_bytes,
                                               uint32_t texel_bytes, float (&sum)[VEC]) {
  const bool turned = __float_as_int(sample.fx) < 0;
  const int64_t second = turned ? -static_cast<int64_t>(texel_bytes) : static_cast<int64_t>(texel_bytes);
  const char *upper = base + sample.texel, *lower = upper + row_bytes;
  const char* const corner[4] = {upper, upper + second, lower, lower + second};
  const float top_second = sample.top * fabsf(sample.fx), bottom_second = sample.bottom * fabsf(sample.fx);
  const float weights[4] = {sample.top - top_second, top_second, sample.bottom - bottom_second, bottom_second};
#pragma unroll
  for (int j = 0; j < 4; ++j) add_texel<T>(corner[j], weights[j], sum);
}

// How a group of LANES * SPLIT threads walks the samples of its ROWS rows: kPass samples of kRowsAtOnce rows at a time.
// A pass of four keeps to one level.
template <int LANES, int SPLIT, int ROWS>
struct Walk {
  static constexpr int kGroup = LANES * SPLIT;
  static constexpr int kRowsAtOnce = least(ROWS, greatest(1, kGroup / 4));
  static constexpr int kPass = greatest(4, kGroup / kRowsAtOnce);
  static constexpr int kBatch = kRowsAtOnce * kPass;  // samples whose metadata is in shared memory
  static constexpr bool kMixed = kPass > 4;           // a pass takes samples of several levels
  static_assert(kBatch == kGroup, "each thread prepares one sample");
  template <typename A>
  __host__ __device__ static constexpr int group_offset(int group) {
    return samples_offset((sizeof(Sample<A>) + (kMixed ? sizeof(Steps) : 0)) * kBatch, group);
  }
};

struct ForwardSizes {
  int64_t S;
  int32_t Q, G, C, L, K;
  uint32_t heads;        // B * G / heads of a block
  uint32_t slices;       // of a row's channels, as many as a group takes at once
  uint32_t texel_bytes;  // from one row of value to the next
  int32_t head_bits;     // log2 of the heads of a block
};

// HALF_LINES: one head, 64 bytes of value a texel, and every level has two columns or more.
template <typename T, typename A, typename Source, int VEC, int LANES, int SPLIT, int ROWS, bool HALF_LINES = false>
__global__ void __maxnreg__(kForwardRegisters)
    forward_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                   const ForwardSizes sizes) {
  using W = Walk<LANES, SPLIT, ROWS>;
  constexpr bool kMixed = W::kMixed;
  extern __shared__ __align__(16) char shared[];
  const uint32_t task = blockIdx.y + blockIdx.z * 65535u, head_block = task / sizes.slices;
  if (head_block >= sizes.heads) return;
  const int groups = blockDim.x / W::kGroup, group = threadIdx.x / W::kGroup, lane = threadIdx.x % W::kGroup;
  auto* my_samples = reinterpret_cast<Sample<A>*>(shared + W::template group_offset<A>(group));
  auto* my_steps = reinterpret_cast<Steps*>(my_samples + W::kBatch);                     // of each sample, if kMixed
  auto* table = reinterpret_cast<Level*>(shared + W::template group_offset<A>(groups));  // [L]
  const int L = sizes.L, K = sizes.K, G = HALF_LINES ? 1 : sizes.G, C = HALF_LINES ? LANES * VEC : sizes.C;
  load_levels(levels, L, sizes.S, table);

  const uint32_t head_blocks = static_cast<uint32_t>(G) >> sizes.head_bits, b = head_block / head_blocks;
  const int g = ((head_block - b * head_blocks) << sizes.head_bits) + (group & ((1 << sizes.head_bits) - 1));
  const int slot = group >> sizes.head_bits, slots = groups >> sizes.head_bits;
  const int64_t image_rows = static_cast<int64_t>(b) * sizes.Q * G;
  const Source image = source.of_image(static_cast<int64_t>(b) * sizes.Q * L, image_rows * K);

  // The rows whose samples this lane prepares, counted from the first one of the image.
  constexpr int kTurns = ROWS / W::kRowsAtOnce;
  constexpr uint32_t kNone = 0xffffffffu;
  uint32_t row_index[kTurns], query_levels[kTurns];
  typename Source::Row row[kTurns];
#pragma unroll
  for (int t = 0; t < kTurns; ++t) {
    const int r = t * W::kRowsAtOnce + lane / W::kPass;
    const int64_t e = (static_cast<int64_t>(blockIdx.x) * ROWS + r) * slots + slot;
    const uint32_t query = static_cast<uint32_t>(e);
    row_index[t] = e < sizes.Q ? query * G + g : kNone;
    query_levels[t] = query * L;
    row[t] = image.row_of_lanes(e < sizes.Q, row_index[t] * K, K, lane % W::kPass, W::kPass);
  }

  const int channel_lane = lane % LANES, part = lane / LANES;
  const uint32_t texel_bytes = HALF_LINES ? LANES * VEC * sizeof(T) : sizes.texel_bytes;
  const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
  // Lanes past the last channel read the first ones, so that no branch parts the loads from the next samples' metadata.
  const char* base =
      reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));
  A sum[ROWS][VEC] = {};
  typename Source::Raw raw;
  int fetch_level = 0;
  const auto fetch = [&](int turn, int k) {
    raw = {};
    if (row_index[turn] == kNone || k >= K) return;
    if constexpr (Source::kNeedsLevel) {
      while (k >= table[fetch_level].end) ++fetch_level;
    }
    const uint32_t index = row_index[turn] * K + k;
    raw = image.fetch_position(index, query_levels[turn] + fetch_level);
    image.fetch_weight(index, raw);
  };
  fetch(0, lane % W::kPass);
  int l = 0, stop = 0;
  Level level = L > 0 ? table[0] : Level{};
  const auto find_level = [&](int k) {
    while (k >= level.end) level = table[++l];
  };
  if (!kMixed && K > 0) find_level(0);
#pragma unroll 1
  for (int k0 = 0; k0 < K; k0 = stop) {
    const int k = k0 + lane % W::kPass;  // the sample of each row that this lane prepares
    if (kMixed && k < K) find_level(k);
    stop = min(k0 + W::kPass, kMixed ? K : level.end);
    const Steps level_steps = Steps::of(level);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const Sample<A> sample = make_sample<A>(image, raw, row[turn], level, level.end - (l > 0 ? table[l - 1].end : 0),
                                              k < stop && row_index[turn] != kNone);
      __syncwarp();  // the previous samples have been read
      my_samples[lane] = HALF_LINES ? half_first(sample, base, group, texel_bytes) : sample;
      if constexpr (kMixed) my_steps[lane] = level_steps;
      __syncwarp();  // these samples are complete
      const bool is_last = turn + 1 == kTurns;
      fetch(is_last ? 0 : turn + 1, is_last ? stop + lane % W::kPass : k);
      if (!kMixed && is_last && stop < K) find_level(stop);
#pragma unroll
      for (int r = 0; r < W::kRowsAtOnce; ++r) {
#pragma unroll
        for (int i = 0; i < W::kPass; i += SPLIT) {
          const Sample<A> at = my_samples[r * W::kPass + i + part];
          const Steps steps = kMixed ? my_steps[r * W::kPass + i + part] : level_steps;
          auto& to = sum[turn * W::kRowsAtOnce + r];
          if constexpr (HALF_LINES) {
            add_half_first<T>(at, base, steps.row * texel_bytes, texel_bytes, to);
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
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    constexpr unsigned kAll = 0xffffffffu;
    const int from = r % W::kRowsAtOnce * W::kPass % W::kGroup;
    const uint32_t index = __shfl_sync(kAll, row_index[r / W::kRowsAtOnce], from, W::kGroup);
#pragma unroll
    for (int step = LANES; step < W::kGroup; step *= 2) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[r][v] += __shfl_xor_sync(kAll, sum[r][v], step);
    }
    if (part == 0 && c < C && index != kNone) store_pack<T, VEC>(output + (image_rows + index) * C + c, sum[r]);
  }
}

// Forward of a decoder, whose levels hold a multiple of four samples of a row, so that a run of four lies on one level.
// There is a block a multiprocessor, which owns neighbouring queries of one head, and LANES * SPLIT threads own a row,
// as above. They first compute the metadata of kChunk samples, two neighbours by one load where they can (read by their
// warp alone); then each group walks its share of every run with kAhead samples' loads in flight. Half of the warps
// begin in the middle: so at any time some read fine levels, whose texels come from the second-level cache, and others
// coarse ones, which hit in the first, and neither waits for its turn. An image of value spans less than 2^32 bytes.
// blockIdx: block of the head, g, b. Each output is written once.
constexpr int kRun = 4;
constexpr int kChunk = 16;
constexpr int kMostInRuns = 1024;  // samples of a row: their runs are in shared memory

// The levels of the runs of a row of one chunk, whose levels the host knows: without a table and its barrier, and
// without a loop over chunks.
struct FewRuns {
  Level level[kChunk / kRun];     // with the level's number as `end`
  int32_t points[kChunk / kRun];  // of a row on that level
};

// What an array of such runs says of sample k of a row: by selection, lanes would wait for one another's arguments.
template <typename V>
__device__ __forceinline__ V of_run(const V (&runs)[kChunk / kRun], int k) {
  V found = runs[0];
#pragma unroll
  for (int r = 1; r < kChunk / kRun; ++r) {
    if (k >= r * kRun) found = runs[r];
  }
  return found;
}

// Of any other row, for a table in shared memory. The first ones come from the host, as far as it knows them: found in
// the kernel, they would delay every block.
struct ManyRuns {
  int64_t S;
  int32_t count;    // of level
  Level level[16];  // with the level's number as `end`
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

struct DecoderSizes {
  int64_t image_bytes;                               // of value
  uint32_t image_rows, image_samples, image_levels;  // Q * G, Q * G * K and Q * L
  uint32_t Q, texel_bytes;
  int32_t G, C, L, K;
};

template <typename A>
constexpr int chunk_bytes() {  // 16: neighbouring rows are read from different banks
  return sizeof(Sample<A>) * kChunk + 16;
}

template <typename T, typename A, typename Source, typename Runs, int VEC, int LANES, int SPLIT>
__global__ void __maxnreg__(kForwardRegisters)
    decoder_kernel(const T* __restrict__ value, const Source source, T* __restrict__ output, const DecoderSizes sizes,
                   const __grid_constant__ Runs runs) {
  constexpr int kGroup = LANES * SPLIT, kEach = greatest(1, kChunk / kGroup), kPairs = kEach / 2;
  constexpr int kSteps = kRun / SPLIT;  // of a group in a run
  constexpr bool kFew = std::is_same_v<Runs, FewRuns>;
  // In 16 bit, where a lane sums twice the channels, one wins (Q=900: 7.7 us, 8.0 with two) unless warps are few.
  constexpr int kAhead = sizeof(T) == 2 && SPLIT > 1 ? 1 : least(2, kSteps);
  extern __shared__ __align__(16) char shared[];
  const int groups = blockDim.x / kGroup, group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int L = sizes.L, K = kFew ? kChunk : sizes.K, G = sizes.G, C = sizes.C, g = blockIdx.y;
  const uint32_t b = blockIdx.z;
  auto* my_samples = reinterpret_cast<Sample<A>*>(shared + group * chunk_bytes<A>());
  auto* table = reinterpret_cast<Level*>(shared + groups * chunk_bytes<A>());  // [K / kRun], unless kFew
  const uint32_t query = blockIdx.x * groups + group;
  const bool exists = query < sizes.Q;
  const uint32_t row = exists ? query * G + g : 0;
  const Source image =
      source.of_image(static_cast<uint64_t>(b) * sizes.image_levels, static_cast<uint64_t>(b) * sizes.image_samples);

  typename Source::Raw raw[kEach];
  const auto sample_of = [&](int i) {  // in the chunk: the one that this lane's raw[i] is
    return kPairs > 0 ? (i / 2 * kGroup + lane) * 2 + i % 2 : lane;
  };
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
    __syncthreads();
    softmax = image.row_of_lanes(exists, row * K, K, lane, kGroup);
    if (Source::kNeedsLevel) fetch(0);
  }

  const int channel_lane = lane % LANES, part = lane / LANES, c = channel_lane * VEC;
  const uint32_t texel_bytes = sizes.texel_bytes, row_offset = c < C ? c * sizeof(T) : 0;  // past the last: the first
  const char* base = reinterpret_cast<const char*>(value) + b * sizes.image_bytes + g * C * sizeof(T);
  A sum[VEC] = {};
#pragma unroll 1
  for (int k0 = 0;;) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int k = k0 + sample_of(i), even = k0 + sample_of(i / 2 * 2);  // which lies on the same level
      const Level level = level_of(even);
      const int points = Source::kNeedsLevel ? points_of(even, level) : 0;
      const Sample<A> sample = make_sample<A>(image, raw[i], softmax, level, points, exists && k < K);
      if (kGroup <= kChunk || lane < kChunk) my_samples[sample_of(i)] = sample;
    }
    __syncwarp();  // these samples are complete

    const int count = kFew ? K / kRun : min(kChunk, K - k0) / kRun;
    int run = threadIdx.x / 128 % 2 * (count / 2);
    uint32_t right, below;
    const auto enter = [&] {
      Level level;
      if constexpr (kFew) {
        level = runs.level[run];
      } else {
        level = table[k0 / kRun + run];
      }
      right = level.W > 1 ? texel_bytes : 0, below = level.H > 1 ? level.W * texel_bytes : 0;
    };
    Sample<A> at[kAhead];
    Pack<T, VEC> texels[kAhead][4];
    const auto load = [&](int slot, int step) {
      at[slot] = my_samples[run * kRun + step * SPLIT + part];
      const uint32_t upper = at[slot].texel * texel_bytes + row_offset, lower = upper + below;
      const uint32_t corner[4] = {upper, upper + right, lower, lower + right};
#pragma unroll
      for (int j = 0; j < 4; ++j) texels[slot][j] = *reinterpret_cast<const Pack<T, VEC>*>(base + corner[j]);
    };
    enter();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, i);
    const auto walk_run = [&](auto is_last) {
      constexpr bool kLast = decltype(is_last)::value;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (!kLast && step + kAhead == kSteps) {
          if (++run == count) run = 0;
          enter();
        }
        add_texels(at[step % kAhead], texels[step % kAhead], sum);
        if (!kLast || step + kAhead < kSteps) load(step % kAhead, (step + kAhead) % kSteps);
      }
    };
#pragma unroll 1
    for (int left = count; left > 1; --left) walk_run(std::false_type{});
    walk_run(std::true_type{});
    k0 += kChunk;
    if (kFew || k0 >= K) break;
    fetch(k0);
    __syncwarp();  // the samples have been read
  }
#pragma unroll
  for (int step = LANES; step < kGroup; step *= 2) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) sum[v] += __shfl_xor_sync(0xffffffffu, sum[v], step);
  }
  if (part == 0 && c < C && exists) {
    store_pack<T, VEC>(output + (static_cast<uint64_t>(b) * sizes.image_rows + row) * C + c, sum);
  }
}

// Forward of an encoder, whose queries are the pyramid's own texels. The image is cut into regions, the same ones on
// every level, and a block owns a run of queries in the order of regions: those at work at a time lie together on all
// levels, and those that follow lie beside them, so the first-level cache keeps their windows of the map. The path
// from that cache bounds the kernel in float32, in 16 bit the number of instructions. LANES threads own a row, as
// above; a warp works on 32 / LANES rows at a time, those of a query's heads that share a line beside each other. It
// first computes a pass of samples of each, some of which a lane fetches by one load; one of each lane at a time is in
// shared memory, which only this warp reads. A warp works out the queries of its next turns by itself, so that blocks,
// and their parts of different heads, begin without a barrier. WHOLE: the samples of a row are a multiple of kPass, and
// those of a level of four. MIXED: those of a level are no multiple of four. COLUMN: for 8 heads of 32 channels whose
// levels the host knows and which follow one another, the bytes from any texel to its right neighbour, an immediate of
// the load; else 0. SAMPLES: then a row's, in one pass, which need not be full; else 0. Each output is written once.
//
// Loops that run once a block are not unrolled: their instructions come from memory, before there is other work.
constexpr size_t kPyramidShared = 96 << 10;

constexpr int kPyramidThreads = 640;  // a multiple of four warps, so that no scheduler has more
constexpr int kPyramidRegisters = 94;

template <typename A, int LANES, bool WHOLE>
struct PyramidWalk {
  static constexpr int kEach = WHOLE && sizeof(A) == 4 ? greatest(1, 16 / LANES) : 1;
  static constexpr int kRows = 32 / LANES, kRowBits = LANES == 4 ? 3 : LANES == 8 ? 2 : LANES == 16 ? 1 : 0;
  static constexpr int kPass = LANES * kEach;
  __host__ __device__ static constexpr int row_offset(int row) {
    return samples_offset(sizeof(Sample<A>) * LANES, row);
  }
  static constexpr int kWarpBytes = row_offset(kRows);
};

// What the host knows of the levels; `runs` and `below` are of rows of at most kChunk samples, in runs of kRun. below:
// from a texel to the next row, in bytes; 0 where a run's level has only one row.
struct KnownLevels {
  FewRuns runs;
  uint32_t below[kChunk / kRun];
  Regions regions;
};

template <typename T, typename A, typename Source, int VEC, int LANES, bool WHOLE, bool MIXED, uint32_t COLUMN = 0,
          int SAMPLES = 0>
__global__ void __maxnreg__(kPyramidRegisters)
    pyramid_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                   const ForwardSizes sizes, uint32_t share, const __grid_constant__ KnownLevels known) {
  using Walk = PyramidWalk<A, LANES, WHOLE>;
  constexpr int kEach = Walk::kEach, kPass = Walk::kPass, kWarps = kPyramidThreads / 32;
  constexpr int kSame = MIXED ? 1 : 4;                    // neighbouring samples that lie on one level
  constexpr int kRuns = WHOLE ? kPass / kSame : 1;        // of a pass
  constexpr bool kAhead = WHOLE || !Source::kNeedsLevel;  // loads the next samples early
  constexpr bool kFull = WHOLE && SAMPLES % kPass == 0;   // no lane is without samples
  constexpr uint32_t kNone = 0xffffffffu;
  constexpr bool kKnown = COLUMN > 0;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = SAMPLES > 0 ? SAMPLES : sizes.K, G = sizes.G, C = sizes.C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t texel_bytes = kKnown ? COLUMN : sizes.texel_bytes;
  auto* table = reinterpret_cast<Level*>(shared + Walk::kWarpBytes * kWarps);  // [L], unless kKnown
  auto* level_of = table + L;                                    // [K / kSame], with the level's number as `end`
  auto* steps = reinterpret_cast<Steps*>(level_of + K / kSame);  // [K / kSame], in bytes
  const auto level_at = [&](int l) { return kKnown ? Level{levels.start[l], levels.H[l], levels.W[l], 0} : table[l]; };
  bool follow = false;
  Regions found;
  if constexpr (!kKnown) {
    follow = load_levels(levels, L, sizes.S, table);
#pragma unroll 1
    for (int i = threadIdx.x; i < K / kSame; i += kPyramidThreads) {
      int l = 0;
#pragma unroll 1
      while (i * kSame >= table[l].end) ++l;
      const Steps texels = Steps::of(table[l]);
      level_of[i] = {table[l].start, table[l].H, table[l].W, l};
      steps[i] = {texels.column * texel_bytes, texels.row * texel_bytes};
    }
    found = levels.by_value() ? known.regions : Regions::of(L, level_at);
    follow = follow && found.fit;
  }
  const RegionTable regions(kKnown ? known.regions : found, L, level_at,
                            kKnown ? reinterpret_cast<char*>(table) : reinterpret_cast<char*>(steps + K / kSame));

  const uint32_t Q = sizes.Q, total = sizes.heads * sizes.slices * Q, begin = blockIdx.x * share;
  uint32_t task = begin / Q, first = begin - task * Q;
  uint32_t left = begin < total ? min(total - begin, share) : 0;
  // COLUMN: of 8 heads of 32 channels, in 16 bit two share a line.
  const int head_bits = kKnown ? (sizeof(T) == 2 ? 1 : 0) : sizes.head_bits;
  const int row = lane / LANES, channel_lane = lane % LANES, head_of_row = row & ((1 << head_bits) - 1);
  const int query_of_row = row >> head_bits, query_bits = Walk::kRowBits - head_bits;  // of a turn
  char* const my_memory = shared + warp * Walk::kWarpBytes;
  auto* samples = reinterpret_cast<Sample<A>*>(my_memory + Walk::row_offset(row));

  // What a pass needs of its levels: that of this lane's samples, and the steps of every run. A row of one pass has the
  // same ones in every turn.
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
  const auto step_of = [&](int k0, int i) -> Steps {  // of the pass's i-th sample
    if constexpr (kKnown) {
      return {COLUMN, known.below[i / kSame]};
    } else {
      return WHOLE ? run_steps[i / kSame] : steps[(k0 + i) / kSame];
    }
  };
  if (WHOLE) take_runs(0);
#pragma unroll 1
  while (left > 0) {  // a head after the other, or what of it is the block's
    const uint32_t count = min(left, Q - first);
    const uint32_t head_block = kKnown ? task : task / sizes.slices;
    const uint32_t head_blocks = static_cast<uint32_t>(kKnown ? 8 : G) >> head_bits, b = head_block / head_blocks;
    const int g = ((head_block - b * head_blocks) << head_bits) + head_of_row;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, (image_rows + g) * K);  // from head g
    const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
    // Lanes past the last channel read the first ones.
    const char* base =
        reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));

    // The queries of this turn of the warp and of those that follow it: 32 at a time, one by each lane.
    uint32_t found_query = kNone;
    const auto find_queries = [&](uint32_t turn) {
      const uint32_t place = ((turn + (lane >> query_bits) * kWarps) << query_bits) + (lane & ((1 << query_bits) - 1));
      found_query = place >= count ? kNone : kKnown || follow ? regions.query_at(first + place) : first + place;
    };
    const auto query_of = [&](uint32_t turn) {  // of this lane's row
      return __shfl_sync(0xffffffffu, found_query, ((turn / kWarps << query_bits) + query_of_row) % 32);
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
    const uint32_t turns = (count + (1u << query_bits) - 1) >> query_bits;
    uint32_t query = kNone;
#pragma unroll 1
    for (uint32_t next = warp; next < turns + kWarps; next += kWarps) {  // the turn after this one
      if ((next / kWarps << query_bits) % 32 == 0) find_queries(next);
      const uint32_t next_query = query_of(next);
      if (next < kWarps) {  // there is none before it
        query = next_query;
        if (kAhead) fetch(query, channel_lane * kEach);
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
        if (!kAhead) fetch(query, k);
        if (!WHOLE) {
          take_level(k);
        } else if (K > kPass) {
          take_runs(k0);
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) {  // all lanes' first samples, then their second ones
          Sample<A> prepared = make_sample<A>(image, raw[j], softmax, level, points, kFull || k < K);
          prepared.texel *= texel_bytes;
          __syncwarp();  // the previous samples have been read
          samples[channel_lane] = prepared;
          __syncwarp();  // these samples are complete
          if (kAhead && j == kEach - 1) {
            const bool is_last = k0 + kPass >= K;
            fetch(is_last ? next_query : query, is_last ? channel_lane * kEach : k + kPass);
          }
          constexpr int kRun = greatest(1, kSame / kEach);
#pragma unroll
          for (int i = 0; i < LANES; i += kRun) {
            if (!kFull && k0 + i * kEach >= K) break;
            const Steps step = step_of(k0, i * kEach);
            const char* right = base + step.column;
#pragma unroll
            for (int s = i; s < i + kRun; ++s) {
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
    left -= count, ++task, first = 0;
  }
}

// Whether the samples of a row on each level are a multiple of `count`.
bool points_divide(const Levels& levels, const MsDeformAttnProblem& problem, int64_t count) {
  for (int l = 0; l < (levels.P > 0 ? 1 : problem.L); ++l) {
    if (points_on(levels, l) % count != 0) return false;
  }
  return true;
}

// Whether the host knows the levels, and each has two columns or more.
bool wide_levels(const Levels& levels, const MsDeformAttnProblem& problem) {
  return levels.by_value() && std::all_of(levels.W, levels.W + problem.L, [](int32_t W) { return W > 1; });
}

// For rows whose samples on each level are a multiple of kRun.
FewRuns few_runs(const Levels& levels, const MsDeformAttnProblem& problem) {
  FewRuns runs{};
  int count = 0;
  for (int l = 0; l < problem.L; ++l) {
    for (int i = 0; i < points_on(levels, l) / kRun; ++i, ++count) {
      runs.level[count] = {levels.start[l], levels.H[l], levels.W[l], l}, runs.points[count] = points_on(levels, l);
    }
  }
  return runs;
}

KnownLevels known_levels(const Levels& levels, const MsDeformAttnProblem& problem, uint32_t texel_bytes) {
  KnownLevels known{few_runs(levels, problem), {}, known_regions(levels, static_cast<int>(problem.L))};
  for (int r = 0; r < kChunk / kRun; ++r) {
    const Level& level = known.runs.level[r];
    known.below[r] = level.H > 1 ? level.W * texel_bytes : 0;
  }
  return known;
}

ManyRuns many_runs(const Levels& levels, const MsDeformAttnProblem& problem) {
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

// A call of the forward, none of whose tensors is empty. Form: GivenForm or FusedForm.
template <typename Form>
struct ForwardCall {
  const MsDeformAttnProblem& problem;
  const DeviceScope& scope;
  const Levels& levels;
  const Form& form;
  const Tensor& value;
  Tensor& output;

  int64_t element() const { return static_cast<int64_t>(value.element_size()); }
  int64_t texel_bytes() const { return problem.G * problem.C * element(); }
  bool is_double() const { return element() == 8; }
  bool is_16_bit() const { return element() == 2; }
  RowSplit row() const { return row_split(problem.C, aligned(value, 16), 16 / element(), 32); }

  // Calls f(T, A, VEC, LANES) with the types of values and sums and the constants of row().
  template <typename F>
  void visit(const F& f) const {
    dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
      dispatch_row<kRowVec<decltype(value_tag)>, 32>(
          row(), [&](auto vec, auto lanes) { f(value_tag, accumulate_tag, vec, lanes); });
    });
  }
};

template <typename Form>
ForwardSizes forward_sizes(const ForwardCall<Form>& call, int head_bits) {
  const MsDeformAttnProblem& problem = call.problem;
  const RowSplit row = call.row();
  return {problem.S,
          static_cast<int32_t>(problem.Q),
          static_cast<int32_t>(problem.G),
          static_cast<int32_t>(problem.C),
          static_cast<int32_t>(problem.L),
          static_cast<int32_t>(problem.K),
          static_cast<uint32_t>(problem.B * problem.G >> head_bits),
          static_cast<uint32_t>(ceil_div(problem.C, row.vec * row.lanes)),
          static_cast<uint32_t>(call.texel_bytes()),
          head_bits};
}

// log2 of the neighbouring heads whose rows share a 128-byte line and are read together: alone, they would all fall
// into the same banks of the cache. At most `most_bits`, which a block has groups of threads for.
template <typename Form>
int shared_head_bits(const ForwardCall<Form>& call, int most_bits) {
  const int64_t G = call.problem.G, row_bytes = call.problem.C * call.element();
  int bits = 0;
  while (bits < most_bits && row_bytes << (bits + 1) <= 128 && G % (int64_t{2} << bits) == 0) ++bits;
  return bits;
}

// How a head's queries are spread over blocks if there are to be so few that a multiprocessor has about one (a
// decoder): a head's queries then meet in one first-level cache. `split` groups of lanes share a row's samples.
struct FewBlocks {
  int64_t split, threads;  // threads: of a block; 0: the queries are too many
};

// A head's queries fill up to kMostTurns blocks, one after another, on each of the head's multiprocessors. As many
// threads a row as then fit the block. In 16 bit, blocks beyond 768 threads lose to rows in two instead of four (Q=450:
// 5.5 us in four, 5.3 in two), and where levels hold no runs, to whole ones (Q=900: 9.0 in two, 8.6 whole).
constexpr int64_t kMostTurns = 4;

template <typename Form>
FewBlocks few_blocks(const ForwardCall<Form>& call, bool in_runs, int64_t turns) {
  const int64_t lanes = call.row().lanes, heads = call.problem.B * call.problem.G;
  const int64_t blocks = turns * std::max<int64_t>(1, call.scope.device().multiprocessors / heads);
  const int64_t rows = ceil_div(call.problem.Q, blocks), most_split = call.is_16_bit() ? 768 : kForwardThreads;
  const auto threads = [&](int64_t split) { return ceil_div(rows * lanes * split, 32) * 32; };
  const int64_t split4 = std::min<int64_t>(4, std::max<int64_t>(1, 16 / lanes)),
                split2 = std::min<int64_t>(2, std::max<int64_t>(1, 8 / lanes));
  if (threads(split4) <= most_split) return {split4, threads(split4)};
  if (threads(split2) <= (in_runs ? kForwardThreads : most_split)) return {split2, threads(split2)};
  if (threads(1) <= kForwardThreads) return {1, threads(1)};
  return {1, 0};
}

// Calls f(SPLIT) with the constant; LANES: of the row.
template <int LANES, typename F>
void dispatch_split(int64_t split, const F& f) {
  constexpr int kSplit4 = least(4, greatest(1, 16 / LANES)), kSplit2 = least(2, greatest(1, 8 / LANES));
  if (split == kSplit4) return f(std::integral_constant<int, kSplit4>{});
  if (split == kSplit2) return f(std::integral_constant<int, kSplit2>{});
  f(std::integral_constant<int, 1>{});
}

// The path of decoders whose levels hold runs of samples.
template <typename Form>
FewBlocks decoder_blocks(const ForwardCall<Form>& call) {
  const int64_t most_turns = call.problem.Q == call.problem.S ? 1 : kMostTurns;
  for (int64_t turns = 1; turns <= most_turns; ++turns) {
    if (const FewBlocks blocks = few_blocks(call, true, turns); blocks.threads > 0) return blocks;
  }
  return {1, 0};
}

template <typename Form>
int64_t decoder_shared_bytes(const ForwardCall<Form>& call, const FewBlocks& blocks) {
  const bool few = call.levels.by_value() && call.problem.K == kChunk;
  return chunk_bytes<float>() * (blocks.threads / (call.row().lanes * blocks.split)) +
         (few ? 0 : static_cast<int64_t>(sizeof(Level)) * (call.problem.K / kRun));
}

template <typename Form>
const char* decoder_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (call.is_double()) return "the values are float64";
  if (call.row().vec == 1) return "rows of value cannot be read 16 bytes at a time";
  if (problem.C > call.row().vec * call.row().lanes) return "a row of value is too long for a warp";
  if (problem.K == 0 || problem.K > kMostInRuns || !points_divide(call.levels, problem, kRun)) {
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
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
    if constexpr (kVec > 1 && sizeof(A) == 4) {
      dispatch_split<kLanes>(blocks.split, [&](auto split) {
        const auto source = call.form.template source<T, A>();
        using Source = std::decay_t<decltype(source)>;
        const auto start = [&](const auto& runs) {
          using Runs = std::decay_t<decltype(runs)>;
          launch({"ms_deform_attn",
                  "decoder_kernel",
                  call.scope,
                  {ceil_div(problem.Q, rows), problem.G, problem.B},
                  blocks.threads,
                  shared},
                 decoder_kernel<T, A, Source, Runs, kVec, kLanes, decltype(split)::value>,
                 static_cast<const T*>(call.value.const_data_ptr()), source,
                 static_cast<T*>(call.output.mutable_data_ptr()), sizes, runs);
        };
        if (call.levels.by_value() && problem.K == kChunk) {
          start(few_runs(call.levels, problem));
        } else {
          start(many_runs(call.levels, problem));
        }
      });
    }
  });
}

// forward_kernel in blocks of `threads` threads, for any types and sizes.
template <int SPLIT, int ROWS, bool HALF_LINES = false, typename Form, typename T, typename A, int VEC, int LANES>
void launch_rows(const ForwardCall<Form>& call, T, A, std::integral_constant<int, VEC>,
                 std::integral_constant<int, LANES>, int64_t threads, bool joins_heads) {
  using W = Walk<LANES, SPLIT, ROWS>;
  const int64_t groups = threads / W::kGroup;
  int most_bits = 0;
  while (joins_heads && int64_t{2} << most_bits <= groups) ++most_bits;
  const ForwardSizes sizes = forward_sizes(call, shared_head_bits(call, most_bits));
  const auto source = call.form.template source<T, A>();
  launch({"ms_deform_attn", "forward_kernel", call.scope,
          head_grid(ceil_div(call.problem.Q, (groups >> sizes.head_bits) * ROWS), int64_t{sizes.heads} * sizes.slices),
          threads,
          W::template group_offset<A>(static_cast<int>(groups)) + static_cast<int64_t>(sizeof(Level)) * call.problem.L},
         forward_kernel<T, A, std::decay_t<decltype(source)>, VEC, LANES, SPLIT, ROWS, HALF_LINES>,
         static_cast<const T*>(call.value.const_data_ptr()), call.levels, source,
         static_cast<T*>(call.output.mutable_data_ptr()), sizes);
}

// The path of other decoders.
template <typename Form>
const char* few_rows_declines(const ForwardCall<Form>& call) {
  if (call.is_double()) return "the values are float64";
  return few_blocks(call, false, 1).threads > 0 ? nullptr
                                                : "there are too many queries for the number of multiprocessors";
}

template <typename Form>
void few_rows_launch(const ForwardCall<Form>& call) {
  const FewBlocks blocks = few_blocks(call, false, 1);
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    if constexpr (sizeof(accumulate_tag) == 4) {
      dispatch_split<decltype(lanes)::value>(blocks.split, [&](auto split) {
        launch_rows<decltype(split)::value, 1>(call, value_tag, accumulate_tag, vec, lanes, blocks.threads, false);
      });
    }
  });
}

// The path of encoders.
struct EncoderPlan {
  int64_t share, blocks, shared;  // share: queries of a block, of all heads
  ForwardSizes sizes;
  bool by_four, whole;  // the samples of a level are a multiple of four; those of a row fill passes
  uint32_t column;      // of pyramid_kernel
};

template <typename Form>
EncoderPlan encoder_plan(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  const RowSplit row = call.row();
  EncoderPlan plan{};
  int row_bits = 0;  // log2 of the rows that a warp works on
  while (row.lanes << (row_bits + 1) <= 32) ++row_bits;
  plan.sizes = forward_sizes(call, shared_head_bits(call, row_bits));
  const int64_t total = int64_t{plan.sizes.heads} * plan.sizes.slices * problem.Q;
  plan.share = std::max<int64_t>(1, ceil_div(total, call.scope.device().multiprocessors));
  plan.blocks = ceil_div(total, plan.share);
  plan.by_four = points_divide(call.levels, problem, 4);
  plan.whole = plan.by_four && problem.K % (row.lanes * std::max<int64_t>(1, 16 / row.lanes)) == 0;
  // 16 or 12 samples of 8 heads of 32 channels, as nearly every model has them: 16 take 113 us, 116 else (bfloat16 79,
  // 84).
  const bool usual = (problem.K == 16 || problem.K == 12) && problem.C == 32 && problem.G == 8 && problem.L <= 4 &&
                     row.vec * row.lanes == 32 && wide_levels(call.levels, problem) && call.levels.contiguous;
  if (plan.by_four && usual) plan.whole = true, plan.column = static_cast<uint32_t>(256 * call.element());
  const int64_t warps = kPyramidThreads / 32, steps = plan.by_four ? problem.K / 4 : problem.K;
  const int lanes = static_cast<int>(row.lanes);
  const int64_t warp_bytes = samples_offset(sizeof(Sample<float>) * lanes, 32 / lanes);  // PyramidWalk::kWarpBytes
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
  if (plan.blocks * plan.share > int64_t{UINT32_MAX}) return "there are 2^32 rows or more";
  if (plan.shared > std::min<int64_t>(kPyramidShared, call.scope.device().shared_block)) {
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
        launch({"ms_deform_attn", "pyramid_kernel", call.scope, plan.blocks, kPyramidThreads, plan.shared}, kernel,
               static_cast<const T*>(call.value.const_data_ptr()), call.levels, source,
               static_cast<T*>(call.output.mutable_data_ptr()), plan.sizes, static_cast<uint32_t>(plan.share), known);
      };
      if constexpr (kVec * kLanes == 32) {
        constexpr uint32_t kColumn = 256 * sizeof(T);
        if (plan.column > 0 && problem.K == 16) {
          return start(pyramid_kernel<T, A, Source, kVec, kLanes, true, false, kColumn, 16>);
        }
        if (plan.column > 0) return start(pyramid_kernel<T, A, Source, kVec, kLanes, true, false, kColumn, 12>);
      }
      if (!plan.by_four) return start(pyramid_kernel<T, A, Source, kVec, kLanes, false, true>);
      if (!plan.whole) return start(pyramid_kernel<T, A, Source, kVec, kLanes, false, false>);
      start(pyramid_kernel<T, A, Source, kVec, kLanes, true, false>);
    }
  });
}

// The path of many images whose texels are half a line of the first-level cache: 48 images 473 us, 480 by rows.
template <typename Form>
const char* half_lines_declines(const ForwardCall<Form>& call) {
  const MsDeformAttnProblem& problem = call.problem;
  if (!call.is_16_bit() || call.row().vec == 1 || call.row().lanes != 4) {
    return "the rows of value are not 64 bytes of 16-bit values";
  }
  if (problem.G != 1 || call.texel_bytes() != 64) return "there are several heads";
  if (!points_divide(call.levels, problem, 4)) return "the samples of a row on each level are no multiple of 4";
  if (problem.S * call.texel_bytes() > int64_t{UINT32_MAX}) return "an image of value has 4 GiB or more";
  return wide_levels(call.levels, problem) ? nullptr : "a level may have only one column";
}

template <typename Form>
void half_lines_launch(const ForwardCall<Form>& call) {
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    if constexpr (sizeof(value_tag) == 2 && decltype(vec)::value > 1 && decltype(lanes)::value == 4) {
      launch_rows<1, 1, true>(call, value_tag, accumulate_tag, vec, lanes, 256, false);
    }
  });
}

// The path of everything else. Two rows a group, in passes of four samples that keep to one level, unless these would
// be padded. In 16 bit, where queries share nothing, more warps win (48 images: 490 against 515 us; a decoder of 4000:
// 30 against 28).
template <typename Form>
void rows_launch(const ForwardCall<Form>& call) {
  const bool by_four = points_divide(call.levels, call.problem, 4);
  call.visit([&](auto value_tag, auto accumulate_tag, auto vec, auto lanes) {
    constexpr int kLanes = decltype(lanes)::value, kSplit2 = least(2, greatest(1, 8 / kLanes));
    constexpr bool kTwoRows = sizeof(value_tag) > 2 || kLanes > 4;
    if (!by_four && !Walk<kLanes, 1, 2>::kMixed) {
      launch_rows<kSplit2, 1>(call, value_tag, accumulate_tag, vec, lanes, 256, true);
    } else if constexpr (kTwoRows) {
      launch_rows<1, 2>(call, value_tag, accumulate_tag, vec, lanes, 512, true);
    } else {
      launch_rows<1, 1>(call, value_tag, accumulate_tag, vec, lanes, 256, true);
    }
  });
}

template <typename Form>
constexpr Path<ForwardCall<Form>> kForwardPaths[] = {
    {"decoder", decoder_declines<Form>, decoder_launch<Form>},
    {"few_rows", few_rows_declines<Form>, few_rows_launch<Form>},
    {"encoder", encoder_declines<Form>, encoder_launch<Form>},
    {"half_lines", half_lines_declines<Form>, half_lines_launch<Form>},
    {"rows", nullptr, rows_launch<Form>},
};

template <typename Form>
Tensor forward(const MsDeformAttnProblem& problem, const DeviceScope& scope, const Tensor& value, const Levels& levels,
               const Form& form) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0) return zero_(output);
  if (const int64_t channels = filled_channels(problem, value); channels > problem.C) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    const Tensor wide = forward(filled, scope, fill_rows(value, problem, channels), levels, form);
    Tensor rows = view(output, {problem.B, problem.Q, problem.G, problem.C});
    Tensor all_rows = view(wide, {problem.B, problem.Q, problem.G, channels});
    copy_(rows, narrow(all_rows, 3, 0, problem.C));
    return output;
  }
  run_first("ms_deform_attn", kForwardPaths<Form>, {problem, scope, levels, form, value, output});
  return output;
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor value = dense(value_in), level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               locations = contiguous_pairs(locations_in), weights = contiguous_pairs(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  return forward(problem, scope, value, levels, GivenForm{locations, weights});
}

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                            const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in,
                            std::vector<int64_t> num_points) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_sizes(problem);
  const DeviceScope scope(value_in);
  const Tensor value = dense(value_in), level_shapes = dense(level_shapes_in), level_starts = dense(level_starts_in),
               reference = contiguous_pairs(reference_in), offsets = contiguous_pairs(offsets_in),
               logits = contiguous_pairs(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  return forward(problem, scope, value, levels, FusedForm{reference, offsets, logits});
}

}  // namespace
}  // namespace visdet::ms_deform_attn

VISDET_CUDA_OPERATORS(m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn::ms_deform_attn_fused));
}

// ms_deform_attn on CUDA. The contract is in ../ms_deform_attn.h; how the work is laid out, above the forward and the
// backward below.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "../common/bilinear.h"
#include "../common/block_scan.cuh"
#include "../common/cuda_utils.cuh"
#include "../ms_deform_attn.h"

namespace visdet {
namespace {

constexpr int kMaxHostLevels = 16;  // levels that travel as kernel arguments; more are copied to the device

// Level geometry by value (from the host) or by pointer (on the device).
struct Levels {
  const int64_t* shapes;  // [L, 2] on the device, or null
  const int64_t* starts;  // [L] on the device, or null
  int32_t H[kMaxHostLevels], W[kMaxHostLevels], start[kMaxHostLevels];
  int32_t P;                    // samples of a row on each level; 0: their number differs, see `end`
  int32_t end[kMaxHostLevels];  // samples of a row on the levels up to this one
  bool follow;                  // by value: the levels follow one another from row 0 to row S without a gap
};

// Samples of a row on level l.
__host__ __device__ __forceinline__ int32_t points_on(const Levels& levels, int l) {
  return levels.P > 0 ? levels.P : levels.end[l] - (l > 0 ? levels.end[l - 1] : 0);
}

struct alignas(16) Level {
  int32_t start, H, W;  // H = 0 for a level that does not lie within S
  int32_t end;          // samples of a row on the levels up to this one
};

__device__ __forceinline__ Level read_level(const Levels& levels, int l, int64_t S) {
  const int32_t end = levels.P > 0 ? (l + 1) * levels.P : levels.end[l];
  if (levels.shapes == nullptr) return {levels.start[l], levels.H[l], levels.W[l], end};
  const int64_t H = levels.shapes[2 * l], W = levels.shapes[2 * l + 1], start = levels.starts[l];
  const bool fits = H > 0 && W > 0 && start >= 0 && H <= S && W <= S && start + H * W <= S;
  return fits ? Level{static_cast<int32_t>(start), static_cast<int32_t>(H), static_cast<int32_t>(W), end}
              : Level{0, 0, 0, end};
}

// All threads of the block: the level table into shared memory. Returns whether the levels follow one another from row
// 0 to row S without a gap.
__device__ __forceinline__ bool load_levels(const Levels& levels, int L, int64_t S, Level* table) {
  if (levels.shapes == nullptr) {
    for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = read_level(levels, l, S);
    __syncthreads();
    return levels.follow;
  }
  bool follow = true;
#pragma unroll 1
  for (int l = threadIdx.x; l < L; l += blockDim.x) {
    const Level level = read_level(levels, l, S);
    table[l] = level;
    int64_t before = 0;
#pragma unroll 1
    for (int k = 0; k < l; ++k) {
      const Level other = read_level(levels, k, S);
      before += static_cast<int64_t>(other.H) * other.W;
    }
    follow = follow && level.H > 0 && level.start == before;
    if (l == L - 1) follow = follow && before + static_cast<int64_t>(level.H) * level.W == S;
  }
  return __syncthreads_and(follow);
}

// Reads what is needed once, so that it takes no place in the first-level cache. LINE: what lies beside it, 16 values
// in all, is needed soon and comes into the second-level cache with it.
template <bool LINE = false, typename V>
__device__ __forceinline__ V load_once(const V* from) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
  uint32_t words[sizeof(V) / 4];
#if __CUDA_ARCH__ >= 750
  constexpr bool kLine = LINE;
#else
  constexpr bool kLine = false;
#endif
  if constexpr (kLine && sizeof(V) == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::64B.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else if constexpr (kLine && sizeof(V) == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from));
  } else if constexpr (sizeof(V) == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(words[0]) : "l"(from));
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
  }
  V value;
  memcpy(&value, words, sizeof(V));
  return value;
}

// Where the samples come from. fetch...() only loads, so that the loads of the next samples are in flight while the
// current ones are summed; position() and weight() then do the arithmetic. fetch_run(): N neighbouring samples of a
// row, on one level, the first one's index a multiple of N (1, 2 or 4). of_image() moves to one batch entry.
template <typename A>
struct GivenSamples {
  const A* locations;  // [B, Q, G, K, 2]
  const A* weights;    // [B, Q, G, K]

  struct Raw {
    A x, y, weight;
  };
  struct Row {};
  static constexpr bool kNeedsLevel = false;  // to fetch a position

  __device__ __forceinline__ GivenSamples of_image(int64_t, int64_t image_samples) const {
    return {locations + 2 * image_samples, weights + image_samples};
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ Raw fetch_position(Index index, Index /*query_level*/) const {
    const auto* from = reinterpret_cast<const Pack<A, 2>*>(locations) + index;
    const Pack<A, 2> location = ONCE ? load_once<LINE>(from) : *from;
    return {location.at[0], location.at[1], A(0)};
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ void fetch_weight(Index index, Raw& raw) const {
    raw.weight = ONCE ? load_once<LINE>(weights + index) : weights[index];
  }
  template <bool ONCE = false, int N, typename Index>
  __device__ __forceinline__ void fetch_run(Index index, Index query_level, Raw (&raw)[N]) const {
    if constexpr (N == 1 || sizeof(A) > 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw[i] = fetch_position<ONCE>(index + i, query_level);
        fetch_weight<ONCE>(index + i, raw[i]);
      }
    } else {
      const auto* from = reinterpret_cast<const Pack<A, 4>*>(locations + 2 * static_cast<int64_t>(index));
      const auto* weights_from = reinterpret_cast<const Pack<A, N>*>(weights + index);
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const Pack<A, 4> at = ONCE ? load_once(from + i / 2) : from[i / 2];
        raw[i] = {at.at[0], at.at[1], A(0)}, raw[i + 1] = {at.at[2], at.at[3], A(0)};
      }
      const Pack<A, N> weight = ONCE ? load_once(weights_from) : *weights_from;
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i].weight = weight.at[i];
    }
  }
  __device__ __forceinline__ void position(const Raw& raw, const Level& level, int /*points*/, A& x, A& y) const {
    x = fma(raw.x, A(level.W), A(-0.5)), y = fma(raw.y, A(level.H), A(-0.5));
  }
  __device__ __forceinline__ Row row_of_lanes(bool, uint32_t, int, int, int) const { return {}; }
  template <int LANES, int N, typename Has>
  __device__ __forceinline__ Row row_of_raw(const Raw (&)[N], const Has&) const {
    return {};
  }
  __device__ __forceinline__ Row row_at(int64_t) const { return {}; }
  __device__ __forceinline__ A weight(const Raw& raw, const Row&) const { return raw.weight; }
};

// The softmax of a row: weight = exp(logit - largest) * scale. `largest` is at least the least finite number, so that
// -inf has weight zero; a row of nothing else is NaN, as in torch.
template <typename A>
struct SoftmaxRow {
  A largest, scale;
  __device__ __forceinline__ A weight(A logit) const { return exp(logit - largest) * scale; }
};

template <typename T, typename A>
struct FusedSamples {
  const A* reference_points;  // [B, Q, L, 2 or 4]
  const char* offsets;        // [B, Q, G, K, 2], of type A if `wide`, else T
  const char* logits;         // [B, Q, G, K], likewise
  const SoftmaxRow<A>* rows;  // [B, Q, G] in the backward
  bool wide, boxes;

  struct Raw {
    A x, y, weight;  // of type T: the bits, until they are used
    A center_x, center_y, w, h;
  };
  using Row = SoftmaxRow<A>;
  static constexpr bool kNeedsLevel = true;
  static constexpr A kLeast = sizeof(A) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308;  // finite number

  __device__ __forceinline__ int element() const { return wide ? sizeof(A) : sizeof(T); }
  __device__ __forceinline__ FusedSamples of_image(int64_t image_levels, int64_t image_samples) const {
    FusedSamples image = *this;
    image.reference_points += image_levels * (boxes ? 4 : 2);
    image.offsets += image_samples * 2 * element(), image.logits += image_samples * element();
    return image;
  }
  template <typename Index>
  __device__ __forceinline__ void fetch_reference(Index query_level, Raw& raw) const {
    if (boxes) {
      const Pack<A, 4> box = reinterpret_cast<const Pack<A, 4>*>(reference_points)[query_level];
      raw.center_x = box.at[0], raw.center_y = box.at[1], raw.w = box.at[2], raw.h = box.at[3];
    } else {
      const Pack<A, 2> point = reinterpret_cast<const Pack<A, 2>*>(reference_points)[query_level];
      raw.center_x = point.at[0], raw.center_y = point.at[1];
    }
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ Raw fetch_position(Index index, Index query_level) const {
    Raw raw = {};
    if (wide) {
      const Pack<A, 2> offset = reinterpret_cast<const Pack<A, 2>*>(offsets)[index];
      raw.x = offset.at[0], raw.y = offset.at[1];
    } else if constexpr (sizeof(T) == 2) {
      raw.x = __uint_as_float(reinterpret_cast<const uint32_t*>(offsets)[index]);
    }
    fetch_reference(query_level, raw);
    return raw;
  }
  template <bool ONCE = false, bool LINE = false, typename Index>
  __device__ __forceinline__ void fetch_weight(Index index, Raw& raw) const {
    if (wide) {
      raw.weight = reinterpret_cast<const A*>(logits)[index];
    } else if constexpr (sizeof(T) == 2) {
      raw.weight = __uint_as_float(reinterpret_cast<const uint16_t*>(logits)[index]);
    }
  }
  template <bool ONCE = false, int N, typename Index>
  __device__ __forceinline__ void fetch_run(Index index, Index query_level, Raw (&raw)[N]) const {
    if constexpr (N == 1 || sizeof(A) > 4) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw[i] = fetch_position(index + i, query_level);
        fetch_weight(index + i, raw[i]);
      }
      return;
    }
    fetch_reference(query_level, raw[0]);
#pragma unroll
    for (int i = 1; i < N; ++i) raw[i] = raw[0];
    if (wide) {
      const auto* from = reinterpret_cast<const Pack<A, 4>*>(offsets + int64_t{index} * 2 * sizeof(A));
      const auto logit = *reinterpret_cast<const Pack<A, N>*>(logits + int64_t{index} * sizeof(A));
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const Pack<A, 4> offset = from[i / 2];
        raw[i].x = offset.at[0], raw[i].y = offset.at[1], raw[i + 1].x = offset.at[2], raw[i + 1].y = offset.at[3];
      }
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i].weight = logit.at[i];
    } else if constexpr (sizeof(T) == 2) {
      const auto offset = *reinterpret_cast<const Pack<uint32_t, N>*>(offsets + int64_t{index} * 4);
      const auto logit = *reinterpret_cast<const Pack<uint16_t, N>*>(logits + int64_t{index} * 2);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        raw[i].x = __uint_as_float(offset.at[i]), raw[i].weight = __uint_as_float(logit.at[i]);
      }
    }
  }
  __device__ __forceinline__ A logit_of(A raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!wide) {
        const uint16_t bits = static_cast<uint16_t>(__float_as_uint(raw));
        return to_accumulate(*reinterpret_cast<const T*>(&bits));
      }
    }
    return raw;
  }
  __device__ __forceinline__ Pack<A, 2> offset_of(const Raw& raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!wide) {
        const uint32_t bits = __float_as_uint(raw.x);
        A offset[2];
        unpack(*reinterpret_cast<const Pack<T, 2>*>(&bits), offset);
        return {offset[0], offset[1]};
      }
    }
    return {raw.x, raw.y};
  }
  // Written with fma, so that every kernel finds the same cell.
  __device__ __forceinline__ void position(const Raw& raw, const Level& level, int points, A& x, A& y) const {
    const Pack<A, 2> offset = offset_of(raw);
    const A W = level.W, H = level.H, share = A(0.5) / points;
    const A center_x = fma(raw.center_x, W, A(-0.5)), center_y = fma(raw.center_y, H, A(-0.5));
    x = boxes ? fma(offset.at[0], raw.w * W * share, center_x) : center_x + offset.at[0];
    y = boxes ? fma(offset.at[1], raw.h * H * share, center_y) : center_y + offset.at[1];
  }
  // The softmax of a row, worked out by `lanes` neighbouring threads (a power of two) that all come here.
  __device__ __forceinline__ Row row_of_lanes(bool exists, uint32_t first, int K, int lane, int lanes) const {
    constexpr int kEach = 4;  // loads in flight
    A largest = kLeast, sum = 0;
    for (int k = lane; exists && k < K; k += kEach * lanes) {
      A logit[kEach], top = largest;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        Raw raw;
        raw.weight = 0;
        if (k + i * lanes < K) fetch_weight(first + k + i * lanes, raw);
        logit[i] = k + i * lanes < K ? logit_of(raw.weight) : -static_cast<A>(INFINITY);
        top = logit[i] > top ? logit[i] : top;  // a NaN stays out, and makes the sum NaN
      }
      sum *= exp(largest - top);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += exp(logit[i] - top);
      largest = top;
    }
    A top = largest;
    for (int step = 1; step < lanes; step *= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, top, step);
      top = other > top ? other : top;
    }
    sum *= exp(largest - top);
    for (int step = 1; step < lanes; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return {top, A(1) / sum};
  }
  // The same where LANES threads hold the row's logits already; has(i): whether the i-th of this one exists.
  template <int LANES, int N, typename Has>
  __device__ __forceinline__ Row row_of_raw(const Raw (&raw)[N], const Has& has) const {
    A largest = kLeast, sum = 0, logit[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      logit[i] = has(i) ? logit_of(raw[i].weight) : -static_cast<A>(INFINITY);
      largest = logit[i] > largest ? logit[i] : largest;  // a NaN stays out, and makes the sum NaN
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      const A other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp(logit[i] - largest);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return {largest, A(1) / sum};
  }
  __device__ __forceinline__ Row row_at(int64_t row) const { return rows[row]; }
  __device__ __forceinline__ A weight(const Raw& raw, const Row& row) const { return row.weight(logit_of(raw.weight)); }
};

// Lanes of a warp in the group of `size` threads that this thread belongs to.
template <int SIZE>
__device__ __forceinline__ unsigned group_mask() {
  if constexpr (SIZE == 32) return 0xffffffffu;
  return ((1u << (SIZE % 32)) - 1) << (threadIdx.x % 32 / SIZE * SIZE);
}

// Forward.
//
// A row is one (b, q, g). LANES neighbouring threads own a row's channels, VEC of them each (16 bytes), and SPLIT such
// groups share the row's L * P samples; a group walks ROWS rows. Its threads first compute the samples' metadata (16
// bytes in shared memory, which only their warp reads, so a warp barrier suffices), then walk them with branch-free
// loads. The next samples' locations are fetched meanwhile. A block owns neighbouring queries of one head, or of the
// few heads whose rows share a 128-byte line, so that the first-level cache serves most loads. Each output is written
// once. Most decoders and encoders have kernels of their own, decoder_kernel and pyramid_kernel.

constexpr int kForwardThreads = 1024;  // at most: 64 registers a thread hold four samples' loads in flight

// A sample as a square of texels of the map, moved inside it: corners (texel, + column) and the same one row further,
// of which no check is needed. On the fringe, where only a part of the sample falls inside, the fractions point at the
// texels that do, and the weight carries the part.
template <typename A>
struct alignas(16) Sample {
  A top, bottom;  // the weight's shares of the upper and of the lower row
  A fx;
  uint32_t texel;  // counted from the first row of value; in pyramid_kernel that row's offset in bytes
};

// Where the samples of the i-th of several groups begin in shared memory, BYTES a group, so that a store of
// neighbouring samples and a load of one sample of each group fall into different banks.
template <int BYTES>
__host__ __device__ constexpr int samples_offset(int i) {
  return BYTES >= 128 ? i * (BYTES + 16) : i / 2 * (2 * BYTES + 16) + i % 2 * BYTES;
}

// From a texel to the next column and to the next row: 0 where a level has only one.
struct Steps {
  uint32_t column, row;
  __device__ __forceinline__ static Steps of(const Level& level) {
    return {level.W > 1 ? 1u : 0u, level.H > 1 ? static_cast<uint32_t>(level.W) : 0u};
  }
};

// v in 0..1; NaN becomes 0.
__device__ __forceinline__ float saturate(float v) { return __saturatef(v); }
__device__ __forceinline__ double saturate(double v) { return fmin(fmax(v, 0.0), 1.0); }
// Towards zero; numbers beyond the integers become the nearest one.
__device__ __forceinline__ int32_t truncate(float v) { return __float2int_rz(v); }
__device__ __forceinline__ int32_t truncate(double v) { return __double2int_rz(v); }

// Along one axis of `size` texels: the first of the two texels that a sample at x reads, the fraction of the way to the
// second, and the part of the sample that falls inside the map (NaN: none).
template <typename A>
__device__ __forceinline__ int32_t place(A x, int32_t size, A& fraction, A& part) {
  const int32_t first = min(truncate(fmax(x, A(0))), max(size - 2, 0));
  fraction = saturate(x - static_cast<A>(first));
  part = saturate(fmin(x + A(1), static_cast<A>(size) - x));
  return first;
}

// points: of its row on its level.
template <typename A, typename Source>
__device__ __forceinline__ Sample<A> make_sample(const Source& source, const typename Source::Raw& raw,
                                                 const typename Source::Row& row, const Level& level, int points,
                                                 bool exists) {
  A x, y, fy, part_x, part_y;
  source.position(raw, level, points, x, y);
  Sample<A> sample;
  const int32_t first_x = place(x, level.W, sample.fx, part_x);
  const int32_t first_y = place(y, level.H, fy, part_y);
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
    return samples_offset<(sizeof(Sample<A>) + (kMixed ? sizeof(Steps) : 0)) * kBatch>(group);
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
__global__ void __launch_bounds__(kForwardThreads, 1)  // 1: take the 64 registers
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
__global__ void __launch_bounds__(kForwardThreads, 1)
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
  const auto of_run = [&](const auto& known, int k) {  // by selection: lanes would wait for one another's arguments
    auto found = known[0];
#pragma unroll
    for (int r = 1; r < kChunk / kRun; ++r) {
      if (k >= r * kRun) found = known[r];
    }
    return found;
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
// levels, and those that follow lie beside them, so the first-level cache keeps their windows of the map. It is the
// path from that cache that bounds the kernel. LANES threads own a row, as above; a warp works on 32 / LANES rows at a
// time, those of a query's heads that share a line beside each other. It first computes a pass of samples of each, some
// of which a lane fetches by one load; one of each lane at a time is in shared memory, which only this warp reads. A
// warp works out the queries of its next turns by itself, so that blocks, and their parts of different heads, begin
// without a barrier. WHOLE: the samples of a row are a multiple of kPass, and those of a level of four. MIXED: those of
// a level are no multiple of four. COLUMN: for 8 heads of 32 channels and rows of one pass, whose levels the host
// knows, the bytes from any texel to its right neighbour, an immediate of the load; else 0. Each output is written
// once.
//
// Loops that run once a block are not unrolled: their instructions come from memory, before there is other work.
constexpr int kRegionHeight = 16, kRegionWidth = 8;  // texels of the largest level
constexpr int kMaxRegions = 512, kMaxEdges = 128;    // in all; of a level
constexpr size_t kPyramidShared = 96 << 10;

constexpr int kPyramidThreads = 640;  // 96 registers a thread; a multiple of four warps, so that no scheduler has more

template <typename A, int LANES, bool WHOLE>
struct PyramidWalk {
  static constexpr int kEach = WHOLE && sizeof(A) == 4 ? greatest(1, 16 / LANES) : 1;
  static constexpr int kRows = 32 / LANES, kRowBits = LANES == 4 ? 3 : LANES == 8 ? 2 : LANES == 16 ? 1 : 0;
  static constexpr int kPass = LANES * kEach, kRing = 64;  // kRing: queries that a warp knows
  __host__ __device__ static constexpr int row_offset(int row) {
    return samples_offset<sizeof(Sample<A>) * LANES>(row);
  }
  static constexpr int kWarpBytes = row_offset(kRows) + sizeof(uint32_t) * kRing;
};

// From a texel to the next row, in bytes, for each run of four samples of a row of 16; 0 where a level has only one
// row.
struct KnownSteps {
  uint32_t below[4];
};

// Regions: bands of columns, in shared memory. edges: level after level, the first row of each band and its end, then
// the same of the columns. starts: the number of queries before each region.
struct Regions {
  const Level* table;
  int L, bands, columns;
  int32_t *starts, *edges;  // [kMaxRegions + 1], [L, edges_of_level()]

  __host__ __device__ static constexpr size_t bytes(int64_t L) {
    return sizeof(int32_t) * (kMaxRegions + 1 + L * kMaxEdges);
  }
  __device__ __forceinline__ static int ceil_div(int a, int b) { return a / b + (a % b > 0); }
  __device__ __forceinline__ int edges_of_level() const { return bands + columns + 2; }

  // All threads of the block. memory: of bytes(L).
  __device__ __forceinline__ Regions(const Level* table, int L, int32_t* memory)
      : table(table), L(L), starts(memory), edges(memory + kMaxRegions + 1) {
    int H = 1, W = 1;
#pragma unroll 1
    for (int l = 0; l < L; ++l) H = max(H, table[l].H), W = max(W, table[l].W);
    bands = ceil_div(H, kRegionHeight), columns = ceil_div(W, kRegionWidth);
#pragma unroll 1
    for (int size = 2; bands * columns > kMaxRegions || edges_of_level() > kMaxEdges; size *= 2) {
      bands = ceil_div(H, kRegionHeight * size), columns = ceil_div(W, kRegionWidth * size);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < L * edges_of_level(); i += blockDim.x) {
      const int l = i / edges_of_level(), j = i - l * edges_of_level();
      const bool is_row = j <= bands;
      const int size = is_row ? table[l].H : table[l].W, parts = is_row ? bands : columns;
      const int part = is_row ? j : j - bands - 1;
      edges[i] = size / parts * part + size % parts * part / parts;  // size * part / parts
    }
    __syncthreads();  // the edges are complete
#pragma unroll 1
    for (int i = threadIdx.x; i <= bands * columns; i += blockDim.x) {
      const int band = i / columns, column = i - band * columns;
      int32_t before = 0;
#pragma unroll 1
      for (int l = 0; l < L; ++l) {
        const int32_t *y = edges + l * edges_of_level() + band, *x = edges + l * edges_of_level() + bands + 1;
        before += table[l].W * y[0];
        if (column > 0) before += (y[1] - y[0]) * x[column];
      }
      starts[i] = before;
    }
    __syncthreads();  // the regions are known
  }

  // The query at a place of the pyramid in the order of regions.
  __device__ __forceinline__ uint32_t query_at(int32_t place) const {
    int low = 0, high = bands * columns;  // starts[low] <= place < starts[high]
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= place)
        low = middle;
      else
        high = middle;
    }
    const int band = low / columns, column = low - band * columns;
    int32_t rest = place - starts[low];
#pragma unroll 1
    for (int l = 0; l < L; ++l) {
      const int32_t *of_level = edges + l * edges_of_level(), *y = of_level + band, *x = of_level + bands + 1 + column;
      const int32_t height = y[1] - y[0], size = height * (x[1] - x[0]);
      if (rest < size) {
        const int32_t in_x = static_cast<uint32_t>(rest) / static_cast<uint32_t>(height);
        return table[l].start + (y[0] + rest - in_x * height) * table[l].W + x[0] + in_x;
      }
      rest -= size;
    }
    return 0;
  }
};

template <typename T, typename A, typename Source, int VEC, int LANES, bool WHOLE, bool MIXED, uint32_t COLUMN>
__global__ void __launch_bounds__(kPyramidThreads, 1)
    pyramid_kernel(const T* __restrict__ value, const Levels levels, const Source source, T* __restrict__ output,
                   const ForwardSizes sizes, uint32_t share, const __grid_constant__ KnownSteps known) {
  using Walk = PyramidWalk<A, LANES, WHOLE>;
  constexpr int kEach = Walk::kEach, kPass = Walk::kPass, kWarps = kPyramidThreads / 32;
  constexpr int kSame = MIXED ? 1 : 4;                    // neighbouring samples that lie on one level
  constexpr int kRuns = WHOLE ? kPass / kSame : 1;        // of a pass
  constexpr bool kAhead = WHOLE || !Source::kNeedsLevel;  // loads the next samples early
  constexpr uint32_t kNone = 0xffffffffu;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = COLUMN > 0 ? kPass : sizes.K, G = sizes.G, C = sizes.C;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t texel_bytes = COLUMN > 0 ? COLUMN : sizes.texel_bytes;
  auto* table = reinterpret_cast<Level*>(shared + Walk::kWarpBytes * kWarps);  // [L]
  auto* level_of = table + L;                                    // [K / kSame], with the level's number as `end`
  auto* steps = reinterpret_cast<Steps*>(level_of + K / kSame);  // [K / kSame], in bytes
  const bool follow = load_levels(levels, L, sizes.S, table);
#pragma unroll 1
  for (int i = threadIdx.x; i < K / kSame; i += kPyramidThreads) {
    int l = 0;
#pragma unroll 1
    while (i * kSame >= table[l].end) ++l;
    const Steps texels = Steps::of(table[l]);
    level_of[i] = {table[l].start, table[l].H, table[l].W, l};
    steps[i] = {texels.column * texel_bytes, texels.row * texel_bytes};
  }
  const Regions regions(table, L, reinterpret_cast<int32_t*>(steps + K / kSame));  // level_of is complete, too

  const uint32_t Q = sizes.Q;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * share;
  const int64_t total = static_cast<int64_t>(sizes.heads) * sizes.slices * Q;
  uint32_t task = static_cast<uint32_t>(begin / Q),
           first = static_cast<uint32_t>(begin - static_cast<int64_t>(task) * Q);
  uint32_t left = begin < total ? static_cast<uint32_t>(min(total - begin, static_cast<int64_t>(share))) : 0;
  // COLUMN: of 8 heads of 32 channels, in 16 bit two share a line.
  const int head_bits = COLUMN > 0 ? (sizeof(T) == 2 ? 1 : 0) : sizes.head_bits;
  const int row = lane / LANES, channel_lane = lane % LANES, head_of_row = row & ((1 << head_bits) - 1);
  const int query_of_row = row >> head_bits, query_bits = Walk::kRowBits - head_bits;  // of a turn
  char* const my_memory = shared + warp * Walk::kWarpBytes;
  auto* samples = reinterpret_cast<Sample<A>*>(my_memory + Walk::row_offset(row));
  auto* ring = reinterpret_cast<uint32_t*>(my_memory + Walk::row_offset(Walk::kRows));

  // What a pass needs of its levels: that of this lane's samples, and the steps of every run. A row of one pass has the
  // same ones in every turn.
  Level level;
  int points = 0;
  Steps run_steps[kRuns];
  const auto take_level = [&](int k) {
    level = level_of[min(k, K - 1) / kSame];
    if constexpr (Source::kNeedsLevel) {
      points = table[level.end].end - (level.end > 0 ? table[level.end - 1].end : 0);
    }
  };
  const auto take_runs = [&](int k0) {
    take_level(k0 + channel_lane * kEach);
#pragma unroll
    for (int r = 0; COLUMN == 0 && r < kRuns; ++r) run_steps[r] = steps[k0 / kSame + r];
  };
  const auto step_of = [&](int k0, int i) -> Steps {  // of the pass's i-th sample
    if constexpr (COLUMN > 0) {
      return {COLUMN, known.below[i / kSame]};
    } else {
      return WHOLE ? run_steps[i / kSame] : steps[(k0 + i) / kSame];
    }
  };
  if (WHOLE) take_runs(0);
#pragma unroll 1
  while (left > 0) {  // a head after the other, or what of it is the block's
    const uint32_t count = min(left, Q - first);
    const uint32_t head_block = task / sizes.slices, head_blocks = static_cast<uint32_t>(G) >> head_bits;
    const uint32_t b = head_block / head_blocks;
    const int g = ((head_block - b * head_blocks) << head_bits) + head_of_row;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, (image_rows + g) * K);  // from head g
    const int c = (task - head_block * sizes.slices) * (LANES * VEC) + channel_lane * VEC;
    // Lanes past the last channel read the first ones.
    const char* base =
        reinterpret_cast<const char*>(value + (static_cast<int64_t>(b) * sizes.S * G + g) * C + (c < C ? c : 0));

    // The queries of this turn of the warp and of those that follow it: 32 at a time, one by each lane.
    const auto find_queries = [&](uint32_t turn) {
      const uint32_t place = ((turn + (lane >> query_bits) * kWarps) << query_bits) + (lane & ((1 << query_bits) - 1));
      __syncwarp();  // the queries of the previous head have been read
      ring[((turn / kWarps << query_bits) + lane) % Walk::kRing] = place >= count ? kNone
                                                                   : follow       ? regions.query_at(first + place)
                                                                                  : first + place;
      __syncwarp();  // these are complete
    };
    const auto query_of = [&](uint32_t turn) {  // of this lane's row
      return ring[((turn / kWarps << query_bits) + query_of_row) % Walk::kRing];
    };
    typename Source::Raw raw[kEach];
    const auto fetch = [&](uint32_t query, int k) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) raw[i] = {};
      if (query == kNone || (!WHOLE && k >= K)) return;
      const uint32_t query_level = query * L + (Source::kNeedsLevel ? level_of[k / kSame].end : 0);
      image.template fetch_run<true>(query * (G * K) + k, query_level, raw);
    };
    const uint32_t turns = (count + (1u << query_bits) - 1) >> query_bits;
    find_queries(warp);
    uint32_t query = query_of(warp);
    if (kAhead) fetch(query, channel_lane * kEach);
#pragma unroll 1
    for (uint32_t turn = warp; turn < turns; turn += kWarps) {
      const uint32_t next = turn + kWarps;
      if ((next / kWarps << query_bits) % 32 == 0) find_queries(next);
      const uint32_t next_query = query_of(next);
      typename Source::Row softmax;
      if (WHOLE && K == kPass) {
        softmax = image.template row_of_raw<LANES>(raw, [](int) { return true; });
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
          Sample<A> prepared = make_sample<A>(image, raw[j], softmax, level, points, WHOLE || k < K);
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
            if (!WHOLE && k0 + i >= K) break;
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

// Backward.
//
// A cell is the square between four texel centres that a sample falls into: (H + 1) * (W + 1) of them a level, border
// cells included. The samples of each (batch, head, level) are sorted by cell, and in a cell by query and point, in two
// steps. A bin is a run of cells that holds some 1000 samples, less than a block sorts at once, if they spread evenly.
// count_kernel counts the samples of each bin, scan_kernel turns counts into places, scatter_kernel writes the samples
// there as records, 16 bytes each, a bin's in any order, and sort_kernel sorts each bin and says where its cells begin.
// In gather_kernel a block owns a tile of texels and the cells around it: a group of LANES threads takes a cell, holds
// its four texels of value and their four gradients in registers and walks the records, reading one row of grad_output
// each. So every sample costs one row instead of four of value and four atomic ones, and grad_value is written once, in
// its own type: no atomics, no zero-fill, no float32 copy. Cells on the seam of two tiles are walked by both for
// grad_value; one of them writes the samples' own gradients. No two threads write one address but the integer counters
// of bins, and what their order changes is undone by sort_kernel: the results do not differ between runs. Scratch: 32
// bytes a sample, 4 a cell. Where samples are few, direct_kernel replaces all of this, and for an encoder
// pyramid_grad_kernel, but for deterministic mode.

constexpr int kSampleThreads = 256;  // one thread a sample
constexpr int kScanThreads = 256;    // one block a (batch, head, level)
constexpr int kGatherThreads = 256;
constexpr int kSlots = 96;  // cells of a tile times the groups that share a cell: 48 KB of sums at 128 bytes a corner

// The tile of a level: its cells, and how many groups share a cell. The more records a cell holds, the smaller the
// tile.
struct Tile {
  int32_t cells_x, cells_y, part_bits;  // 2^part_bits groups share a cell
  __host__ __device__ constexpr int texels_x() const { return cells_x - 1; }
  __host__ __device__ constexpr int texels_y() const { return cells_y - 1; }
};

// samples: of the level for one (batch, head).
__host__ __device__ __forceinline__ Tile tile_of_shape(int shape) {
  return shape == 0 ? Tile{12, 8, 0} : shape == 1 ? Tile{8, 6, 1} : Tile{6, 4, 2};
}
__host__ __device__ __forceinline__ int tile_shape_of(int64_t samples, int64_t H, int64_t W) {
  const int64_t cells = (H + 1) * (W + 1);
  return samples >= 128 * cells ? 2 : samples >= 48 * cells ? 1 : 0;
}

__host__ __device__ __forceinline__ int64_t tiles_of(const Tile& tile, int64_t H, int64_t W) {
  return H > 0 ? (H + tile.texels_y() - 1) / tile.texels_y() * ((W + tile.texels_x() - 1) / tile.texels_x()) : 0;
}

template <typename A>
struct alignas(16) Record {
  int32_t sample;  // query << point_bits | point
  A fx, fy, weight;
};

__host__ __device__ __forceinline__ int64_t cells_of(int64_t H, int64_t W) { return H > 0 ? (H + 1) * (W + 1) : 0; }

// Bins: as many cells, a power of two, as hold kBinSamples if the samples of the level spread evenly.
constexpr int64_t kBinSamples = 1400;
constexpr int kMaxBinBits = 11;
__host__ __device__ __forceinline__ int bin_bits_of(int64_t samples, int64_t cells) {
  int bits = 0;
  while (bits < kMaxBinBits && samples << (bits + 1) <= cells * kBinSamples) ++bits;
  return bits;
}
__host__ __device__ __forceinline__ int64_t bins_of(int64_t cells, int bin_bits) {
  return (cells + (int64_t{1} << bin_bits) - 1) >> bin_bits;
}

// The cell of a sample that counts.
template <typename A>
__device__ __forceinline__ uint32_t cell_of(A x, A y, int32_t W) {
  const int32_t column = static_cast<int32_t>(floor(x)) + 1, row = static_cast<int32_t>(floor(y)) + 1;
  return static_cast<uint32_t>(row) * (W + 1u) + column;
}

// Where the gradients of the samples go: the plain form's tensors, or, for the fused form's last kernel, 16 bytes a
// sample with its weight.
template <typename A>
struct SampleGrads {
  A* locations;        // [B, Q, G, K, 2]
  A* weights;          // [B, Q, G, K]
  Pack<A, 4>* packed;  // [B, Q, G, K] (weight, gradient of weight, of x, of y), instead of both

  // add: to what another turn of channels has left.
  __device__ __forceinline__ void put(int64_t index, A weight, A of_weight, A of_x, A of_y, bool add) const {
    if (packed != nullptr) {
      if (add) of_weight += packed[index].at[1], of_x += packed[index].at[2], of_y += packed[index].at[3];
      packed[index] = {weight, of_weight, of_x, of_y};
    } else {
      auto* location = reinterpret_cast<Pack<A, 2>*>(locations) + index;
      if (add) of_weight += weights[index], of_x += location->at[0], of_y += location->at[1];
      weights[index] = of_weight;
      *location = {of_x, of_y};
    }
  }
};

// What the kernels below need to know of a level, worked out once on the device, where level_shapes may be.
struct alignas(16) LevelPlan {
  Level level;
  int64_t first_slot;  // of its cells among those of its (batch, head); one entry more: the end of the last cell
  int32_t tiles, tile_shape;
  int32_t first_point, points;        // of a row's samples
  int32_t first_bin, bins, bin_bits;  // first_bin: as first_slot; a bin is 2^bin_bits cells
  bool disjoint, cover;               // of all levels, in the first entry: no row in two of them; every row in one
};

__global__ void plan_kernel(const Levels levels, LevelPlan* __restrict__ plan, int L, int64_t S, int64_t Q) {
  int64_t slot = 0, rows = 0;
  int32_t first_point = 0, bin = 0;
  bool disjoint = true;
  for (int l = 0; l < L; ++l) {
    const Level level = read_level(levels, l, S);
    const int64_t area = static_cast<int64_t>(level.H) * level.W;
    for (int k = 0; k < l; ++k) {
      const Level other = plan[k].level;
      disjoint = disjoint && (level.start + area <= other.start ||
                              other.start + static_cast<int64_t>(other.H) * other.W <= level.start);
    }
    const int32_t points = level.end - first_point;
    const int shape = tile_shape_of(Q * points, level.H, level.W);
    const int64_t tiles = tiles_of(tile_of_shape(shape), level.H, level.W);
    const int64_t cells = cells_of(level.H, level.W);
    const int bin_bits = bin_bits_of(Q * points, cells);
    const int32_t bins = static_cast<int32_t>(bins_of(cells, bin_bits));
    plan[l] = {level, slot, static_cast<int32_t>(tiles), shape, first_point, points, bin, bins, bin_bits, false, false};
    slot += cells + 1, bin += bins + 1, rows += area, first_point = level.end;
  }
  if (L > 0) plan[0].disjoint = disjoint, plan[0].cover = disjoint && rows == S;
}

// Rows that belong to no level, or to several, must be zero before gather_kernel.
__global__ void zero_kernel(const LevelPlan* __restrict__ plan, char* __restrict__ to, int64_t bytes) {
  if (plan[0].cover) return;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  for (; at + 16 <= bytes; at += stride) *reinterpret_cast<uint4*>(to + at) = uint4{};
  for (int64_t i = at; i < bytes && i < at + 16; ++i) to[i] = 0;
}

// All threads of the block: the plan into shared memory.
__device__ __forceinline__ void load_plan(const LevelPlan* plan, int L, LevelPlan* table) {
  for (int l = threadIdx.x; l < L; l += blockDim.x) table[l] = plan[l];
  __syncthreads();
}

// What a block of the sample kernels takes of a head: as many neighbouring queries, all of their samples or
// kPieceThreads of each, as give a thread kPieceEach samples. These are the same sample k of queries `step` apart.
constexpr int kPieceThreads = 512;
template <typename A>
constexpr int kPieceEach = 64 / sizeof(Record<A>);  // 32 KB of records a block
constexpr int kMostLocalBins = 8192;                // of a head: beyond, samples are counted in global memory

struct PieceWalk {
  uint32_t head, query, step, k, Q;
  int64_t index, row, query_level, index_step, row_step, query_level_step;  // of the first query; to the next
  LevelPlan at;                                                             // of the samples

  static __host__ __device__ __forceinline__ uint32_t parts(uint32_t K) {
    return (K + kPieceThreads - 1) / kPieceThreads;
  }
  // Queries of a piece.
  static __host__ __device__ __forceinline__ uint32_t queries(uint32_t K, int each) {
    return (K < kPieceThreads ? kPieceThreads / K : 1) * each;
  }
  __device__ __forceinline__ PieceWalk(const MsDeformAttnProblem& problem, const LevelPlan* table, int each) {
    const uint32_t K = problem.K, G = problem.G, L = problem.L, in_piece = queries(K, each), of_part = parts(K);
    Q = problem.Q;
    const uint32_t of_head = (Q + in_piece - 1) / in_piece * of_part;
    head = blockIdx.x / of_head;
    const uint32_t piece = blockIdx.x - head * of_head, part = piece % of_part,
                   turn = of_part == 1 ? threadIdx.x / K : 0;
    step = in_piece / each, query = piece / of_part * in_piece + turn;
    k = part * kPieceThreads + threadIdx.x - turn * K;
    if (turn >= step || k >= K) query = Q, k = 0;  // idle
    int l = 0;
    while (k >= static_cast<uint32_t>(table[l].level.end)) ++l;
    at = table[l];
    const uint32_t b = head / G;
    const int64_t first_query = static_cast<int64_t>(b) * Q + query;
    row = first_query * G + (head - b * G), index = row * K + k, query_level = first_query * L + l;
    row_step = static_cast<int64_t>(step) * G, index_step = row_step * K,
    query_level_step = static_cast<int64_t>(step) * L;
  }
  __device__ __forceinline__ bool exists(int j) const { return query + j * step < Q; }
  // Whether sample j, at this position, counts, and its bin among those of the head.
  template <typename A>
  __device__ __forceinline__ bool find_bin(int j, A x, A y, uint32_t& bin) const {
    const Level& level = at.level;
    if (!(exists(j) && level.H > 0 && x > A(-1) && y > A(-1) && x < A(level.W) && y < A(level.H))) return false;
    bin = at.first_bin + (cell_of(x, y, level.W) >> at.bin_bits);
    return true;
  }
};

// local_bins: head_bins, or 0 where they are too many for shared memory.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    count_kernel(const LevelPlan* __restrict__ plan, const Source source, int32_t* __restrict__ counts,
                 const SampleGrads<A> grads, const MsDeformAttnProblem problem, int head_bins, int local_bins) {
  constexpr int kEach = kPieceEach<A>;
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);                  // [L]
  auto* local_counts = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins]
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local_counts[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kEach);
  counts += static_cast<int64_t>(walk.head) * head_bins;
  typename Source::Raw raw[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    raw[j] = source.fetch_position(walk.index + j * walk.index_step, walk.query_level + j * walk.query_level_step);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (walk.find_bin(j, x, y, bin)) {
      local_bins > 0 ? atomicAdd(local_counts + bin, 1) : atomicAdd(counts + bin, 1);
    } else if (walk.exists(j)) {
      const int64_t index = walk.index + j * walk.index_step;
      const A nothing = walk.at.level.H > 0 ? A(0) : quiet_nan<A>();
      A weight = 0;
      if (grads.packed != nullptr) {
        source.fetch_weight(index, raw[j]);
        weight = source.weight(raw[j], source.row_at(walk.row + j * walk.row_step));
      }
      grads.put(index, weight, nothing, nothing, nothing, false);
    }
  }
  __syncthreads();  // the piece is counted
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    if (local_counts[i] > 0) atomicAdd(counts + i, local_counts[i]);
  }
}

// counts -> starts among the head's records, in place: one block a (batch, head, level).
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const LevelPlan* __restrict__ plan, int32_t* __restrict__ counts, const MsDeformAttnProblem problem,
                int head_bins) {
  const int L = static_cast<int>(problem.L), l = blockIdx.x % L;
  int32_t* mine = counts + static_cast<int64_t>(blockIdx.x / L) * head_bins + plan[l].first_bin;
  const int32_t end =
      place_counts<kScanThreads>(mine, mine, 0, plan[l].bins, plan[l].first_point * static_cast<int32_t>(problem.Q));
  if (threadIdx.x == 0) mine[plan[l].bins] = end;
}

// Sorts its piece by bin in shared memory, so that records of one bin are written side by side.
template <typename A, typename Source>
__global__ void __launch_bounds__(kPieceThreads, 3)
    scatter_kernel(const LevelPlan* __restrict__ plan, const Source source, const int32_t* __restrict__ bin_starts,
                   int32_t* __restrict__ filled, Record<A>* __restrict__ records, const MsDeformAttnProblem problem,
                   int head_bins, int local_bins, int point_bits) {
  constexpr int kEach = kPieceEach<A>, kPiece = kPieceThreads * kEach, kRankBits = 11;
  static_assert(kPiece <= 1 << kRankBits, "bin and rank share a number");
  extern __shared__ __align__(16) char shared[];
  auto* staged = reinterpret_cast<Record<A>*>(shared);          // [kPiece]
  auto* bin_of = reinterpret_cast<uint16_t*>(staged + kPiece);  // [kPiece]
  auto* table = reinterpret_cast<LevelPlan*>(bin_of + kPiece);  // [L]
  auto* local = reinterpret_cast<int32_t*>(table + problem.L);  // [local_bins + 1] counts, then starts
  int32_t* to_head = local + local_bins + 1;                    // [local_bins] from places in the piece
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) local[i] = 0;
  load_plan(plan, static_cast<int>(problem.L), table);
  const PieceWalk walk(problem, table, kEach);
  bin_starts += static_cast<int64_t>(walk.head) * head_bins, filled += static_cast<int64_t>(walk.head) * head_bins;
  records += walk.head * problem.K * problem.Q;
  typename Source::Raw raw[kEach];
  typename Source::Row row[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    raw[j] = {};
    if (!walk.exists(j)) continue;
    const int64_t index = walk.index + j * walk.index_step;
    raw[j] = source.fetch_position(index, walk.query_level + j * walk.query_level_step);
    source.fetch_weight(index, raw[j]);
    row[j] = source.row_at(walk.row + j * walk.row_step);
  }
  Record<A> record[kEach];
  int32_t place[kEach];  // bin and rank
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    place[j] = -1;
    A x, y;
    source.position(raw[j], walk.at.level, walk.at.points, x, y);
    uint32_t bin;
    if (!walk.find_bin(j, x, y, bin)) continue;
    const uint32_t sample = (walk.query + j * walk.step) << point_bits | (walk.k - walk.at.first_point);
    record[j] = {static_cast<int32_t>(sample), x, y, source.weight(raw[j], row[j])};
    if (local_bins > 0) {
      place[j] = bin << kRankBits | atomicAdd(local + bin, 1);
    } else {
      records[bin_starts[bin] + atomicAdd(filled + bin, 1)] = record[j];
    }
  }
  if (local_bins == 0) return;
  __syncthreads();  // the piece is counted
  const int32_t total = place_counts<kPieceThreads>(local, local, 0, local_bins, 0);
  if (threadIdx.x == 0) local[local_bins] = total;
  __syncthreads();  // the bins' places are known
  for (int i = threadIdx.x; i < local_bins; i += kPieceThreads) {
    const int32_t count = local[i + 1] - local[i];
    if (count > 0) to_head[i] = bin_starts[i] + atomicAdd(filled + i, count) - local[i];
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (place[j] < 0) continue;
    const int32_t bin = place[j] >> kRankBits, at = local[bin] + (place[j] & ((1 << kRankBits) - 1));
    staged[at] = record[j], bin_of[at] = static_cast<uint16_t>(bin);
  }
  __syncthreads();  // the piece is sorted
  for (int i = threadIdx.x; i < total; i += kPieceThreads) records[to_head[bin_of[i]] + i] = staged[i];
}

// A block sorts a bin by cell and, in a cell, by a number that no two samples share. Up to kWindow records it sorts in
// shared memory: it counts them by the leading bits of this key, places them, and compares those that share these bits.
// Of a larger bin, it picks one window of keys after another out of all of its records. Also writes where cells begin,
// among the level's records.
constexpr int kSortThreads = 512;
constexpr int kWindowEach = 4, kWindow = kSortThreads * kWindowEach;
constexpr int kKeyBits = 11, kKeyBuckets = 1 << kKeyBits;
static_assert(kMaxBinBits <= kKeyBits, "a cell begins with a bucket");
static_assert(kKeyBuckets == 4 * kSortThreads, "a thread has four buckets");

template <typename A>
struct alignas(16) SortScratch {
  Record<A> records[kWindow];
  int32_t buckets[kKeyBuckets + 4];  // counts, then starts and the end
  uint32_t keys[kWindow];
  int32_t picked;
};

template <typename A>
struct BinKeys {
  uint32_t first_cell;
  int32_t W;
  int sample_bits, point_bits;
  // Of the bin.
  __device__ __forceinline__ uint32_t cell(const Record<A>& record) const {
    return cell_of(record.fx, record.fy, W) - first_cell;
  }
  // The query's bits in reverse, then the point: neighbouring queries have different leading bits.
  __device__ __forceinline__ uint32_t sample(const Record<A>& record) const {
    const uint32_t query = static_cast<uint32_t>(record.sample) >> point_bits,
                   point = record.sample & ((1u << point_bits) - 1);
    return __brev(query) >> (32 - (sample_bits - point_bits)) << point_bits | point;
  }
  __device__ __forceinline__ uint64_t operator()(const Record<A>& record) const {
    return static_cast<uint64_t>(cell(record)) << sample_bits | sample(record);
  }
};

// Where the starts of a bin's cells go.
struct CellStarts {
  int32_t* to;
  int32_t before, cells, shift;  // records of earlier bins; a cell has 2^shift buckets
  bool ends;                     // the level's last bin

  // All threads of the block.
  __device__ __forceinline__ void write(const int32_t* buckets) const {
    for (int32_t cell = threadIdx.x; cell < cells; cell += kSortThreads) to[cell] = before + buckets[cell << shift];
    if (ends && threadIdx.x == 0) to[cells] = before + buckets[kKeyBuckets];
  }
};

// All threads of the block: counts -> starts of the buckets.
template <typename A>
__device__ __forceinline__ void start_buckets(SortScratch<A>& scratch) {
  __syncthreads();  // the buckets are counted
  auto& mine = reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x];
  Pack<int32_t, 4> counts = mine, starts;
  int32_t total, start = sum_before<kSortThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], total);
#pragma unroll
  for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
  mine = starts;
  if (threadIdx.x == 0) scratch.buckets[kKeyBuckets] = total;
  __syncthreads();  // the buckets' starts are known
}
template <typename A>
__device__ __forceinline__ void zero_buckets(SortScratch<A>& scratch) {
  reinterpret_cast<Pack<int32_t, 4>*>(scratch.buckets)[threadIdx.x] = {};
}

// All threads of the block: writes `count` records, of which a thread holds every kSortThreads-th, to `to` in the order
// of keys, and where cells begin, if that is asked for. split(record, key) gives the bucket and what tells the records
// of a bucket apart. The buckets are zero.
template <typename A, typename Split>
__device__ __forceinline__ void sort_window(SortScratch<A>& scratch, Record<A> (&record)[kWindowEach], int count,
                                            const Split& split, Record<A>* to, const CellStarts* starts) {
  constexpr int kRankBits = 11;
  static_assert(kWindow <= 1 << kRankBits, "bucket and rank share a number");
  uint32_t key[kWindowEach], place[kWindowEach];  // place: bucket and rank
#pragma unroll
  for (int j = 0; j < kWindowEach; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const uint32_t bucket = split(record[j], key[j]);
    record[j].fx -= floor(record[j].fx), record[j].fy -= floor(record[j].fy);
    place[j] = bucket << kRankBits | atomicAdd(scratch.buckets + bucket, 1);
  }
  start_buckets(scratch);
  if (starts != nullptr) starts->write(scratch.buckets);
#pragma unroll
  for (int j = 0; j < kWindowEach; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    scratch.keys[scratch.buckets[place[j] >> kRankBits] + (place[j] & ((1 << kRankBits) - 1))] = key[j];
  }
  __syncthreads();  // the keys are placed
#pragma unroll
  for (int j = 0; j < kWindowEach; ++j) {
    if (threadIdx.x + j * kSortThreads >= count) continue;
    const int32_t* bucket = scratch.buckets + (place[j] >> kRankBits);
    const int32_t begin = bucket[0], end = bucket[1];
    int32_t at = begin;
#pragma unroll 1
    for (int32_t other = begin; other < end; ++other) at += scratch.keys[other] < key[j];
    scratch.records[at] = record[j];
  }
  __syncthreads();  // the records are sorted
#pragma unroll
  for (int j = 0; j < kWindowEach; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) to[i] = scratch.records[i];
  }
}

// All threads of the block: a bin of more than kWindow records. shift: 2^shift keys make a bucket that `starts` knows.
template <typename A>
__device__ __noinline__ void sort_large_bin(const Record<A>* records, int32_t count, int shift, const BinKeys<A> key_of,
                                            Record<A>* to, const CellStarts starts) {
  extern __shared__ __align__(16) char shared[];
  auto& scratch = *reinterpret_cast<SortScratch<A>*>(shared);
  // By 2^width keys, from `lowest` on.
  const auto count_keys = [&](uint64_t lowest, int width) {
    __syncthreads();  // the buckets have been read
    zero_buckets(scratch);
    __syncthreads();  // the buckets are zero
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < count; i += kSortThreads) {
      const uint64_t key = key_of(records[i]), bucket = (key - lowest) >> width;
      if (key >= lowest && bucket < kKeyBuckets) atomicAdd(scratch.buckets + bucket, 1);
    }
    start_buckets(scratch);
  };
  count_keys(0, shift);
  starts.write(scratch.buckets);
  uint64_t lowest = 0;
#pragma unroll 1
  for (int32_t placed = 0; placed < count;) {
    int width = shift + kKeyBits;
    do {  // until no bucket is larger than a window
      width = max(width - kKeyBits, 0);
      count_keys(lowest, width);
    } while (scratch.buckets[1] > kWindow);
    uint32_t buckets = 1;  // as many as fit
    for (int step = kKeyBuckets / 2; step > 0; step /= 2) {
      if (scratch.buckets[buckets + step] <= kWindow) buckets += step;
    }
    const int32_t in_window = scratch.buckets[buckets];
    __syncthreads();  // the buckets have been read
    zero_buckets(scratch);
    if (threadIdx.x == 0) scratch.picked = 0;
    __syncthreads();  // nothing is picked yet
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < count; i += kSortThreads) {
      const Record<A> record = records[i];
      const uint64_t key = key_of(record);
      if (key >= lowest && (key - lowest) >> width < buckets) scratch.records[atomicAdd(&scratch.picked, 1)] = record;
    }
    __syncthreads();  // the window is complete
    Record<A> record[kWindowEach];
#pragma unroll
    for (int j = 0; j < kWindowEach; ++j) record[j] = scratch.records[threadIdx.x + j * kSortThreads];
    const auto split = [&](const Record<A>& record, uint32_t& key) {
      const uint64_t whole = key_of(record) - lowest;
      key = static_cast<uint32_t>(whole);
      return static_cast<uint32_t>(whole >> width);
    };
    sort_window(scratch, record, in_window, split, to + placed, nullptr);
    placed += in_window, lowest += static_cast<uint64_t>(buckets) << width;
  }
}

template <typename A>
__global__ void __launch_bounds__(kSortThreads, 3)
    sort_kernel(const LevelPlan* __restrict__ plan, const int32_t* __restrict__ bin_starts,
                const Record<A>* __restrict__ records, Record<A>* __restrict__ sorted, int32_t* __restrict__ starts,
                const MsDeformAttnProblem problem, int64_t head_slots, int head_bins, int sample_bits, int point_bits) {
  extern __shared__ __align__(16) char shared[];
  auto& scratch = *reinterpret_cast<SortScratch<A>*>(shared);
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B * problem.G)) return;
  int32_t bin = blockIdx.x;  // of its level
  int l = 0;
  while (l < problem.L && bin >= plan[l].bins) bin -= plan[l++].bins;
  if (l == problem.L) return;
  const LevelPlan& at = plan[l];
  const int32_t* mine = bin_starts + static_cast<int64_t>(head) * head_bins + at.first_bin + bin;
  const int32_t begin = mine[0], count = mine[1] - begin, bin_bits = at.bin_bits;
  const int64_t first_cell = static_cast<int64_t>(bin) << bin_bits, head_begin = head * problem.K * problem.Q;
  records += head_begin + begin, sorted += head_begin + begin;
  const BinKeys<A> key_of{static_cast<uint32_t>(first_cell), at.level.W, sample_bits, point_bits};
  // The buckets of a cell, and the samples that share a bucket.
  const int cell_shift = min(sample_bits, kKeyBits - bin_bits), sample_shift = sample_bits - cell_shift;
  const int64_t cells = min(cells_of(at.level.H, at.level.W) - first_cell, int64_t{1} << bin_bits);
  const CellStarts cell_starts{starts + head * head_slots + at.first_slot + first_cell,
                               begin - at.first_point * static_cast<int32_t>(problem.Q), static_cast<int32_t>(cells),
                               cell_shift, bin + 1 == at.bins};
  if (count > kWindow) return sort_large_bin(records, count, sample_shift, key_of, sorted, cell_starts);
  Record<A> record[kWindowEach] = {};
#pragma unroll
  for (int j = 0; j < kWindowEach; ++j) {
    const int i = threadIdx.x + j * kSortThreads;
    if (i < count) record[j] = records[i];
  }
  zero_buckets(scratch);
  __syncthreads();  // the buckets are zero
  const auto split = [&](const Record<A>& record, uint32_t& key) {
    key = key_of.sample(record);
    return key_of.cell(record) << cell_shift | key >> sample_shift;
  };
  sort_window(scratch, record, count, split, sorted, &cell_starts);
}

// The two gradients of a cell's samples are matrix products: with the records as rows, grad_output (records x channels)
// times the corners (channels x 4) gives the dots, and the corner weights (4 x records) times grad_output the sums. In
// bfloat16 they run on the tensor cores, a warp a cell, 16 records at a time. The products are exact and added in
// float32. A corner weight goes in as two bfloat16 numbers, its rounding and the rounding of the rest (relative error
// 2^-17), in matrix rows 8 apart, whose sums meet in one thread. float16 cannot hold every weight.
constexpr int kMmaRecords = 16;
constexpr int kMmaChannels = 32;

__device__ __forceinline__ void multiply_add(float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Of an 8 x 8 matrix of 16-bit numbers, thread 4 r + t holding columns 2 t and 2 t + 1 of row r: its transpose.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 750
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
#endif
  return out;
}

template <typename T, typename A, int VEC, int LANES, bool TENSOR_CORES>
__global__ void __launch_bounds__(kGatherThreads, TENSOR_CORES ? 4 : 2)  // what fits the registers without spills
    gather_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const int32_t* __restrict__ starts, const Record<A>* __restrict__ records, T* __restrict__ grad_value,
                  const SampleGrads<A> grads, const MsDeformAttnProblem problem, int64_t head_slots, int point_bits) {
  constexpr int kGroups = kGatherThreads / LANES, kChannels = LANES * VEC;
  // Records a group (with tensor cores, a warp) walks at a time.
  constexpr int kBatch = TENSOR_CORES ? kMmaRecords : LANES < 4 ? LANES : 4;
  extern __shared__ __align__(16) char shared[];
  auto* planes = reinterpret_cast<A*>(shared);                                       // [4, kSlots, kChannels]
  auto* batches = planes + static_cast<size_t>(4) * kSlots * kChannels;              // [kGroups, kBatch, 4]
  auto* batch_queries = reinterpret_cast<int32_t*>(batches + kGroups * kBatch * 4);  // [kGroups, kBatch]
  __shared__ int32_t slot_begin[kSlots], slot_end[kSlots];
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  A* my_weights = batches + group * kBatch * 4;
  int32_t* my_queries = batch_queries + group * kBatch;
  const int32_t G = static_cast<int32_t>(problem.G), C = static_cast<int32_t>(problem.C);
  const uint32_t row_bytes = static_cast<uint32_t>(G * C * sizeof(T));
  constexpr unsigned kAll = 0xffffffffu;
  // One head after another, so that its rows of grad_output stay in the second-level cache.
  const uint32_t head = blockIdx.y + blockIdx.z * 65535u;
  if (head >= static_cast<uint32_t>(problem.B) * G) return;
  const uint32_t b = head / G, g = head - b * G;
  const int64_t image_value = (static_cast<int64_t>(b) * problem.S * G + g) * C;
  const int64_t image_output = (static_cast<int64_t>(b) * problem.Q * G + g) * C;
  // Levels that share rows are the business of one block a head, one after another: nobody has such tables.
  const bool add = !plan[0].disjoint;
  if (add && blockIdx.x > 0) return;

  for (uint32_t task = blockIdx.x;; task += add ? 1 : gridDim.x) {
    // The last level first: it is the coarsest, whose tiles take longest.
    uint32_t in_level = task;
    int l = static_cast<int>(problem.L) - 1;
    while (l >= 0 && in_level >= static_cast<uint32_t>(plan[l].tiles)) in_level -= plan[l--].tiles;
    if (l < 0) return;
    const Level level = plan[l].level;
    const Tile tile = tile_of_shape(plan[l].tile_shape);
    const int32_t texels_x = tile.texels_x(), texels_y = tile.texels_y();
    const uint32_t tiles_x = static_cast<uint32_t>(level.W + texels_x - 1) / texels_x, tile_y = in_level / tiles_x;
    const int32_t y_first = tile_y * texels_y, x_first = (in_level - tile_y * tiles_x) * texels_x;
    const int32_t* level_starts = starts + head * head_slots + plan[l].first_slot;
    const Record<A>* level_records = records + (head * problem.K + plan[l].first_point) * problem.Q;
    const uint32_t cells_x_inverse = 65536u / tile.cells_x + 1, texels_x_inverse = 65536u / texels_x + 1;
    const auto cell_at = [&](int cell, int& x, int& y) {
      y = static_cast<uint32_t>(cell) * cells_x_inverse >> 16, x = cell - y * tile.cells_x;
    };

    // Slot = cell * parts + part: a part takes every parts-th batch of the cell's records. Cell (x, y) lies between
    // texels x - 1 and x, y - 1 and y.
    for (int slot = threadIdx.x; slot < kSlots; slot += kGatherThreads) {
      int x_in_tile, y_in_tile;
      cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
      const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
      int32_t begin = 0, end = 0;
      if (x <= level.W && y <= level.H) {
        const int64_t at = static_cast<int64_t>(y) * (level.W + 1) + x;
        begin = level_starts[at] + (slot & ((1 << tile.part_bits) - 1)) * kBatch, end = level_starts[at + 1];
      }
      slot_begin[slot] = begin, slot_end[slot] = end;
    }
    __syncthreads();  // the slots' records are known
    const int32_t step = kBatch << tile.part_bits;
    const int32_t samples_per_query = static_cast<int32_t>(problem.G * problem.K);
    const int64_t first_index = (static_cast<int64_t>(b) * problem.Q * G + g) * problem.K + plan[l].first_point;
    // From the dots of a record of query q.
    const auto put_grads = [&](const SampleGrads<A>& to, const Record<A>& record, const A(&d)[4], const Level& level,
                               int32_t q, bool more) {
      const A fx = record.fx, fy = record.fy, weight = record.weight;
      const int64_t index =
          static_cast<int64_t>(q) * samples_per_query + (record.sample & ((1 << point_bits) - 1)) + first_index;
      const A top = d[0] + fx * (d[1] - d[0]), bottom = d[2] + fx * (d[3] - d[2]);
      const A left = d[2] - d[0], right = d[3] - d[1];
      to.put(index, weight, top + fy * (bottom - top), level.W * weight * ((d[1] - d[0]) + fy * (right - left)),
             level.H * weight * (left + fx * (right - left)), more);
    };
    for (int32_t c0 = 0; c0 < C; c0 += kChannels) {
      const int32_t c = c0 + lane * VEC;
      const bool has_channels = c < C;
      const char* value_base = reinterpret_cast<const char*>(value + image_value + c);
      const char* g_base = reinterpret_cast<const char*>(grad_output + image_output + c);
      if constexpr (TENSOR_CORES) {
        static_assert(kChannels == kMmaChannels, "a matrix covers the channels of a turn");
        const int warp = threadIdx.x / 32, corner_row = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        // [corner][t]: of records 2 t, 2 t + 1: the rounded weights, the rests; of 2 t + 8, 2 t + 9: the same.
        auto* warp_weights = reinterpret_cast<uint16_t*>(batches) + warp * 4 * 4 * 8;
        const int mine = corner_row + t % 2 * 8;  // the record that this lane loads, and finishes if t < 2
        const int slot_in_pair = corner_row / 2 * 8 + t % 2 * 4 + corner_row % 2;
        const char* lane_value = reinterpret_cast<const char*>(value + image_value + c0 + t * 8);
        const char* lane_g = reinterpret_cast<const char*>(grad_output + image_output + c0 + t * 8);
        const auto load_record = [&](int32_t i, int32_t end) { return i < end ? level_records[i] : Record<A>{}; };
        constexpr int kWarps = kGatherThreads / 32;
        Record<A> next = load_record(slot_begin[warp] + mine, slot_end[warp]);
        for (int slot = warp; slot < kSlots; slot += kWarps) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kWarps >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kWarps];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kWarps];
          int x_in_tile, y_in_tile;
          cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
          const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
          const bool owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
          float sums[4][4] = {};
          uint4 corner = {};
          if (begin < end && owns && corner_row < 4) {
            const int32_t corner_x = x - 1 + corner_row % 2, corner_y = y - 1 + corner_row / 2;
            if (corner_x >= 0 && corner_x < level.W && corner_y >= 0 && corner_y < level.H) {
              const uint32_t texel = level.start + corner_y * level.W + corner_x;
              corner = *reinterpret_cast<const uint4*>(lane_value + static_cast<uint64_t>(texel) * row_bytes);
            }
          }
          if (begin >= end) next = load_record(next_begin + mine, next_end);
          for (int32_t i = begin; i < end; i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits, other = __shfl_xor_sync(kAll, q, 1);
            uint4 g0 = {}, g1 = {};  // of records corner_row and corner_row + 8
            const int32_t q0 = t % 2 ? other : q, q1 = t % 2 ? q : other;
            if (i + corner_row < end) {
              g0 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q0)) * row_bytes);
            }
            if (i + corner_row + 8 < end) {
              g1 = *reinterpret_cast<const uint4*>(lane_g +
                                                   static_cast<uint64_t>(static_cast<uint32_t>(q1)) * row_bytes);
            }
            next = i + step < end ? load_record(i + step + mine, end) : load_record(next_begin + mine, next_end);
            __syncwarp();  // the previous weights have been read
            if (t < 2) {
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              const A right_top = top * record.fx, right_bottom = bottom * record.fx;
              const A corner_weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                const auto rounded = from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]));
                const auto rest =
                    from_accumulate<__nv_bfloat16>(static_cast<float>(corner_weights[k]) - to_accumulate(rounded));
                warp_weights[k * 32 + slot_in_pair] = __bfloat16_as_ushort(rounded);
                warp_weights[k * 32 + slot_in_pair + 2] = __bfloat16_as_ushort(rest);
              }
            }
            __syncwarp();  // these weights are complete
            uint4 a = {};
            if (corner_row < 4) a = reinterpret_cast<const uint4*>(warp_weights)[corner_row * 4 + t];
            multiply_add(sums[0], a.x, a.y, a.z, a.w, transpose(g0.x), transpose(g1.x));
            multiply_add(sums[1], a.x, a.y, a.z, a.w, transpose(g0.y), transpose(g1.y));
            multiply_add(sums[2], a.x, a.y, a.z, a.w, transpose(g0.z), transpose(g1.z));
            multiply_add(sums[3], a.x, a.y, a.z, a.w, transpose(g0.w), transpose(g1.w));
            if (!owns) continue;
            float dots[4] = {};  // corners 2 t and 2 t + 1 of record corner_row, then of record corner_row + 8
            multiply_add(dots, g0.x, g1.x, g0.y, g1.y, corner.x, corner.y);
            multiply_add(dots, g0.z, g1.z, g0.w, g1.w, corner.z, corner.w);
            const float even = __shfl_xor_sync(kAll, t % 2 ? dots[0] : dots[2], 1);
            const float odd = __shfl_xor_sync(kAll, t % 2 ? dots[1] : dots[3], 1);
            if (t < 2 && i + mine < end) {
              const float d[4] = {t ? even : dots[0], t ? odd : dots[1], t ? dots[2] : even, t ? dots[3] : odd};
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
          if (corner_row < 4) {
            auto* to = planes + (corner_row * kSlots + slot) * kChannels + t * 8;
            const A low[4] = {sums[0][0] + sums[0][2], sums[0][1] + sums[0][3], sums[1][0] + sums[1][2],
                              sums[1][1] + sums[1][3]};
            const A high[4] = {sums[2][0] + sums[2][2], sums[2][1] + sums[2][3], sums[3][0] + sums[3][2],
                               sums[3][1] + sums[3][3]};
            store_pack<A, 4>(to, low);
            store_pack<A, 4>(to + 4, high);
          }
        }
      } else {
        const int mine = lane % kBatch;  // the record of a batch that this lane prepares
        // Loaded ahead, of this or the next slot. Past the end: a record of weight zero.
        const auto load_record = [&](int32_t i, int32_t end) { return i < end ? level_records[i] : Record<A>{}; };
        Record<A> next = load_record(slot_begin[group] + mine, slot_end[group]);
        for (int slot = group; slot < kSlots; slot += kGroups) {
          const int32_t begin = slot_begin[slot], end = slot_end[slot];
          const bool is_last = slot + kGroups >= kSlots;
          const int32_t next_begin = is_last ? 0 : slot_begin[slot + kGroups];
          const int32_t next_end = is_last ? 0 : slot_end[slot + kGroups];
          // The groups of a warp walk together, as long as the longest.
          int32_t turns = end > begin ? (end - begin + step - 1) / step : 0;
#pragma unroll
          for (int s = LANES; s < 32; s *= 2) turns = max(turns, __shfl_xor_sync(kAll, turns, s));
          A sum[4][VEC] = {};
          A corner[4][VEC] = {};
          bool owns = false;  // of two tiles that walk the cell, the one it begins in writes the samples' own gradients
          if (turns == 0) {
            next = load_record(next_begin + mine, next_end);
          } else {
            int x_in_tile, y_in_tile;
            cell_at(slot >> tile.part_bits, x_in_tile, y_in_tile);
            const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
            owns = (x_in_tile < texels_x || x == level.W) && (y_in_tile < texels_y || y == level.H);
            const bool reads = begin < end && has_channels && owns;
            const bool left = x > 0 && reads, right = x < level.W && reads, top = y > 0, bottom = y < level.H;
            const bool is_inside[4] = {top && left, top && right, bottom && left, bottom && right};
            const int32_t texel = level.start + (y - 1) * level.W + x - 1;
            const int32_t texels[4] = {texel, texel + 1, texel + level.W, texel + level.W + 1};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              if (is_inside[k])
                load_pack<T, VEC>(value_base + static_cast<uint64_t>(static_cast<uint32_t>(texels[k])) * row_bytes,
                                  corner[k]);
            }
          }
          for (int32_t turn = 0, i = begin; turn < turns; ++turn, i += step) {
            const Record<A> record = next;
            const int32_t q = record.sample >> point_bits;
            if (lane < kBatch) {
              Pack<A, 4> corner_weights;
              const A bottom = record.fy * record.weight, top = record.weight - bottom;
              corner_weights.at[1] = top * record.fx, corner_weights.at[0] = top - corner_weights.at[1];
              corner_weights.at[3] = bottom * record.fx, corner_weights.at[2] = bottom - corner_weights.at[3];
              reinterpret_cast<Pack<A, 4>*>(my_weights)[mine] = corner_weights;
              my_queries[mine] = q;
            }
            __syncwarp();  // the batch is complete
            Pack<T, VEC> g_pack[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
#pragma unroll
              for (int v = 0; v < VEC; ++v) g_pack[u].at[v] = from_accumulate<T>(A(0));
              if (has_channels && i + u < end) {
                g_pack[u] = *reinterpret_cast<const Pack<T, VEC>*>(
                    g_base + static_cast<uint64_t>(static_cast<uint32_t>(my_queries[u])) * row_bytes);
              }
            }
            const bool exists = i + mine < end;
            if (turn + 1 < turns) {
              next = load_record(i + step + mine, end);
            } else {
              next = load_record(next_begin + mine, next_end);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
              const Pack<A, 4> corner_weights = reinterpret_cast<const Pack<A, 4>*>(my_weights)[u];
              A g_out[VEC];
              unpack(g_pack[u], g_out);
#pragma unroll
              for (int v = 0; v < VEC; ++v) {
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k][v] += corner_weights.at[k] * g_out[v];
              }
            }
            __syncwarp();  // the batch has been read
            A d[4];        // lane i: the dots of record i % kBatch
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              A dot[kBatch] = {};
#pragma unroll
              for (int u = 0; u < kBatch; ++u) {
                A g_out[VEC];
                unpack(g_pack[u], g_out);
#pragma unroll
                for (int v = 0; v < VEC; ++v) dot[u] += corner[k][v] * g_out[v];
              }
              d[k] = dot[0];
              if constexpr (kBatch == 2) d[k] = exchange(kAll, lane & 1, dot[0], dot[1], 1);
              if constexpr (kBatch == 4) {
                const A even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
                const A odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
                d[k] = exchange(kAll, lane & 2, even, odd, 2);
              }
#pragma unroll
              for (int s = kBatch; s < LANES; s *= 2) d[k] += __shfl_xor_sync(kAll, d[k], s);
            }
            if (owns && exists && lane < kBatch) {
              put_grads(grads, record, d, level, q, c0 > 0);
            }
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            store_pack<A, VEC>(planes + (k * kSlots + slot) * kChannels + lane * VEC, sum[k]);
          }
        }
      }
      __syncthreads();  // the slots' sums are complete
      for (int texel = group; texel < texels_x * texels_y; texel += kGroups) {
        const int y_in_tile = static_cast<uint32_t>(texel) * texels_x_inverse >> 16,
                  x_in_tile = texel - y_in_tile * texels_x;
        const int32_t x = x_first + x_in_tile, y = y_first + y_in_tile;
        if (x >= level.W || y >= level.H || !has_channels) continue;
        A sum[VEC] = {};
        T* to = grad_value + image_value + c + (level.start + static_cast<int64_t>(y) * level.W + x) * (G * C);
        if (add) load_pack<T, VEC>(to, sum);
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // the texel is corner k of this cell
          const int cell = (y_in_tile + 1 - k / 2) * tile.cells_x + x_in_tile + 1 - k % 2;
#pragma unroll 1
          for (int part = 0; part < 1 << tile.part_bits; ++part) {
            A of_part[VEC];
            load_pack<A, VEC>(planes + (k * kSlots + (cell << tile.part_bits) + part) * kChannels + lane * VEC,
                              of_part);
#pragma unroll
            for (int v = 0; v < VEC; ++v) sum[v] += of_part[v];
          }
        }
        store_pack<T, VEC>(to, sum);
      }
      __syncthreads();  // planes and slots may be written again
    }
  }
}

// Few samples (a decoder), where sorting over the whole pyramid does not pay: a group of LANES threads takes one
// sample, adds to the four rows of grad_sums, which was zeroed, and works out the sample's own gradients.
template <typename T, typename A, typename Source, int VEC, int LANES>
__global__ void __launch_bounds__(kSampleThreads)
    direct_kernel(const T* __restrict__ grad_output, const T* __restrict__ value, const LevelPlan* __restrict__ plan,
                  const Source source, A* __restrict__ grad_sums, const SampleGrads<A> grads,
                  const MsDeformAttnProblem problem) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, static_cast<int>(problem.L), table);
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * kSampleThreads + threadIdx.x) / LANES;
  const int lane = threadIdx.x % LANES;
  const int64_t row = index / problem.K, query = row / problem.G, b = query / problem.Q;
  if (b >= problem.B) return;
  const int g = static_cast<int>(row - query * problem.G), k = static_cast<int>(index - row * problem.K);
  int l = 0;
  while (k >= table[l].level.end) ++l;
  const Level level = table[l].level;
  typename Source::Raw raw = source.fetch_position(index, query * problem.L + l);
  source.fetch_weight(index, raw);
  const A weight = source.weight(raw, source.row_at(row));
  A x, y;
  source.position(raw, level, table[l].points, x, y);
  Bilinear<A> at;
  const bool counts = level.H > 0 && locate(x, y, level.H, level.W, at);
  A dot[4] = {}, corner_weights[4];
  if (counts) {
    at.corner_weights(corner_weights);
    const int64_t C = problem.C, image = (b * problem.S * problem.G + g) * C;
    for (int64_t c = lane * VEC; c < C; c += LANES * VEC) {
      A g_out[VEC];
      load_pack<T, VEC>(grad_output + row * C + c, g_out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!at.is_inside[i]) continue;
        const int64_t offset = image + (level.start + static_cast<int64_t>(at.index[i])) * problem.G * C + c;
        A corner[VEC], part[VEC];
        load_pack<T, VEC>(value + offset, corner);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
          dot[i] += corner[v] * g_out[v];
          part[v] = corner_weights[i] * weight * g_out[v];
        }
        add_pack<VEC>(grad_sums + offset, part);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dot[i] += __shfl_xor_sync(group_mask<LANES>(), dot[i], step);
    }
  }
  if (lane > 0) return;
  if (!counts) {
    const A nothing = level.H > 0 ? A(0) : quiet_nan<A>();
    return grads.put(index, weight, nothing, nothing, nothing, false);
  }
  const A top = dot[0] + at.fx * (dot[1] - dot[0]), bottom = dot[2] + at.fx * (dot[3] - dot[2]);
  const A left = dot[2] - dot[0], right = dot[3] - dot[1];
  grads.put(index, weight, top + at.fy * (bottom - top),
            level.W * weight * ((dot[1] - dot[0]) + at.fy * (right - left)),
            level.H * weight * (left + at.fx * (right - left)), false);
}

// The backward of an encoder, whose queries are the pyramid's own texels. A block owns a chunk of the queries of one
// head in the order of regions, so that its samples share most of their texels. Level after level, and kPassPoints
// samples of a query at a time, it sorts the samples by their square of texels (see Sample) in shared memory; then each
// group of LANES threads walks as many of them as any other, with the square's values and gradients in registers and
// the rows of grad_output in shared memory. Where the walk leaves a texel, it adds the texel's gradient to grad_sums by
// one reduction, which other blocks and groups do, too; from a square to its right neighbour only two texels change.
// The dots with the four texels, of which the sample's own gradients are made, take its place in shared memory.
constexpr int kChunkThreads = 512;
constexpr int kPassPoints = 4;
constexpr int kChunkEach = 3;  // samples a thread locates in a pass, at the most
constexpr int kMaxChunk = kChunkThreads * kChunkEach / kPassPoints;
constexpr size_t kChunkShared = 80 << 10;  // of two blocks; the rest of the memory is the first-level cache
// Squares that lie 64 columns or 32 rows apart share a bucket, which costs reductions only.
constexpr int kColumnBits = 6, kBuckets = 4 * kChunkThreads;

struct ChunkSizes {
  int64_t S, rows;  // rows: B * G * Q
  int32_t Q, G, C, L, K;
  uint32_t share;  // queries of a block
};

template <typename T>
size_t chunk_bytes(int64_t C, int64_t L, int64_t queries) {
  const size_t of_query = kPassPoints * (sizeof(Pack<float, 4>) + sizeof(uint16_t)) + C * sizeof(T) + sizeof(uint32_t);
  return queries * of_query + kBuckets * sizeof(uint16_t) + L * sizeof(LevelPlan);
}

// order[i] = the query that is number i; from the first to the last unless the levels follow one another.
constexpr int kOrderQueryThreads = 1024, kOrderQueryBlocks = 32;
__global__ void __launch_bounds__(kOrderQueryThreads)
    order_queries_kernel(const Levels levels, int L, int64_t S, uint32_t* __restrict__ order) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<Level*>(shared);  // [L]
  const bool follow = load_levels(levels, L, S, table);
  const uint32_t Q = static_cast<uint32_t>(S), share = (Q + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  if (first >= Q) return;
  const uint32_t count = min(share, Q - first);
  if (!follow) {
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = first + i;
    return;
  }
  const Regions regions(table, L, reinterpret_cast<int32_t*>(table + L));
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) order[first + i] = regions.query_at(first + i);
}

// The walk of one group over `count` samples, list[0] and on; `turns` is at least that, and the same for the whole
// block. value and sums: of the level's first texel, at the lane's channels, if it has any; rows: of its channels.
template <typename T, int LANES>
__device__ __forceinline__ void walk_samples(const uint16_t* list, int count, int turns, Pack<float, 4>* samples,
                                             const T* rows, const T* value, float* sums, const Level& level,
                                             uint32_t texel_step, int C, bool has_channels) {
  constexpr int VEC = 4;
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t right = level.W > 1 ? 1 : 0, below = level.H > 1 ? level.W : 0;
  const int lane = threadIdx.x % LANES;
  float sum[4][VEC] = {}, corner[4][VEC] = {};
  uint32_t texel = 0;  // the upper left one of the square
  const auto leave = [&](bool to_right) {
    float* upper = sums + static_cast<uint64_t>(texel) * texel_step;
    float* lower = sums + static_cast<uint64_t>(texel + below) * texel_step;
    add_pack<VEC>(upper, sum[0]);
    add_pack<VEC>(lower, sum[2]);
    if (!to_right) {
      add_pack<VEC>(upper + right * texel_step, sum[1]);
      add_pack<VEC>(lower + right * texel_step, sum[3]);
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
      sum[0][v] = to_right ? sum[1][v] : 0.f, sum[2][v] = to_right ? sum[3][v] : 0.f;
      sum[1][v] = sum[3][v] = 0;
    }
  };
  const auto enter = [&](uint32_t next, bool to_right) {
    const T* upper = value + static_cast<uint64_t>(next) * texel_step;
    const T* lower = value + static_cast<uint64_t>(next + below) * texel_step;
#pragma unroll
    for (int v = 0; v < VEC; ++v) corner[0][v] = corner[1][v], corner[2][v] = corner[3][v];
    load_pack<T, VEC>(upper + right * texel_step, corner[1]);
    load_pack<T, VEC>(lower + right * texel_step, corner[3]);
    if (!to_right) {
      load_pack<T, VEC>(upper, corner[0]);
      load_pack<T, VEC>(lower, corner[2]);
    }
  };
  const bool walks = count > 0 && has_channels;
  uint32_t id = count > 0 ? *list : 0;
  if (walks) texel = __float_as_uint(samples[id].at[0]), enter(texel, false);
#pragma unroll 1
  for (int turn = turns; turn > 0; --turn, --count) {
    const bool exists = count > 0, has_next = count > 1;
    ++list;
    const uint32_t next_id = has_next ? *list : id;
    Pack<float, 4> sample = {};
    float g_out[VEC] = {};
    if (exists) sample = samples[id];
    if (exists && has_channels) load_pack<T, VEC>(rows + (id / kPassPoints) * C, g_out);
    const uint32_t next = has_next ? __float_as_uint(samples[next_id].at[0]) : texel;
    const float weight = sample.at[3];
    const float bottom = sample.at[2] * weight, top = weight - bottom;
    const float right_top = top * sample.at[1], right_bottom = bottom * sample.at[1];
    const float weights[4] = {top - right_top, right_top, bottom - right_bottom, right_bottom};
    float dot[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int v = 0; v < VEC; ++v) sum[k][v] += weights[k] * g_out[v], dot[k] += corner[k][v] * g_out[v];
    }
    // Before the dots are reduced, so that the loads are under way meanwhile.
    if (has_channels && next != texel) {
      const bool to_right = next - texel == right;
      enter(next, to_right);
      leave(to_right);
      texel = next;
    }
    const float even = exchange(kAll, lane & 1, dot[0], dot[1], 1);
    const float odd = exchange(kAll, lane & 1, dot[2], dot[3], 1);
    float mine = exchange(kAll, lane & 2, even, odd, 2);  // lane i: of corner i % 4
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) mine += __shfl_xor_sync(kAll, mine, step);
    __syncwarp();  // the sample has been read
    if (exists && lane < 4) samples[id].at[lane] = mine;
    id = next_id;
  }
  if (walks) leave(false);
}

// Of a sample at x that counts, along one axis of `size` texels: from the dots with the two texels of its moved square
// to those with the two texels that it lies between, zero outside the map.
__device__ __forceinline__ Pack<float, 2> unmove(float x, int32_t size, float first, float second) {
  const float from = floor(x);
  if (from < 0) return {0.f, first};
  if (from > size - 2) return {size > 1 ? second : first, 0.f};
  return {first, second};
}

// From the dots with the texels of its moved square.
struct SampleGradient {
  float weight, x, y;
};
__device__ __forceinline__ SampleGradient sample_gradient(const Pack<float, 4>& dots, float x, float y, float weight,
                                                          const Level& level) {
  const Pack<float, 2> upper = unmove(x, level.W, dots.at[0], dots.at[1]),
                       lower = unmove(x, level.W, dots.at[2], dots.at[3]),
                       left = unmove(y, level.H, upper.at[0], lower.at[0]),
                       right = unmove(y, level.H, upper.at[1], lower.at[1]);
  const float fx = x - floor(x), fy = y - floor(y);
  const float top_x = right.at[0] - left.at[0], bottom_x = right.at[1] - left.at[1];
  const float left_y = left.at[1] - left.at[0], right_y = right.at[1] - right.at[0];
  const float top = left.at[0] + fx * top_x, bottom = left.at[1] + fx * bottom_x;
  return {top + fy * (bottom - top), level.W * weight * (top_x + fy * (bottom_x - top_x)),
          level.H * weight * (left_y + fx * (right_y - left_y))};
}

template <typename T, typename Source, int LANES>
__global__ void __launch_bounds__(kChunkThreads, 2)
    pyramid_grad_kernel(const T* __restrict__ grad_output, const T* __restrict__ value,
                        const LevelPlan* __restrict__ plan, const uint32_t* __restrict__ order, const Source source,
                        float* __restrict__ grad_sums, const SampleGrads<float> grads, const ChunkSizes sizes) {
  constexpr int VEC = 4, kGroups = kChunkThreads / LANES;
  extern __shared__ __align__(16) char shared[];
  const int L = sizes.L, K = sizes.K, G = sizes.G, C = sizes.C;
  const uint32_t Q = sizes.Q, share = sizes.share;
  // By place in the chunk and point: texel of the level, fractions, weight; later the four dots.
  auto* samples = reinterpret_cast<Pack<float, 4>*>(shared);                           // [share, kPassPoints]
  auto* table = reinterpret_cast<LevelPlan*>(samples + share * kPassPoints);           // [L]
  auto* buckets = reinterpret_cast<uint16_t*>(table + L);                              // [kBuckets] counts, then starts
  auto* rows = reinterpret_cast<T*>(buckets + kBuckets);                               // [share, C] of grad_output
  auto* queries = reinterpret_cast<uint32_t*>(rows + static_cast<size_t>(share) * C);  // [share]
  auto* sorted = reinterpret_cast<uint16_t*>(queries + share);                         // [share * kPassPoints]
  auto* my_buckets = reinterpret_cast<Pack<uint16_t, 4>*>(buckets) + threadIdx.x;
  const int group = threadIdx.x / LANES, c = threadIdx.x % LANES * VEC;
  const bool has_channels = c < C;
  const uint32_t texel_step = G * C;

  const int64_t begin = static_cast<int64_t>(blockIdx.x) * share;
  uint32_t head = static_cast<uint32_t>(begin / Q),
           first = static_cast<uint32_t>(begin - static_cast<int64_t>(head) * Q);
  uint32_t left = static_cast<uint32_t>(min(sizes.rows - begin, static_cast<int64_t>(share)));
  *my_buckets = {};
  load_plan(plan, L, table);
  while (left > 0) {  // a head after the other, or what of it is the block's
    const uint32_t count = min(left, Q - first);
    for (uint32_t i = threadIdx.x; i < count; i += kChunkThreads) queries[i] = order[first + i];
    __syncthreads();  // the list is complete
    const uint32_t b = head / G, g = head - b * G;
    const int64_t image_rows = static_cast<int64_t>(b) * Q * G;
    const Source image = source.of_image(static_cast<int64_t>(b) * Q * L, image_rows * K);
    const T* image_output = grad_output + (image_rows + g) * C + c;
    for (uint32_t i = group; i < count; i += kGroups) {
      if (!has_channels) break;
      *reinterpret_cast<Pack<T, VEC>*>(rows + i * C + c) = load_once(
          reinterpret_cast<const Pack<T, VEC>*>(image_output + static_cast<int64_t>(queries[i]) * texel_step));
    }
    const int64_t image_value = (static_cast<int64_t>(b) * sizes.S * G + g) * C + c;

    int pass = 0;
#pragma unroll 1
    for (int l = 0; l < L; pass + kPassPoints < table[l].points ? pass += kPassPoints : (pass = 0, ++l)) {
      const Level level = table[l].level;
      const int points = table[l].points, first_point = table[l].first_point + pass;
      const uint32_t pass_points = min(points - pass, kPassPoints);
      typename Source::Raw raw[kChunkEach];
      uint32_t place_of[kChunkEach];  // bucket and rank
      const auto id_of = [&](int j) { return threadIdx.x + j * kChunkThreads; };
      const auto exists = [&](int j) { return id_of(j) / kPassPoints < count && id_of(j) % kPassPoints < pass_points; };
      const auto row_of = [&](int j) { return queries[id_of(j) / kPassPoints] * G + g; };
      const auto fetch = [&] {
#pragma unroll
        for (int j = 0; j < kChunkEach; ++j) {
          raw[j] = {};
          if (!exists(j)) continue;
          const uint32_t at = row_of(j) * K + first_point + id_of(j) % kPassPoints;
          raw[j] = image.template fetch_position<true, true>(at, queries[id_of(j) / kPassPoints] * L + l);
          image.template fetch_weight<true, true>(at, raw[j]);
        }
      };
      const auto position = [&](int j, float& x, float& y) {  // whether the sample counts
        image.position(raw[j], level, points, x, y);
        return level.H > 0 && x > -1 && y > -1 && x < level.W && y < level.H;
      };
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        place_of[j] = ~0u;
        float x, y, fx, fy, part_x, part_y;
        if (!position(j, x, y) || !exists(j)) continue;
        const int32_t x0 = place(x, level.W, fx, part_x), y0 = place(y, level.H, fy, part_y);
        const float weight = image.weight(raw[j], image.row_at(image_rows + row_of(j)));
        samples[id_of(j)] = {__int_as_float(y0 * level.W + x0), fx, fy, weight * (part_x * part_y)};
        const uint32_t bucket = (y0 << kColumnBits | (x0 & ((1 << kColumnBits) - 1))) & (kBuckets - 1);
        const uint32_t shift = bucket % 2 * 16;
        const uint32_t before = atomicAdd(reinterpret_cast<uint32_t*>(buckets) + bucket / 2, 1u << shift) >> shift;
        place_of[j] = bucket << 16 | (before & 0xffffu);
      }
      __syncthreads();  // the buckets are counted
      const Pack<uint16_t, 4> counts = *my_buckets;
      int32_t listed,
          start = sum_before<kChunkThreads>(counts.at[0] + counts.at[1] + counts.at[2] + counts.at[3], listed);
      Pack<uint16_t, 4> starts;
#pragma unroll
      for (int i = 0; i < 4; ++i) starts.at[i] = start, start += counts.at[i];
      *my_buckets = starts;
      __syncthreads();  // the buckets' starts are known
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (place_of[j] != ~0u) sorted[buckets[place_of[j] >> 16] + (place_of[j] & 0xffffu)] = id_of(j);
      }
      __syncthreads();  // the samples are sorted
      *my_buckets = {};
      const int turns = (listed + kGroups - 1) / kGroups, from = group * turns;
      const int64_t level_value = image_value + static_cast<int64_t>(level.start) * texel_step;
      walk_samples<T, LANES>(sorted + from, min(turns, listed - from), turns, samples, rows + c, value + level_value,
                             grad_sums + level_value, level, texel_step, C, has_channels);
      __syncthreads();  // the dots are complete
      fetch();
#pragma unroll
      for (int j = 0; j < kChunkEach; ++j) {
        if (!exists(j)) continue;
        const int64_t row = image_rows + row_of(j);
        const float weight = image.weight(raw[j], image.row_at(row));
        const float nothing = level.H > 0 ? 0.f : quiet_nan<float>();
        SampleGradient grad = {nothing, nothing, nothing};
        float x, y;
        if (position(j, x, y)) grad = sample_gradient(samples[id_of(j)], x, y, weight, level);
        grads.put(row * K + first_point + id_of(j) % kPassPoints, weight, grad.weight, grad.x, grad.y, false);
      }
    }
    left -= count, ++head, first = 0;
    if (left > 0) __syncthreads();  // the list and the rows have been read
  }
}

// What the fused form does besides, before and after the kernels above.
constexpr int kRowThreads = 256;
constexpr int kSoftmaxLanes = 4;

// The lanes of a warp that share a row's K samples.
inline int row_lanes_of(int64_t K) {
  int lanes = 1;
  while (lanes < 32 && lanes < K) lanes *= 2;
  return lanes;
}

// kSoftmaxLanes a row: its softmax.
template <typename T, typename A>
__global__ void __launch_bounds__(kRowThreads)
    softmax_kernel(const FusedSamples<T, A> source, SoftmaxRow<A>* __restrict__ rows, int64_t count, int K) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kSoftmaxLanes;
  const int lane = threadIdx.x % kSoftmaxLanes;
  const auto of_row = source.of_image(0, row * K);
  const auto softmax = of_row.row_of_lanes(row < count, 0, K, lane, kSoftmaxLanes);
  if (row < count && lane == 0) rows[row] = softmax;
}

// A few lanes a row: from the gradients of locations and weights to those of offsets and logits, which are of type I.
template <typename T, typename A, typename I>
__global__ void __launch_bounds__(kRowThreads)
    fused_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<T, A> source,
                      const Pack<A, 4>* __restrict__ sample_grads, I* __restrict__ grad_offsets,
                      I* __restrict__ grad_logits, int64_t count, int G, int L, int K, int lanes) {
  extern __shared__ __align__(16) char shared[];
  auto* table = reinterpret_cast<LevelPlan*>(shared);  // [L]
  load_plan(plan, L, table);
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x & (lanes - 1);
  const bool exists = row < count;
  const Pack<A, 4>* of_row = sample_grads + row * K;
  A mean = 0;  // of the weights' gradients
  for (int k = lane; exists && k < K; k += lanes) mean += of_row[k].at[0] * of_row[k].at[1];
  for (int step = 1; step < lanes; step *= 2) mean += __shfl_xor_sync(0xffffffffu, mean, step);
  int l = 0;
  for (int k = lane; exists && k < K; k += lanes) {
    while (k >= table[l].level.end) ++l;
    const Pack<A, 4> grad = of_row[k];
    A scale_x = A(1) / table[l].level.W, scale_y = A(1) / table[l].level.H;
    if (source.boxes) {
      const A* box = source.reference_points + (row / G * L + l) * 4;
      scale_x = box[2] * (A(0.5) / table[l].points), scale_y = box[3] * (A(0.5) / table[l].points);
    }
    // A sample that does not count gives zero, whatever the box.
    const A grad_offset[2] = {grad.at[2] == 0 ? A(0) : grad.at[2] * scale_x,
                              grad.at[3] == 0 ? A(0) : grad.at[3] * scale_y};
    store_pack<I, 2>(grad_offsets + 2 * (row * K + k), grad_offset);
    grad_logits[row * K + k] = from_accumulate<I>(grad.at[0] * (grad.at[1] - mean));
  }
}

// A thread a (b, q, level): the gradient of its reference point, summed over heads and points in their order.
template <typename T, typename A>
__global__ void __launch_bounds__(kRowThreads)
    reference_grad_kernel(const LevelPlan* __restrict__ plan, const FusedSamples<T, A> source,
                          const Pack<A, 4>* __restrict__ sample_grads, A* __restrict__ grad_reference, int64_t count,
                          int G, int L, int K) {
  const int64_t query_level = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (query_level >= count) return;
  const int64_t query = query_level / L;
  const int l = static_cast<int>(query_level - query * L), first = plan[l].first_point, points = plan[l].points;
  const A share = A(0.5) / points;
  A sum[4] = {};
  for (int g = 0; g < G; ++g) {
    for (int p = 0; p < points; ++p) {
      const int64_t index = (query * G + g) * K + first + p;
      const Pack<A, 4> grad = sample_grads[index];
      sum[0] += grad.at[2], sum[1] += grad.at[3];
      if (source.boxes) {
        const Pack<A, 2> offset = source.offset_of(source.fetch_position(index, query_level));
        if (grad.at[2] != 0) sum[2] += grad.at[2] * offset.at[0] * share;
        if (grad.at[3] != 0) sum[3] += grad.at[3] * offset.at[1] * share;
      }
    }
  }
  for (int i = 0; i < (source.boxes ? 4 : 2); ++i) grad_reference[query_level * (source.boxes ? 4 : 2) + i] = sum[i];
}

// num_points: of each level, or null for P on every one.
Levels levels_of(const MsDeformAttnProblem& problem, const Tensor& shapes, const Tensor& starts,
                 const int64_t* num_points) {
  Levels levels{};
  if (num_points == nullptr) {
    levels.P = static_cast<int32_t>(problem.P);
  } else {
    VISDET_CHECK("ms_deform_attn_fused", problem.L <= kMaxHostLevels, "level_shapes may name ", kMaxHostLevels,
                 " levels at the most, got ", problem.L);
    int32_t end = 0;
    for (int64_t l = 0; l < problem.L; ++l) levels.end[l] = end += static_cast<int32_t>(num_points[l]);
  }
  if (problem.levels_on_host) {
    const int64_t *host_shapes = shapes.const_data_ptr<int64_t>(), *host_starts = starts.const_data_ptr<int64_t>();
    check_levels(problem, host_shapes, host_starts);
    VISDET_CHECK("ms_deform_attn", problem.L <= kMaxHostLevels, "level_shapes on the CPU may name ", kMaxHostLevels,
                 " levels at the most, got ", problem.L, "; pass them on value's device");
    int64_t row = 0;
    levels.follow = true;
    for (int64_t l = 0; l < problem.L; ++l) {
      levels.follow = levels.follow && host_starts[l] == row;
      row += host_shapes[2 * l] * host_shapes[2 * l + 1];
      levels.H[l] = static_cast<int32_t>(host_shapes[2 * l]);
      levels.W[l] = static_cast<int32_t>(host_shapes[2 * l + 1]);
      levels.start[l] = static_cast<int32_t>(host_starts[l]);
    }
    levels.follow = levels.follow && row == problem.S;
  } else {
    levels.shapes = shapes.const_data_ptr<int64_t>();
    levels.starts = starts.const_data_ptr<int64_t>();
  }
  return levels;
}

void check_sizes(const MsDeformAttnProblem& problem) {
  VISDET_CHECK("ms_deform_attn", problem.S <= INT32_MAX, "value must have fewer than 2^31 rows S, got ", problem.S);
  // 32-bit offsets within one image's samples and one texel's bytes.
  const double samples = 1.0 * problem.Q * problem.G * problem.K;
  VISDET_CHECK("ms_deform_attn", samples <= INT32_MAX && problem.Q * problem.G <= INT32_MAX,
               "Q * G * L * P must be under 2^31, got ", problem.Q, " * ", problem.G, " * ", problem.K);
  VISDET_CHECK("ms_deform_attn", 8.0 * problem.G * problem.C <= INT32_MAX, "G * C must be under 2^28, got ", problem.G,
               " * ", problem.C);
  VISDET_CHECK("ms_deform_attn", problem.B * problem.G <= INT32_MAX, "B * G must be under 2^31, got ", problem.B, " * ",
               problem.G);
}

// The bits of numbers up to `most`.
int bit_width(int64_t most) {
  int bits = 0;
  while (most >> bits > 0) ++bits;
  return bits;
}

// A record of the backward holds its query and its point in 31 bits.
int point_bits_of(const MsDeformAttnProblem& problem) { return bit_width(problem.P - 1); }
void check_backward_sizes(const MsDeformAttnProblem& problem) {
  check_sizes(problem);
  VISDET_CHECK("ms_deform_attn_backward", problem.Q <= (int64_t{INT32_MAX} >> point_bits_of(problem)),
               "Q * P must be under 2^31 with P rounded up to a power of two, got ", problem.Q, " * ", problem.P);
}

unsigned grid_size(int64_t blocks) {
  VISDET_CHECK("ms_deform_attn", blocks <= INT32_MAX, "B * G * Q is too large: ", blocks, " blocks");
  return static_cast<unsigned>(blocks);
}

// x: blocks of a head; y and z: heads, read back as y + 65535 * z.
dim3 head_grid(int64_t blocks, int64_t heads) {
  return dim3(grid_size(blocks), static_cast<unsigned>(std::min<int64_t>(heads, 65535)),
              static_cast<unsigned>(ceil_div(heads, 65535)));
}

// Calls f(VEC, LANES): loads of 16 bytes where channels and addresses allow it, else of one value. LANES is the
// smallest of a few powers of two that covers a row, MOST at the most (a wider row takes several turns).
template <typename T, int MOST, int VEC = 16 / sizeof(T), typename F>
void dispatch_row(int64_t C, bool is_aligned, const F& f) {
  constexpr int kVec = VEC;
  const auto call = [&](auto vec, auto lanes) { f(vec, lanes); };
  if (C % kVec == 0 && is_aligned) {
    const std::integral_constant<int, kVec> vec;
    const int64_t packs = C / kVec;
    if constexpr (MOST >= 32) {
      if (packs > 16) return call(vec, std::integral_constant<int, 32>{});
    }
    if constexpr (MOST >= 16) {
      if (packs > 8) return call(vec, std::integral_constant<int, 16>{});
    }
    if constexpr (MOST >= 8) {
      if (packs > 4) return call(vec, std::integral_constant<int, 8>{});
    }
    return call(vec, std::integral_constant<int, 4>{});
  }
  const std::integral_constant<int, 1> vec;
  return call(vec, std::integral_constant<int, least(MOST * kVec, 32)>{});
}

// The samples of contiguous tensors, as functions of the types.
auto given_samples(const Tensor& locations, const Tensor& weights) {
  return [&](auto /*value_tag*/, auto accumulate_tag) {
    using A = decltype(accumulate_tag);
    return GivenSamples<A>{static_cast<const A*>(locations.const_data_ptr()),
                           static_cast<const A*>(weights.const_data_ptr())};
  };
}
auto fused_samples(const Tensor& reference, const Tensor& offsets, const Tensor& logits, const Tensor* softmax) {
  return [&reference, &offsets, &logits, softmax](auto value_tag, auto accumulate_tag) {
    using A = decltype(accumulate_tag);
    const bool wide = offsets.scalar_type() == reference.scalar_type(), boxes = reference.size(3) == 4;
    const void* rows = softmax == nullptr ? nullptr : softmax->const_data_ptr();
    return FusedSamples<decltype(value_tag), A>{static_cast<const A*>(reference.const_data_ptr()),
                                                static_cast<const char*>(offsets.const_data_ptr()),
                                                static_cast<const char*>(logits.const_data_ptr()),
                                                static_cast<const SoftmaxRow<A>*>(rows),
                                                wide,
                                                boxes};
  };
}

// Up to so many samples a texel, adding directly is faster than sorting.
constexpr int64_t kDirectSamples = 4;

// Channels to fill rows up to before the kernels run, so that they can be read 16 bytes at a time: C itself where they
// can already be, and where samples are too few to pay for the copies.
int64_t filled_channels(const MsDeformAttnProblem& problem, const Tensor& value) {
  const int64_t vec = 16 / static_cast<int64_t>(value.element_size());
  const bool pays = problem.C >= vec && problem.Q * problem.K > kDirectSamples * problem.S;
  return pays ? ceil_div(problem.C, vec) * vec : problem.C;
}
Tensor fill_rows(const Tensor& tensor, const MsDeformAttnProblem& problem, int64_t channels) {
  const Tensor rows = view(tensor, {problem.B, tensor.size(1), problem.G, problem.C});
  const int64_t before_and_after[] = {0, channels - problem.C};
  return pad(rows, {before_and_after, 2});
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
  return levels.shapes == nullptr && std::all_of(levels.W, levels.W + problem.L, [](int32_t W) { return W > 1; });
}

// For rows of 16 samples.
KnownSteps known_steps(const Levels& levels, const MsDeformAttnProblem& problem, uint32_t texel_bytes) {
  KnownSteps steps{};
  uint32_t* step = steps.below;
  for (int l = 0; l < problem.L; ++l) {
    step = std::fill_n(step, points_on(levels, l) / 4, levels.H[l] > 1 ? levels.W[l] * texel_bytes : 0);
  }
  return steps;
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

ManyRuns many_runs(const Levels& levels, const MsDeformAttnProblem& problem) {
  ManyRuns runs{};
  runs.S = problem.S, runs.levels = levels;
  if (levels.shapes != nullptr) return runs;
  constexpr int kMost = sizeof(runs.level) / sizeof(Level);
  for (int l = 0; l < problem.L; ++l) {
    for (int i = 0; i < points_on(levels, l) / kRun && runs.count < kMost; ++i) {
      runs.level[runs.count++] = {levels.start[l], levels.H[l], levels.W[l], l};
    }
  }
  return runs;
}

// make_source(T{}, A{}) gives the samples of values of type T.
template <typename MakeSource>
Tensor forward(const MsDeformAttnProblem& problem, const Tensor& value, const Levels& levels,
               const MakeSource& make_source) {
  Tensor output = new_empty(value, {problem.B, problem.Q, problem.G * problem.C});
  if (output.numel() == 0) return output;
  if (problem.S == 0) return zero_(output);
  if (const int64_t channels = filled_channels(problem, value); channels > problem.C) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    const Tensor wide = forward(filled, fill_rows(value, problem, channels), levels, make_source);
    Tensor rows = view(output, {problem.B, problem.Q, problem.G, problem.C});
    Tensor all_rows = view(wide, {problem.B, problem.Q, problem.G, channels});
    copy_(rows, narrow(all_rows, 3, 0, problem.C));
    return output;
  }
  const cudaStream_t stream = current_stream(value);
  const int64_t heads = problem.B * problem.G;
  const int sms = multiprocessors(value.get_device_index());

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const auto source = make_source(value_tag, accumulate_tag);
    using Source = std::decay_t<decltype(source)>;
    dispatch_row<T, 32>(problem.C, aligned(value, 16), [&](auto vec, auto lanes) {
      constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
      const auto sizes_of = [&](int head_bits) {
        return ForwardSizes{problem.S,
                            static_cast<int32_t>(problem.Q),
                            static_cast<int32_t>(problem.G),
                            static_cast<int32_t>(problem.C),
                            static_cast<int32_t>(problem.L),
                            static_cast<int32_t>(problem.K),
                            static_cast<uint32_t>(heads >> head_bits),
                            static_cast<uint32_t>(ceil_div(problem.C, kVec * kLanes)),
                            static_cast<uint32_t>(problem.G * problem.C * sizeof(T)),
                            head_bits};
      };
      // Returns false for an image whose bytes a sample cannot count, and for rows read one value at a time, of which a
      // block's heads may be more than a warp has groups.
      const auto run_pyramid = [&](int head_bits) {
        if constexpr (kVec == 1) {
          return false;
        } else {
          const ForwardSizes sizes = sizes_of(head_bits);
          if (problem.S * int64_t{sizes.texel_bytes} > UINT32_MAX) return false;
          const int64_t total = int64_t{sizes.heads} * sizes.slices * problem.Q, share = ceil_div(total, sms);
          if (share > INT32_MAX) return false;
          const bool by_four = points_divide(levels, problem, 4);
          KnownSteps known{};
          const auto start = [&](auto kernel, auto walk) {
            const size_t shared = decltype(walk)::kWarpBytes * (kPyramidThreads / 32) + sizeof(Level) * problem.L +
                                  (sizeof(Level) + sizeof(Steps)) * (by_four ? problem.K / 4 : problem.K) +
                                  Regions::bytes(problem.L);
            if (shared > kPyramidShared) return false;
            allow_shared(kernel, shared);
            kernel<<<grid_size(ceil_div(total, share)), kPyramidThreads, shared, stream>>>(
                static_cast<const T*>(value.const_data_ptr()), levels, source,
                static_cast<T*>(output.mutable_data_ptr()), sizes, static_cast<uint32_t>(share), known);
            return true;
          };
          const PyramidWalk<A, kLanes, true> whole;
          const PyramidWalk<A, kLanes, false> part;
          if (!by_four) return start(pyramid_kernel<T, A, Source, kVec, kLanes, false, true, 0>, part);
          if (problem.K % whole.kPass != 0) {
            return start(pyramid_kernel<T, A, Source, kVec, kLanes, false, false, 0>, part);
          }
          // 16 samples of 8 heads of 32 channels, as nearly every model has them: 116 us, 118 else (bfloat16 81, 84).
          constexpr uint32_t kColumn = kVec * kLanes == 32 && sizeof(A) == 4 ? 256 * sizeof(T) : 0;
          if constexpr (kColumn > 0) {
            if (problem.K == whole.kPass && problem.C == 32 && problem.G == 8 && wide_levels(levels, problem)) {
              known = known_steps(levels, problem, kColumn);
              return start(pyramid_kernel<T, A, Source, kVec, kLanes, true, false, kColumn>, whole);
            }
          }
          return start(pyramid_kernel<T, A, Source, kVec, kLanes, true, false, 0>, whole);
        }
      };
      const auto run = [&](auto kernel, auto walk, int rows, int threads, int head_bits) {
        using W = decltype(walk);
        const int groups = threads / W::kGroup;
        const ForwardSizes sizes = sizes_of(head_bits);
        const dim3 grid =
            head_grid(ceil_div(problem.Q, int64_t{groups >> head_bits} * rows), int64_t{sizes.heads} * sizes.slices);
        const size_t shared = W::template group_offset<A>(groups) + sizeof(Level) * problem.L;
        allow_shared(kernel, shared);
        kernel<<<grid, threads, shared, stream>>>(static_cast<const T*>(value.const_data_ptr()), levels, source,
                                                  static_cast<T*>(output.mutable_data_ptr()), sizes);
      };
      // Few queries (a decoder): one block a multiprocessor, so that a head's queries meet in one first-level cache,
      // and as many threads a row as then fit the block. In 16 bit, blocks beyond 768 threads lose to rows in two
      // instead of four (Q=450: 5.5 us in four, 5.3 in two), and where levels hold no runs, to whole ones (Q=900: 9.0
      // in two, 8.6 whole).
      const int64_t blocks_per_head = std::max<int64_t>(1, sms / heads);
      const int64_t rows = ceil_div(problem.Q, blocks_per_head);
      const auto threads = [&](int group) { return ceil_div(rows * group, 32) * 32; };
      constexpr int kSplit4 = least(4, greatest(1, 16 / kLanes)), kSplit2 = least(2, greatest(1, 8 / kLanes));
      constexpr int kMostSplit = sizeof(T) == 2 ? 768 : kForwardThreads;
      const int64_t texel_bytes = problem.G * problem.C * static_cast<int64_t>(sizeof(T));
      const bool in_runs = problem.K > 0 && problem.K <= kMostInRuns && points_divide(levels, problem, kRun) &&
                           problem.S * texel_bytes <= int64_t{UINT32_MAX} && problem.C <= kVec * kLanes &&
                           problem.G <= 65535 && problem.B <= 65535;
      const auto few = [&](auto split) {
        constexpr int kSplit = decltype(split)::value;
        if constexpr (kVec > 1 && sizeof(A) == 4) {
          if (in_runs) {
            const int64_t block = threads(kLanes * kSplit), groups = block / (kLanes * kSplit);
            const DecoderSizes sizes{problem.S * texel_bytes,
                                     static_cast<uint32_t>(problem.Q * problem.G),
                                     static_cast<uint32_t>(problem.Q * problem.G * problem.K),
                                     static_cast<uint32_t>(problem.Q * problem.L),
                                     static_cast<uint32_t>(problem.Q),
                                     static_cast<uint32_t>(texel_bytes),
                                     static_cast<int32_t>(problem.G),
                                     static_cast<int32_t>(problem.C),
                                     static_cast<int32_t>(problem.L),
                                     static_cast<int32_t>(problem.K)};
            const dim3 grid(grid_size(ceil_div(problem.Q, groups)), static_cast<unsigned>(problem.G),
                            static_cast<unsigned>(problem.B));
            const auto launch = [&](const auto& runs, size_t table) {
              const auto kernel = decoder_kernel<T, A, Source, std::decay_t<decltype(runs)>, kVec, kLanes, kSplit>;
              const size_t shared = chunk_bytes<A>() * groups + table;
              allow_shared(kernel, shared);
              kernel<<<grid, static_cast<unsigned>(block), shared, stream>>>(
                  static_cast<const T*>(value.const_data_ptr()), source, static_cast<T*>(output.mutable_data_ptr()),
                  sizes, runs);
            };
            if (levels.shapes == nullptr && problem.K == kChunk) {
              launch(few_runs(levels, problem), 0);
            } else {
              launch(many_runs(levels, problem), sizeof(Level) * (problem.K / kRun));
            }
            return;
          }
        }
        run(forward_kernel<T, A, Source, kVec, kLanes, kSplit, 1>, Walk<kLanes, kSplit, 1>{}, 1,
            static_cast<int>(threads(kLanes * kSplit)), 0);
      };
      if (threads(kLanes * kSplit4) <= kMostSplit) {
        few(std::integral_constant<int, kSplit4>{});
      } else if (threads(kLanes * kSplit2) <= (in_runs ? kForwardThreads : kMostSplit)) {
        few(std::integral_constant<int, kSplit2>{});
      } else if (threads(kLanes) <= kForwardThreads) {
        few(std::integral_constant<int, 1>{});
      } else {
        // Rows of neighbouring heads that share a 128-byte line are read together: alone, they would all fall into the
        // same banks of the cache.
        int head_bits = 0;
        while ((problem.C * static_cast<int64_t>(sizeof(T)) << (head_bits + 1)) <= 128 &&
               problem.G % (int64_t{2} << head_bits) == 0) {
          ++head_bits;
        }
        // An encoder: 126 us in the order of regions, 150 in that of queries (bfloat16 96, 110).
        if (problem.Q == problem.S && problem.K > 0 && run_pyramid(head_bits)) return;
        // Two rows a group, in passes of four samples that keep to one level, unless these would be padded. In 16 bit,
        // where queries share nothing, more warps win (48 images: 490 against 515 us; a decoder of 4000: 30 against
        // 28).
        const bool by_four = Walk<kLanes, 1, 2>::kMixed || points_divide(levels, problem, 4);
        const bool two_rows = sizeof(T) > 2 || kLanes > 4;
        if (by_four && two_rows) {
          run(forward_kernel<T, A, Source, kVec, kLanes, 1, 2>, Walk<kLanes, 1, 2>{}, 2, 512, head_bits);
        } else if (by_four) {
          // 48 images: 473 us, 480 else.
          if constexpr (sizeof(T) == 2 && kVec > 1 && kLanes == 4) {
            if (problem.G == 1 && texel_bytes == 64 && problem.S * texel_bytes <= UINT32_MAX &&
                wide_levels(levels, problem)) {
              return run(forward_kernel<T, A, Source, kVec, kLanes, 1, 1, true>, Walk<kLanes, 1, 1>{}, 1, 256, 0);
            }
          }
          run(forward_kernel<T, A, Source, kVec, kLanes, 1, 1>, Walk<kLanes, 1, 1>{}, 1, 256, head_bits);
        } else {
          run(forward_kernel<T, A, Source, kVec, kLanes, kSplit2, 1>, Walk<kLanes, kSplit2, 1>{}, 1, 256, head_bits);
        }
      }
    });
  });
  check_launch("ms_deform_attn");
  return output;
}

// The plan of the levels, on the device.
Tensor make_plan(const MsDeformAttnProblem& problem, const Tensor& value, const Levels& levels) {
  Tensor plan = new_empty(value, {static_cast<int64_t>(sizeof(LevelPlan)) * problem.L}, ScalarType::Byte);
  plan_kernel<<<1, 1, 0, current_stream(value)>>>(levels, static_cast<LevelPlan*>(plan.mutable_data_ptr()),
                                                  static_cast<int>(problem.L), problem.S, problem.Q);
  return plan;
}

template <typename MakeSource, typename MakeGrads>
void backward_direct(const MsDeformAttnProblem& problem, const Tensor& grad_output, const Tensor& value,
                     const LevelPlan* plan, const MakeSource& make_source, const MakeGrads& make_grads,
                     Tensor& grad_value) {
  const cudaStream_t stream = current_stream(value);
  const ScalarType sum_type = accumulate_dtype(value.scalar_type());
  Tensor sums = sum_type == value.scalar_type() ? zero_(grad_value) : new_zeros(value, value.sizes(), sum_type);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const auto source = make_source(value_tag, accumulate_tag);
    using Source = std::decay_t<decltype(source)>;
    // VEC: 16 bytes of sums, so that the lanes' reductions lie side by side.
    dispatch_row<T, 32, 16 / sizeof(A)>(
        problem.C, aligned(value, 16) && aligned(grad_output, 16), [&](auto vec, auto lanes) {
          constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
          const int64_t samples = problem.B * problem.Q * problem.G * problem.K;
          direct_kernel<T, A, Source, kVec, kLanes><<<grid_size(ceil_div(samples * kLanes, kSampleThreads)),
                                                      kSampleThreads, sizeof(LevelPlan) * problem.L, stream>>>(
              static_cast<const T*>(grad_output.const_data_ptr()), static_cast<const T*>(value.const_data_ptr()), plan,
              source, static_cast<A*>(sums.mutable_data_ptr()), make_grads(accumulate_tag), problem);
        });
  });
  if (sum_type != value.scalar_type()) copy_(grad_value, sums);
}

// Returns false where it does not apply: in float64, for rows that one turn of lanes does not cover or that cannot be
// read in packs, for level tables that leave no place for a chunk, and where a number of 32 bits does not tell the
// levels of all queries apart (check_sizes sees to samples, texels and heads).
template <typename MakeSource, typename MakeGrads>
bool backward_pyramid(const MsDeformAttnProblem& problem, const Tensor& grad_output, const Tensor& value,
                      const Levels& levels, const LevelPlan* plan, const MakeSource& make_source,
                      const MakeGrads& make_grads, Tensor& grad_value) {
  const cudaStream_t stream = current_stream(value);
  const int L = static_cast<int>(problem.L);
  const int64_t rows = problem.B * problem.G * problem.Q,
                slots = 2 * int64_t{multiprocessors(value.get_device_index())};
  const size_t order_shared = sizeof(Level) * L + Regions::bytes(L);
  if (problem.C > 128 || order_shared > 48 * 1024 || problem.Q * problem.L > INT32_MAX) return false;
  bool done = false;
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    if constexpr (std::is_same_v<A, float>) {
      const auto source = make_source(value_tag, accumulate_tag);
      using Source = std::decay_t<decltype(source)>;
      const auto bytes = [&](int64_t queries) { return chunk_bytes<T>(problem.C, L, queries); };
      int64_t most = kMaxChunk;
      while (most > 0 && bytes(most) > kChunkShared) --most;
      if (most == 0) return;
      const int64_t waves = ceil_div(rows, slots * most), share = ceil_div(rows, slots * waves);
      const bool is_aligned = aligned(value, 16) && aligned(grad_output, 16);
      dispatch_row<T, 32, 4>(problem.C, is_aligned, [&](auto vec, auto lanes) {
        if constexpr (decltype(vec)::value == 4) {
          const bool is_float = value.scalar_type() == ScalarType::Float;
          Tensor sums = is_float ? zero_(grad_value) : new_zeros(value, value.sizes(), ScalarType::Float);
          Tensor order = new_empty(value, {problem.Q}, ScalarType::Int);
          auto* order_data = static_cast<uint32_t*>(order.mutable_data_ptr());
          order_queries_kernel<<<kOrderQueryBlocks, kOrderQueryThreads, order_shared, stream>>>(levels, L, problem.S,
                                                                                                order_data);
          const auto kernel = pyramid_grad_kernel<T, Source, decltype(lanes)::value>;
          allow_shared(kernel, bytes(share));
          kernel<<<grid_size(ceil_div(rows, share)), kChunkThreads, bytes(share), stream>>>(
              static_cast<const T*>(grad_output.const_data_ptr()), static_cast<const T*>(value.const_data_ptr()), plan,
              order_data, source, static_cast<float*>(sums.mutable_data_ptr()), make_grads(accumulate_tag),
              ChunkSizes{problem.S, rows, static_cast<int32_t>(problem.Q), static_cast<int32_t>(problem.G),
                         static_cast<int32_t>(problem.C), L, static_cast<int32_t>(problem.K),
                         static_cast<uint32_t>(share)});
          if (!is_float) copy_(grad_value, sums);
          done = true;
        }
      });
    }
  });
  return done;
}

// Fills grad_value and the samples' gradients, none of which is empty. make_grads(A{}) gives the latter's place.
template <typename MakeSource, typename MakeGrads>
void backward(const MsDeformAttnProblem& problem, const Tensor& grad_output, const Tensor& value, const Levels& levels,
              const LevelPlan* plan, const MakeSource& make_source, const MakeGrads& make_grads, bool deterministic,
              Tensor& grad_value) {
  if (!deterministic && problem.Q * problem.K <= kDirectSamples * problem.S) {
    return backward_direct(problem, grad_output, value, plan, make_source, make_grads, grad_value);
  }
  if (const int64_t channels = filled_channels(problem, value); channels > problem.C) {
    MsDeformAttnProblem filled = problem;
    filled.C = channels;
    Tensor wide = new_empty(value, {problem.B, problem.S, problem.G, channels});
    backward(filled, fill_rows(grad_output, problem, channels), fill_rows(value, problem, channels), levels, plan,
             make_source, make_grads, deterministic, wide);
    copy_(grad_value, narrow(wide, 3, 0, problem.C));
    return;
  }
  // An encoder: 313 us by chunks of queries, 534 sorted as a whole (bfloat16 358, 464; uniform locations 512, 555).
  if (!deterministic && problem.Q == problem.S &&
      backward_pyramid(problem, grad_output, value, levels, plan, make_source, make_grads, grad_value)) {
    return;
  }
  const cudaStream_t stream = current_stream(value);
  const int sms = multiprocessors(value.get_device_index());
  const int L = static_cast<int>(problem.L);
  const int64_t heads = problem.B * problem.G;
  const int point_bits = point_bits_of(problem);

  int64_t head_slots = 0, head_bins = 0, tiles = 0;
  for (int l = 0; l < L && problem.levels_on_host; ++l) {
    const int64_t H = levels.H[l], W = levels.W[l], samples = problem.Q * points_on(levels, l), cells = cells_of(H, W);
    head_slots += cells + 1;
    head_bins += bins_of(cells, bin_bits_of(samples, cells)) + 1;
    tiles += tiles_of(tile_of_shape(tile_shape_of(samples, H, W)), H, W);
  }
  if (!problem.levels_on_host) {              // only the device knows: bounds, and blocks take further tiles
    const int64_t cells = 2 * problem.S + 2;  // at most: H + W <= S + 1 of any level
    head_slots = L * (cells + 1);
    head_bins = 2 * problem.Q * problem.K / kBinSamples + L * ((cells >> kMaxBinBits) + 2);
    tiles = ceil_div(problem.S, 64) + L;
  }
  const int64_t samples = problem.B * problem.Q * problem.G * problem.K;
  Tensor starts = new_empty(value, {heads * head_slots}, ScalarType::Int);
  Tensor bins = new_zeros(value, {2, heads * head_bins}, ScalarType::Int);  // their starts; how far they are filled
  zero_kernel<<<sms * 2, 256, 0, stream>>>(plan, static_cast<char*>(grad_value.mutable_data_ptr()),
                                           grad_value.numel() * static_cast<int64_t>(grad_value.element_size()));

  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const int64_t record_bytes = samples * sizeof(Record<A>);
    Tensor records = new_empty(value, {record_bytes}, ScalarType::Byte),
           sorted = new_empty(value, {record_bytes}, ScalarType::Byte);
    const auto source = make_source(value_tag, accumulate_tag);
    using Source = std::decay_t<decltype(source)>;
    const SampleGrads<A> grads = make_grads(accumulate_tag);
    auto* start_data = static_cast<int32_t*>(starts.mutable_data_ptr());
    auto* bin_data = static_cast<int32_t*>(bins.mutable_data_ptr());
    int32_t* filled_data = bin_data + heads * head_bins;

    constexpr int kEach = kPieceEach<A>;
    const uint32_t K = static_cast<uint32_t>(problem.K);
    const unsigned pieces = grid_size(heads * ceil_div(problem.Q, PieceWalk::queries(K, kEach)) * PieceWalk::parts(K));
    const int64_t local_bins = head_bins <= kMostLocalBins ? head_bins : 0;
    const size_t table_bytes = sizeof(LevelPlan) * L, local_bytes = sizeof(int32_t) * (local_bins + 1);
    count_kernel<A, Source><<<pieces, kPieceThreads, table_bytes + local_bytes, stream>>>(
        plan, source, bin_data, grads, problem, static_cast<int>(head_bins), static_cast<int>(local_bins));
    scan_kernel<<<grid_size(heads * L), kScanThreads, 0, stream>>>(plan, bin_data, problem,
                                                                   static_cast<int>(head_bins));
    auto* record_data = static_cast<Record<A>*>(records.mutable_data_ptr());
    auto* sorted_data = static_cast<Record<A>*>(sorted.mutable_data_ptr());
    const size_t scatter_bytes =
        kPieceThreads * kEach * (sizeof(Record<A>) + sizeof(uint16_t)) + table_bytes + 2 * local_bytes;
    allow_shared(scatter_kernel<A, Source>, scatter_bytes);
    scatter_kernel<A, Source><<<pieces, kPieceThreads, scatter_bytes, stream>>>(
        plan, source, bin_data, filled_data, record_data, problem, static_cast<int>(head_bins),
        static_cast<int>(local_bins), point_bits);
    allow_shared(sort_kernel<A>, sizeof(SortScratch<A>));
    sort_kernel<A><<<head_grid(head_bins, heads), kSortThreads, sizeof(SortScratch<A>), stream>>>(
        plan, bin_data, record_data, sorted_data, start_data, problem, head_slots, static_cast<int>(head_bins),
        point_bits + std::max(1, bit_width(problem.Q - 1)), point_bits);
    const bool is_aligned = aligned(value, 16) && aligned(grad_output, 16);
    // Of a row, at most 128 bytes of sums at a time: the planes of a tile's cells must fit shared memory.
    dispatch_row<T, (128 / (16 / sizeof(T)) / sizeof(A))>(problem.C, is_aligned, [&](auto vec, auto lanes) {
      constexpr int kVec = decltype(vec)::value, kLanes = decltype(lanes)::value;
      constexpr int kBatch = least(kLanes, 4), kGroups = kGatherThreads / kLanes;  // scratch enough for either way
      constexpr bool kTensorCores = std::is_same_v<T, __nv_bfloat16> && kVec * kLanes == kMmaChannels && kVec > 1;
      const bool whole = problem.C % kMmaChannels == 0;  // no channels are left over in the last turn
      const auto kernel =
          whole ? gather_kernel<T, A, kVec, kLanes, kTensorCores> : gather_kernel<T, A, kVec, kLanes, false>;
      const size_t shared = sizeof(A) * 4 * kSlots * kLanes * kVec + kGroups * kBatch * (4 * sizeof(A) + 4);
      allow_shared(kernel, shared);
      kernel<<<head_grid(tiles, heads), kGatherThreads, shared, stream>>>(
          static_cast<const T*>(grad_output.const_data_ptr()), static_cast<const T*>(value.const_data_ptr()), plan,
          start_data, sorted_data, static_cast<T*>(grad_value.mutable_data_ptr()), grads, problem, head_slots,
          point_bits);
    });
  });
}

Tensor ms_deform_attn(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                      const Tensor& locations_in, const Tensor& weights_in) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_sizes(problem);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor value = contiguous(value_in), level_shapes = contiguous(level_shapes_in),
               level_starts = contiguous(level_starts_in), locations = contiguous_pairs(locations_in),
               weights = contiguous_pairs(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  const Tensor output = forward(problem, value, levels, given_samples(locations, weights));
  check_launch("ms_deform_attn");
  return output;
}

std::tuple<Tensor, Tensor, Tensor> ms_deform_attn_backward(const Tensor& grad_output_in, const Tensor& value_in,
                                                           const Tensor& level_shapes_in, const Tensor& level_starts_in,
                                                           const Tensor& locations_in, const Tensor& weights_in,
                                                           bool deterministic) {
  const auto problem = check_ms_deform_attn(value_in, level_shapes_in, level_starts_in, locations_in, weights_in);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor grad_output = contiguous(grad_output_in), value = contiguous(value_in),
               level_shapes = contiguous(level_shapes_in), level_starts = contiguous(level_starts_in),
               locations = contiguous_pairs(locations_in), weights = contiguous(weights_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, nullptr);
  Tensor grad_value = new_empty(value, value.sizes()), grad_locations = new_empty(locations, locations.sizes()),
         grad_weights = new_empty(weights, weights.sizes());
  if (problem.C == 0 || problem.S == 0 || grad_weights.numel() == 0) {
    zero_(grad_value), zero_(grad_locations), zero_(grad_weights);
    return {grad_value, grad_locations, grad_weights};
  }
  const Tensor plan = make_plan(problem, value, levels);
  backward(
      problem, grad_output, value, levels, static_cast<const LevelPlan*>(plan.const_data_ptr()),
      given_samples(locations, weights),
      [&](auto accumulate_tag) {
        using A = decltype(accumulate_tag);
        return SampleGrads<A>{static_cast<A*>(grad_locations.mutable_data_ptr()),
                              static_cast<A*>(grad_weights.mutable_data_ptr()), nullptr};
      },
      deterministic, grad_value);
  check_launch("ms_deform_attn_backward");
  return {grad_value, grad_locations, grad_weights};
}

Tensor ms_deform_attn_fused(const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
                            const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in,
                            std::vector<int64_t> num_points) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_sizes(problem);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor value = contiguous(value_in), level_shapes = contiguous(level_shapes_in),
               level_starts = contiguous(level_starts_in), reference = contiguous_pairs(reference_in),
               offsets = contiguous_pairs(offsets_in), logits = contiguous_pairs(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  const Tensor output = forward(problem, value, levels, fused_samples(reference, offsets, logits, nullptr));
  check_launch("ms_deform_attn_fused");
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ms_deform_attn_fused_backward(
    const Tensor& grad_output_in, const Tensor& value_in, const Tensor& level_shapes_in, const Tensor& level_starts_in,
    const Tensor& reference_in, const Tensor& offsets_in, const Tensor& logits_in, std::vector<int64_t> num_points,
    bool needs_reference, bool deterministic) {
  const auto problem = check_ms_deform_attn_fused(value_in, level_shapes_in, level_starts_in, reference_in, offsets_in,
                                                  logits_in, num_points);
  check_ms_deform_attn_grad(problem, grad_output_in, value_in);
  check_backward_sizes(problem);
  const torch::stable::accelerator::DeviceGuard guard(value_in.get_device_index());
  const Tensor grad_output = contiguous(grad_output_in), value = contiguous(value_in),
               level_shapes = contiguous(level_shapes_in), level_starts = contiguous(level_starts_in),
               reference = contiguous_pairs(reference_in), offsets = contiguous_pairs(offsets_in),
               logits = contiguous(logits_in);
  const Levels levels = levels_of(problem, level_shapes, level_starts, num_points.data());
  Tensor grad_value = new_empty(value, value.sizes()), grad_offsets = new_empty(offsets, offsets.sizes()),
         grad_logits = new_empty(logits, logits.sizes());
  Tensor grad_reference = needs_reference ? new_empty(reference, reference.sizes()) : new_empty(reference, {0});
  if (problem.C == 0 || problem.S == 0 || logits.numel() == 0) {
    zero_(grad_value), zero_(grad_reference), zero_(grad_offsets), zero_(grad_logits);
    return {grad_value, grad_reference, grad_offsets, grad_logits};
  }
  const Tensor plan_bytes = make_plan(problem, value, levels);
  const auto* plan = static_cast<const LevelPlan*>(plan_bytes.const_data_ptr());
  const int64_t rows = problem.B * problem.Q * problem.G;
  Tensor sample_grads = new_empty(reference, {rows, problem.K, 4}), softmax = new_empty(reference, {rows, 2});
  const int lanes = row_lanes_of(problem.K), K = static_cast<int>(problem.K), L = static_cast<int>(problem.L),
            G = static_cast<int>(problem.G);
  const cudaStream_t stream = current_stream(value);
  const auto make_source = fused_samples(reference, offsets, logits, &softmax);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    softmax_kernel<T, A><<<grid_size(ceil_div(rows * kSoftmaxLanes, kRowThreads)), kRowThreads, 0, stream>>>(
        make_source(value_tag, accumulate_tag), static_cast<SoftmaxRow<A>*>(softmax.mutable_data_ptr()), rows, K);
  });
  const auto make_grads = [&](auto accumulate_tag) {
    using A = decltype(accumulate_tag);
    return SampleGrads<A>{nullptr, nullptr, static_cast<Pack<A, 4>*>(sample_grads.mutable_data_ptr())};
  };
  backward(problem, grad_output, value, levels, plan, make_source, make_grads, deterministic, grad_value);
  dispatch_value_type(value.scalar_type(), [&](auto value_tag, auto accumulate_tag) {
    using T = decltype(value_tag);
    using A = decltype(accumulate_tag);
    const auto source = make_source(value_tag, accumulate_tag);
    const auto* grads = static_cast<const Pack<A, 4>*>(sample_grads.const_data_ptr());
    const auto run = [&](auto type) {
      using I = decltype(type);
      fused_grad_kernel<T, A, I>
          <<<grid_size(ceil_div(rows * lanes, kRowThreads)), kRowThreads, sizeof(LevelPlan) * L, stream>>>(
              plan, source, grads, static_cast<I*>(grad_offsets.mutable_data_ptr()),
              static_cast<I*>(grad_logits.mutable_data_ptr()), rows, G, L, K, lanes);
    };
    source.wide ? run(accumulate_tag) : run(value_tag);
    if (needs_reference) {
      const int64_t count = problem.B * problem.Q * L;
      reference_grad_kernel<T, A><<<grid_size(ceil_div(count, kRowThreads)), kRowThreads, 0, stream>>>(
          plan, source, grads, static_cast<A*>(grad_reference.mutable_data_ptr()), count, G, L, K);
    }
  });
  check_launch("ms_deform_attn_fused_backward");
  return {grad_value, grad_reference, grad_offsets, grad_logits};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_IMPL(visdet, CUDA, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&visdet::ms_deform_attn));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&visdet::ms_deform_attn_backward));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&visdet::ms_deform_attn_fused));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&visdet::ms_deform_attn_fused_backward));
}

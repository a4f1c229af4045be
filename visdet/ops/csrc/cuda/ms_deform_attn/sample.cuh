// Where the samples of attention come from, for both forms of the operator, and which texels a sample reads.
//
// A sample source is given to a kernel by value. Kernels are templates of it:
//   GivenSamples  reads locations and weights.
//   FusedSamples  reads reference points, offsets and logits; it works out the locations and the softmax.
//
// fetch...() only loads, and position() and weight() do the arithmetic on what has been loaded. So a kernel can have
// the loads of its next samples in flight while it sums the current ones. In a source,
//   Raw          is what has been loaded of a sample;
//   Row          is what the weights of a row have in common, such as the largest logit and the scale of a softmax;
//   kNeedsLevel  says whether fetch_position() needs the sample's level: query_level is query * L + level;
//   of_image()   returns the source of one image, given the numbers of levels and of samples before it;
//   fetch_run()  fetches N = 1, 2 or 4 neighbouring samples of a row on one level; the first index is a multiple of N.
// All indices count from the first sample of the image. ONCE and LINE are explained at load_once().
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/values.cuh"
#include "common/warp.cuh"
#include "cuda/ms_deform_attn/levels.cuh"

namespace visdet::ms_deform_attn {

// Loads a value that is read only once, so that it displaces nothing from the first-level cache. LINE: its neighbours
// are needed soon, and the 16 values around it are brought into the second-level cache together.
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

template <typename A>
struct GivenSamples {
  const A* locations;  // [B, Q, G, K, 2]
  const A* weights;    // [B, Q, G, K]

  struct Raw {
    A x, y, weight;
  };
  struct Row {};
  static constexpr bool kNeedsLevel = false;

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
        const Pack<A, 4> two = ONCE ? load_once(from + i / 2) : from[i / 2];
        raw[i] = {two.at[0], two.at[1], A(0)}, raw[i + 1] = {two.at[2], two.at[3], A(0)};
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

// The softmax of a row: weight = exp(logit - largest) * scale. `largest` is at least the least finite number, so that a
// logit of -inf has weight zero; a row of nothing but -inf is NaN, as in torch.
template <typename A>
struct SoftmaxRow {
  A largest, scale;
  __device__ __forceinline__ A weight(A logit) const { return exp(logit - largest) * scale; }
};

template <typename T, typename A>
struct FusedSamples {
  const A* reference_points;  // [B, Q, L, 2 or 4]
  const char* offsets;        // [B, Q, G, K, 2], of type A if `full_precision`, else of type T
  const char* logits;         // [B, Q, G, K], of the type of offsets
  const SoftmaxRow<A>* rows;  // [B, Q, G], which row_at() reads, or null
  bool full_precision;
  bool boxes;  // reference_points are boxes (cx, cy, w, h) instead of points

  struct Raw {
    A x, y, weight;  // If they are of type T, x and weight hold their bits until they are used.
    A center_x, center_y, w, h;
  };
  using Row = SoftmaxRow<A>;
  static constexpr bool kNeedsLevel = true;
  static constexpr A kLeast = sizeof(A) == 4 ? -3.4028234663852886e38 : -1.7976931348623157e308;  // finite

  __device__ __forceinline__ int element() const { return full_precision ? sizeof(A) : sizeof(T); }
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
    if (full_precision) {
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
    if (full_precision) {
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
    } else {
      fetch_reference(query_level, raw[0]);
#pragma unroll
      for (int i = 1; i < N; ++i) raw[i] = raw[0];
      if (full_precision) {
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
  }
  __device__ __forceinline__ A logit_of(A raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!full_precision) {
        const uint16_t bits = static_cast<uint16_t>(__float_as_uint(raw));
        return to_accumulate(*reinterpret_cast<const T*>(&bits));
      }
    }
    return raw;
  }
  __device__ __forceinline__ Pack<A, 2> offset_of(const Raw& raw) const {
    if constexpr (sizeof(T) == 2) {
      if (!full_precision) {
        const uint32_t bits = __float_as_uint(raw.x);
        A offset[2];
        unpack(*reinterpret_cast<const Pack<T, 2>*>(&bits), offset);
        return {offset[0], offset[1]};
      }
    }
    return {raw.x, raw.y};
  }
  // Written with fma, so that every kernel places a sample between the same texels.
  __device__ __forceinline__ void position(const Raw& raw, const Level& level, int points, A& x, A& y) const {
    const Pack<A, 2> offset = offset_of(raw);
    const A W = level.W, H = level.H, half_of_each = A(0.5) / points;
    const A center_x = fma(raw.center_x, W, A(-0.5)), center_y = fma(raw.center_y, H, A(-0.5));
    x = boxes ? fma(offset.at[0], raw.w * W * half_of_each, center_x) : center_x + offset.at[0];
    y = boxes ? fma(offset.at[1], raw.h * H * half_of_each, center_y) : center_y + offset.at[1];
  }
  // Returns the gradients of a sample's offset, given those of its location (0 to 1). They are zero where the sample
  // does not count, even if the box is infinite or NaN.
  __device__ __forceinline__ Pack<A, 2> grad_offset(const Raw& raw, const Level& level, int points, A of_x,
                                                    A of_y) const {
    const A half_of_each = A(0.5) / points;
    const A scale_x = boxes ? raw.w * half_of_each : A(1) / level.W,
            scale_y = boxes ? raw.h * half_of_each : A(1) / level.H;
    return {of_x == 0 ? A(0) : of_x * scale_x, of_y == 0 ? A(0) : of_y * scale_y};
  }
  // Works out the softmax of the row whose first sample is `first`. All threads of the warp call it; `lanes`
  // neighbouring threads, a power of two, work on one row.
  __device__ __forceinline__ Row row_of_lanes(bool exists, uint32_t first, int K, int lane, int lanes) const {
    constexpr int kEach = 4;  // the loads that a thread has in flight
    A largest = kLeast, sum = 0;
    for (int k = lane; exists && k < K; k += kEach * lanes) {
      A logit[kEach], top = largest;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        Raw raw;
        raw.weight = 0;
        if (k + i * lanes < K) fetch_weight(first + k + i * lanes, raw);
        logit[i] = k + i * lanes < K ? logit_of(raw.weight) : -static_cast<A>(INFINITY);
        top = logit[i] > top ? logit[i] : top;  // A NaN is not the largest, but makes the sum NaN.
      }
      sum *= exp(largest - top);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += exp(logit[i] - top);
      largest = top;
    }
    const A top = max_lanes(largest, 1, lanes);
    sum = sum_lanes(sum * exp(largest - top), 1, lanes);
    return {top, A(1) / sum};
  }
  // The same where LANES threads have already fetched the whole row, N samples each. has(i) says whether the i-th
  // sample of this thread exists.
  template <int LANES, int N, typename Has>
  __device__ __forceinline__ Row row_of_raw(const Raw (&raw)[N], const Has& has) const {
    A largest = kLeast, sum = 0, logit[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      logit[i] = has(i) ? logit_of(raw[i].weight) : -static_cast<A>(INFINITY);
      largest = logit[i] > largest ? logit[i] : largest;  // A NaN is not the largest, but makes the sum NaN.
    }
    largest = max_lanes(largest, 1, LANES);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp(logit[i] - largest);
    return {largest, A(1) / sum_lanes(sum, 1, LANES)};
  }
  __device__ __forceinline__ Row row_at(int64_t row) const { return rows[row]; }
  __device__ __forceinline__ A weight(const Raw& raw, const Row& row) const { return row.weight(logit_of(raw.weight)); }
};

// Returns v limited to 0..1; NaN becomes 0.
__device__ __forceinline__ float saturate(float v) { return __saturatef(v); }
__device__ __forceinline__ double saturate(double v) { return fmin(fmax(v, 0.0), 1.0); }
// Returns v rounded towards zero; numbers beyond the integers become the nearest one.
__device__ __forceinline__ int32_t truncate(float v) { return __float2int_rz(v); }
__device__ __forceinline__ int32_t truncate(double v) { return __double2int_rz(v); }

// Along an axis of `size` texels, returns the first of the two neighbouring texels that a sample at x reads. Both are
// texels of the map; on an axis of one texel they are the same. `fraction` is how far the way from the first to the
// second the sample lies, and `inside` is the part of the sample that falls inside the map, less than 1 only at its
// border. A sample at NaN has no part inside.
template <typename A>
__device__ __forceinline__ int32_t first_texel(A x, int32_t size, A& fraction, A& inside) {
  const int32_t first = min(truncate(fmax(x, A(0))), max(size - 2, 0));
  fraction = saturate(x - static_cast<A>(first));
  inside = saturate(fmin(x + A(1), static_cast<A>(size) - x));
  return first;
}

// The two forms of the operator on the host: the contiguous tensors that samples come from, and their source.
struct GivenForm {
  const Tensor &locations, &weights;

  template <typename T, typename A>
  GivenSamples<A> source() const {
    return {data_of(locations), data_of(weights)};
  }
};
struct FusedForm {
  const Tensor &reference, &offsets, &logits;

  template <typename T, typename A>
  FusedSamples<T, A> source() const {
    const bool full_precision = offsets.scalar_type() == reference.scalar_type(), boxes = reference.size(3) == 4;
    return {data_of(reference), data_of(offsets), data_of(logits), nullptr, full_precision, boxes};
  }
};

}  // namespace visdet::ms_deform_attn

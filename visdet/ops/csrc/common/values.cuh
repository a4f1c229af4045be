// Values on the device: their types, the types their sums are taken in, conversions, and loads and stores of several
// values by one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/checks.h"

namespace visdet {

template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};

__device__ __forceinline__ float to_accumulate(float v) { return v; }
__device__ __forceinline__ double to_accumulate(double v) { return v; }
__device__ __forceinline__ float to_accumulate(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_accumulate(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T, typename A>
__device__ __forceinline__ T from_accumulate(A v) {
  static_assert(std::is_same_v<A, typename AccumulateType<T>::type>);
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else {
    return v;
  }
}

constexpr int greatest(int a, int b) { return a > b ? a : b; }
constexpr int least(int a, int b) { return a < b ? a : b; }

// N values moved by one load or store of N * sizeof(T) bytes, or by several of 16 bytes. No pack asks for more than 16
// bytes of alignment, since that is what the operators check of the tensors they are given.
template <typename T, int N>
struct alignas(least(N* static_cast<int>(sizeof(T)), 16)) Pack {
  T at[N];
};

// Values of a pack in the type of sums, and back. A word of two bfloat16 is two float32 after a shift and a mask.
template <typename T, int N, typename A>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, A (&to)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    const auto* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      to[i] = __uint_as_float(words[i / 2] << 16);
      to[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
    const auto* words = reinterpret_cast<const __half2*>(&pack);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = __half22float2(words[i / 2]);
      to[i] = pair.x, to[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_accumulate(pack.at[i]);
  }
}

template <typename T, int N, typename A>
__device__ __forceinline__ void store_pack(T* to, const A (&values)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.at[i] = from_accumulate<T>(values[i]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// to[i] += from[i], by reductions at the second-level cache.
template <int VEC, typename A>
__device__ __forceinline__ void add_pack(A* to, const A (&from)[VEC]) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kFours = VEC % 4 == 0 && sizeof(A) == 4;
#else
  constexpr bool kFours = false;
#endif
  if constexpr (kFours) {
#pragma unroll
    for (int v = 0; v < VEC; v += 4) {
      atomicAdd(reinterpret_cast<float4*>(to + v), make_float4(from[v], from[v + 1], from[v + 2], from[v + 3]));
    }
  } else {
#pragma unroll
    for (int v = 0; v < VEC; ++v) atomicAdd(to + v, from[v]);
  }
}

template <typename A>
__device__ __forceinline__ A quiet_nan() {
  return static_cast<A>(__int_as_float(0x7fffffff));
}

// One load of VEC values.
template <typename T, int VEC, typename A>
__device__ __forceinline__ void load_pack(const void* from, A (&to)[VEC]) {
  const Pack<T, VEC> pack = *static_cast<const Pack<T, VEC>*>(from);  // a copy: one load
  unpack(pack, to);
}

template <typename F>
void dispatch_value_type(ScalarType type, const F& f) {
  dispatch_types_of<__half, __nv_bfloat16>(type, f);
}

// The same for operators without kernels for float64: f(T{}).
template <typename F>
void dispatch_all_but_double(const char* op, ScalarType type, const F& f) {
  VISDET_CHECK(op, type != ScalarType::Double, "float64 has no kernel");
  dispatch_value_type(type, [&](auto tag, auto) {
    if constexpr (sizeof(tag) < 8) f(tag);
  });
}

}  // namespace visdet

// Operations that are rounded by themselves: the compiler may not fuse a multiplication and an addition.
#pragma once

#include <cuda_runtime.h>

namespace visdet {

__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double sum(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return __ddiv_rn(a, b); }

// The squared distance of two points.
template <typename A>
__device__ __forceinline__ A squared_distance(const A* a, const A* b) {
  const A x = sum(a[0], -b[0]), y = sum(a[1], -b[1]), z = sum(a[2], -b[2]);
  return sum(sum(product(x, x), product(y, y)), product(z, z));
}

}  // namespace visdet

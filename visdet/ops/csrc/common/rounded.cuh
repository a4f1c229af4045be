// What kernels compute of operations that are rounded by themselves.
#pragma once

#include <cuda_runtime.h>

#include "common/rounded.h"

namespace visdet {

// The squared distance of two points.
template <typename A>
__device__ __forceinline__ A squared_distance(const A* a, const A* b) {
  const A x = sum(a[0], -b[0]), y = sum(a[1], -b[1]), z = sum(a[2], -b[2]);
  return sum(sum(product(x, x), product(y, y)), product(z, z));
}

}  // namespace visdet

// Operations that are rounded by themselves: the compiler may not fuse a multiplication and an addition. setup.py tells
// the host's compiler so for all files but those of csrc/cpu.
#pragma once

#include "common/host_device.h"

namespace visdet {

#if defined(__CUDA_ARCH__)
VISDET_HOST_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
VISDET_HOST_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }
VISDET_HOST_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }
VISDET_HOST_DEVICE double sum(double a, double b) { return __dadd_rn(a, b); }
VISDET_HOST_DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
VISDET_HOST_DEVICE double quotient(double a, double b) { return __ddiv_rn(a, b); }
#else
template <typename A>
VISDET_HOST_DEVICE A product(A a, A b) {
  return a * b;
}
template <typename A>
VISDET_HOST_DEVICE A sum(A a, A b) {
  return a + b;
}
template <typename A>
VISDET_HOST_DEVICE A quotient(A a, A b) {
  return a / b;
}
#endif

}  // namespace visdet

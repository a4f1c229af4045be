// For functions that both compilers take. Kernel files of the CPU are compiled once per instruction set, so that their
// functions must be inlined (cpu/kernels.h).
#pragma once

#if defined(__CUDACC__)
#define VISDET_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define VISDET_HOST_DEVICE inline __attribute__((always_inline))
#endif

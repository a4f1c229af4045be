// torch, as far as operators may use it: its stable ABI, which every torch from 2.10 on has. All files include it here.
//
// nvcc is shown torch's headers as a C++ compiler sees them. For CUDA code they would declare operations of their own
// types of numbers on the device, which kernels do not use, and include Thrust: over a quarter of the time that nvcc
// takes for all headers. Where a C++ compiler would get vector intrinsics from them, nvcc sees them as CUDA code. torch
// has no macro of its own for this. If a header of a later torch needs __CUDACC__, the compilation fails here, and
// without the two lines that undefine the macros it takes longer and gives the same.
#pragma once

// What is included before is not affected: the C++ library has other types of numbers for CUDA code.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <type_traits>

#pragma push_macro("__CUDACC__")
#pragma push_macro("__CUDA_ARCH__")
#if !defined(__aarch64__) && !defined(__F16C__)
#undef __CUDACC__
#undef __CUDA_ARCH__
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#pragma pop_macro("__CUDA_ARCH__")
#pragma pop_macro("__CUDACC__")

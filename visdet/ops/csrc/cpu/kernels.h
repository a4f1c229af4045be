// How host code calls an operator's CPU kernels, which are compiled once per instruction set.
//
// setup.py compiles the files of csrc itself once. It compiles every file below csrc/cpu once per instruction set, with
// VISDET_ISA naming the set (baseline, avx2, avx512) and the matching -march. An operator consists of
//   ../<op>.py        its definition in plain torch, fake tensors and autograd;
//   csrc/<op>.cpp     its schemas, and its function for CPU tensors: checks, allocation, threads, registration;
//   csrc/<op>.h       its contract and, here or in csrc/cpu/<op>.h, a struct of plain numbers and pointers for the
//                     arguments, and a struct of function pointers, the table of its kernels, which says what each of
//                     them is given and writes;
//   csrc/cpu/<op>.cpp the kernels, in namespace visdet::VISDET_ISA, and at the end VISDET_KERNELS, which fills the
//                     table for each type of values.
// Kernel files include nothing of torch and no header of the standard library with inline functions: such a function,
// compiled there with AVX-512, could be the copy that the linker keeps for everyone. dispatch.h and images.h are
// headers of host code.
#pragma once

#include <cstdint>

#include "cpu/values.h"

namespace visdet {

// A multiple of the lanes of every vector of every instruction set.
constexpr int64_t kAnyLanes = 16;

constexpr int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Isa { baseline, avx2, avx512 };

// Returns the best instruction set that this processor has and VISDET_CPU_ISA allows; defined in csrc/cpu_isa.cpp.
Isa best_isa();

// The table of kernels of type `Table`, as compiled for one instruction set. VISDET_KERNELS defines it.
template <typename Table, Isa ISA>
struct Compiled {
  static const Table table;
};

// Returns the table of the best instruction set.
template <typename Table>
const Table& best_kernels() {
#if defined(VISDET_HAS_X86_ISAS)
  const Isa isa = best_isa();
  if (isa == Isa::avx512) return Compiled<Table, Isa::avx512>::table;
  if (isa == Isa::avx2) return Compiled<Table, Isa::avx2>::table;
#endif
  return Compiled<Table, Isa::baseline>::table;
}

}  // namespace visdet

// A kernel file ends, behind the namespace of its kernels, with one of these macros, which fills the operator's tables:
//
//   VISDET_KERNELS(CarafeKernels, upsample_row<T, A>)
//
// fills CarafeKernels<T, A> for each of the four types T of values, where A is the type in which their sums are taken.
// The functions follow in the order of the struct's members. VISDET_SUM_KERNELS fills Table<A> for operators that take
// only float32 and float64. VISDET_KERNELS_OF fills the table of a single pair of types.
#define VISDET_KERNELS(Table, ...)                      \
  VISDET_KERNELS_OF(Table, double, double, __VA_ARGS__) \
  VISDET_KERNELS_OF(Table, float, float, __VA_ARGS__)   \
  VISDET_KERNELS_OF(Table, Float16, float, __VA_ARGS__) \
  VISDET_KERNELS_OF(Table, BFloat16, float, __VA_ARGS__)

#define VISDET_KERNELS_OF(Table, value_type, sum_type, ...)                                              \
  namespace visdet {                                                                                     \
  template <>                                                                                            \
  const Table<value_type, sum_type> Compiled<Table<value_type, sum_type>, Isa::VISDET_ISA>::table = [] { \
    using namespace VISDET_ISA;                                                                          \
    using T [[maybe_unused]] = value_type;                                                               \
    using A [[maybe_unused]] = sum_type;                                                                 \
    return Table<T, A>{__VA_ARGS__};                                                                     \
  }();                                                                                                   \
  }

#define VISDET_SUM_KERNELS(Table, ...)              \
  VISDET_SUM_KERNELS_OF(Table, double, __VA_ARGS__) \
  VISDET_SUM_KERNELS_OF(Table, float, __VA_ARGS__)

#define VISDET_SUM_KERNELS_OF(Table, sum_type, ...)                              \
  namespace visdet {                                                             \
  template <>                                                                    \
  const Table<sum_type> Compiled<Table<sum_type>, Isa::VISDET_ISA>::table = [] { \
    using namespace VISDET_ISA;                                                  \
    using A [[maybe_unused]] = sum_type;                                         \
    return Table<A>{__VA_ARGS__};                                                \
  }();                                                                           \
  }

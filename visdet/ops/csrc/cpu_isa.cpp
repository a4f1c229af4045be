// The instruction set that the CPU kernels run with on this processor.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/checks.h"
#include "cpu/kernels.h"

#if defined(VISDET_HAS_X86_ISAS)
#include <cpuid.h>
#endif

namespace visdet {
namespace {

#if defined(VISDET_HAS_X86_ISAS)
// Returns the greatest set of which the processor has all that -march=x86-64-v3 or -march=x86-64-v4 lets the compiler
// use, and of which the system saves the registers. The processor itself is asked, because not every compiler knows
// these names or all of their parts.
Isa isa_of_processor() {
  unsigned a, b, c, d, highest = __get_cpuid_max(0, nullptr);
  if (highest < 7) return Isa::baseline;
  __cpuid(1, a, b, c, d);
  constexpr unsigned kSse = 1u | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23;  // SSE3 to 4.2, CX16, POPCNT
  constexpr unsigned kAvx = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29;      // FMA, MOVBE, OSXSAVE, AVX, F16C
  if ((c & (kSse | kAvx)) != (kSse | kAvx)) return Isa::baseline;
  unsigned saved, saved_high;
  asm("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  __cpuid_count(7, 0, a, b, c, d);
  const unsigned extended = b;
  if (__get_cpuid_max(0x80000000, nullptr) < 0x80000001) return Isa::baseline;
  __cpuid(0x80000001, a, b, c, d);
  constexpr unsigned kLzcnt = 1u | 1u << 5;                // LAHF, LZCNT
  constexpr unsigned kAvx2 = 1u << 3 | 1u << 5 | 1u << 8;  // BMI1, AVX2, BMI2
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6;             // of the extended control register
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  if ((c & kLzcnt) != kLzcnt || (extended & kAvx2) != kAvx2 || (saved & kYmm) != kYmm) return Isa::baseline;
  return (extended & kAvx512) == kAvx512 && (saved & kZmm) == kZmm ? Isa::avx512 : Isa::avx2;
}
#else
Isa isa_of_processor() { return Isa::baseline; }
#endif

}  // namespace

// The environment variable VISDET_CPU_ISA, which is read once, caps the choice for tests and comparisons.
Isa best_isa() {
  static const Isa isa = [] {
    const Isa best = isa_of_processor();
    const char* name = std::getenv("VISDET_CPU_ISA");
    if (name == nullptr || *name == '\0') return best;
    Isa cap = Isa::avx512;
    if (std::strcmp(name, "baseline") == 0) {
      cap = Isa::baseline;
    } else if (std::strcmp(name, "avx2") == 0) {
      cap = Isa::avx2;
    } else if (std::strcmp(name, "avx512") != 0) {
      fail("visdet: the environment variable VISDET_CPU_ISA must be baseline, avx2 or avx512, got ", name);
    }
    return std::min(best, cap);
  }();
  return isa;
}

namespace {

// python -m visdet.doctor asks for it: 0 is the baseline, 1 AVX2, 2 AVX-512.
int64_t cpu_isa() { return static_cast<int64_t>(best_isa()); }

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) { m.def("cpu_isa() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&visdet::cpu_isa)); }

// Baseline pass only: the choice of value type and of instruction set, and scratch memory. See vec.h.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/checks.h"
#include "cpu/vec.h"

#if defined(VISDET_HAS_X86_ISAS)
#include <cpuid.h>
#endif

// The instruction sets setup.py compiled besides the baseline.
#if defined(VISDET_HAS_X86_ISAS)
#define VISDET_FOR_EACH_OTHER_ISA(macro) macro(avx2) macro(avx512)
// The function `name<types...>` of the best instruction set this processor has.
#define VISDET_BEST_ISA(name, ...)                                             \
  (::visdet::best_isa() == ::visdet::Isa::kAvx512 ? &avx512::name<__VA_ARGS__> \
   : ::visdet::best_isa() == ::visdet::Isa::kAvx2 ? &avx2::name<__VA_ARGS__>   \
                                                  : &baseline::name<__VA_ARGS__>)
#else
#define VISDET_FOR_EACH_OTHER_ISA(macro)
#define VISDET_BEST_ISA(name, ...) (&baseline::name<__VA_ARGS__>)
#endif

namespace visdet {

enum class Isa { kBaseline, kAvx2, kAvx512 };

#if defined(VISDET_HAS_X86_ISAS)
// Whether the processor has all that -march=x86-64-v3 and -march=x86-64-v4 let the compiler use, and the system saves
// the registers. Asked of the processor itself: not every compiler knows these names or all of their parts.
inline Isa isa_of_processor() {
  unsigned a, b, c, d, highest = __get_cpuid_max(0, nullptr);
  if (highest < 7) return Isa::kBaseline;
  __cpuid(1, a, b, c, d);
  constexpr unsigned kSse = 1u | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23;  // SSE3 to 4.2, CX16, POPCNT
  constexpr unsigned kAvx = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29;      // FMA, MOVBE, OSXSAVE, AVX, F16C
  if ((c & (kSse | kAvx)) != (kSse | kAvx)) return Isa::kBaseline;
  unsigned saved, saved_high;
  asm("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  __cpuid_count(7, 0, a, b, c, d);
  const unsigned extended = b;
  if (__get_cpuid_max(0x80000000, nullptr) < 0x80000001) return Isa::kBaseline;
  __cpuid(0x80000001, a, b, c, d);
  constexpr unsigned kLzcnt = 1u | 1u << 5;                // LAHF, LZCNT
  constexpr unsigned kAvx2 = 1u << 3 | 1u << 5 | 1u << 8;  // BMI1, AVX2, BMI2
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6;             // of the extended control register
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  if ((c & kLzcnt) != kLzcnt || (extended & kAvx2) != kAvx2 || (saved & kYmm) != kYmm) return Isa::kBaseline;
  return (extended & kAvx512) == kAvx512 && (saved & kZmm) == kZmm ? Isa::kAvx512 : Isa::kAvx2;
}
#else
inline Isa isa_of_processor() { return Isa::kBaseline; }
#endif

// Read once. VISDET_CPU_ISA=baseline|avx2|avx512 caps it, for tests and comparisons; torch.ops.visdet.cpu_isa() says
// which it is.
inline Isa best_isa() {
  static const Isa isa = [] {
    const Isa best = isa_of_processor();
    const char* name = std::getenv("VISDET_CPU_ISA");
    if (name == nullptr || *name == '\0') return best;
    Isa cap = Isa::kAvx512;
    if (std::strcmp(name, "baseline") == 0) {
      cap = Isa::kBaseline;
    } else if (std::strcmp(name, "avx2") == 0) {
      cap = Isa::kAvx2;
    } else if (std::strcmp(name, "avx512") != 0) {
      fail("visdet: the environment variable VISDET_CPU_ISA must be baseline, avx2 or avx512, got ", name);
    }
    return std::min(best, cap);
  }();
  return isa;
}

// Calls f(T{}, A{}) with the value type T of a tensor and the type A its sums are taken in.
template <typename F>
void dispatch_value_type(ScalarType type, const F& f) {
  switch (type) {
    case ScalarType::Double:
      return f(double{}, double{});
    case ScalarType::Float:
      return f(float{}, float{});
    case ScalarType::Half:
      return f(Float16{}, float{});
    case ScalarType::BFloat16:
      return f(BFloat16{}, float{});
    default:
      fail("visdet: unsupported value type ", torch::headeronly::toString(type));
  }
}

// Uninitialised numbers on a cache-line border, owned by one thread.
template <typename A>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<A*>(std::aligned_alloc(64, (sizeof(A) * static_cast<size_t>(count) + 127) / 64 * 64)),
              std::free) {
    if (data_ == nullptr) fail("visdet: out of memory for a scratch of ", count, " numbers");
  }
  A* data() const { return data_.get(); }

 private:
  std::unique_ptr<A, decltype(&std::free)> data_;
};

}  // namespace visdet

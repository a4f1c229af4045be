// Baseline pass only: the choice of value type and of instruction set, and scratch memory. See vec.h.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "../common/checks.h"
#include "vec.h"

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

// Read once. VISDET_CPU_ISA=baseline|avx2|avx512 caps it, for tests and comparisons.
inline Isa best_isa() {
  static const Isa isa = [] {
    Isa best = Isa::kBaseline;
#if defined(VISDET_HAS_X86_ISAS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
      best = Isa::kAvx2;
    if (best == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd")) {
      best = Isa::kAvx512;
    }
    if (const char* cap = std::getenv("VISDET_CPU_ISA")) {
      if (std::strcmp(cap, "baseline") == 0) best = Isa::kBaseline;
      if (std::strcmp(cap, "avx2") == 0 && best == Isa::kAvx512) best = Isa::kAvx2;
    }
#endif
    return best;
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

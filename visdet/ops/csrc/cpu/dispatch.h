// For host code of CPU operators: the choice of value type, and scratch memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/checks.h"
#include "cpu/kernels.h"

// The instruction sets setup.py compiled besides the baseline.
#if defined(VISDET_HAS_X86_ISAS)
#define VISDET_FOR_EACH_OTHER_ISA(macro) macro(avx2) macro(avx512)
// The function `name<types...>` of the best instruction set this processor has.
#define VISDET_BEST_ISA(name, ...)                                            \
  (::visdet::best_isa() == ::visdet::Isa::avx512 ? &avx512::name<__VA_ARGS__> \
   : ::visdet::best_isa() == ::visdet::Isa::avx2 ? &avx2::name<__VA_ARGS__>   \
                                                 : &baseline::name<__VA_ARGS__>)
#else
#define VISDET_FOR_EACH_OTHER_ISA(macro)
#define VISDET_BEST_ISA(name, ...) (&baseline::name<__VA_ARGS__>)
#endif

namespace visdet {

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

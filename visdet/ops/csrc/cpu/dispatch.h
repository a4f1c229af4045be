// What the host code of CPU operators is written with: torch, the choice of value type, and scratch memory.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/checks.h"
#include "cpu/kernels.h"

namespace visdet {

template <typename F>
void dispatch_value_type(ScalarType type, const F& f) {
  dispatch_types_of<Float16, BFloat16>(type, f);
}

// Scratch owns uninitialised numbers that begin on a cache line, for one thread.
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

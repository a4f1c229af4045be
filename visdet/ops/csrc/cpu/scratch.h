// Memory that one thread of a CPU operator works in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace visdet {

// Scratch owns uninitialised numbers that begin on a cache line, for one thread.
template <typename A>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<A*>(std::aligned_alloc(64, (sizeof(A) * static_cast<size_t>(count) + 127) / 64 * 64)),
              std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  A* data() const { return data_.get(); }

 private:
  std::unique_ptr<A, decltype(&std::free)> data_;
};

}  // namespace visdet

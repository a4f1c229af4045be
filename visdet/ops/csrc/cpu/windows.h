// Windows of maps for the operators that pool regions on the CPU.
#pragma once

#include <cstdint>

namespace visdet {

// A rectangle of the map: rows [top, bottom), columns [left, right).
struct Window {
  int32_t top, bottom, left, right;
};

// The channels of a block: as many as fill a cache line, a vector or a few.
template <typename A>
constexpr int kBlock = 64 / static_cast<int>(sizeof(A));

// A function that writes `window` of the `channels` planes from `maps` on to `to` [pixels, kBlock], zeros after the
// last channel; and one that adds them to the planes.
template <typename T, typename A>
using LayOutWindow = void (*)(const T* maps, int64_t W, int64_t plane, int64_t channels, const Window& window, A* to);
template <typename T, typename A>
using AddWindow = void (*)(const A* from, int64_t W, int64_t plane, int64_t channels, const Window& window, T* maps);

}  // namespace visdet

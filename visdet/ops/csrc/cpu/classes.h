// Boxes in the order of a key, and class by class: host code.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace visdet {

// 0 to N - 1.
inline std::vector<int32_t> counted(int64_t N) {
  std::vector<int32_t> numbers(N);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Orders indices by their keys, keys[indices[i]], and keeps the order of equal ones. It sorts by one digit after
// another, the lowest first, those apart that are the same in all keys.
inline void sort_by_keys(const std::vector<uint64_t>& keys, std::vector<int32_t>& indices) {
  constexpr int64_t kSlots = 1 << 11;  // of a digit
  std::vector<int32_t> sorted(indices.size());
  uint64_t differing = 0;
  for (const uint64_t key : keys) differing |= key ^ keys[0];
  for (int shift = 0; shift < 64; shift += 11) {
    if ((differing >> shift) % kSlots == 0) continue;
    int64_t starts[kSlots + 1] = {};
    for (const uint64_t key : keys) ++starts[(key >> shift) % kSlots + 1];
    for (int64_t slot = 0; slot < kSlots; ++slot) starts[slot + 1] += starts[slot];
    for (const int32_t index : indices) sorted[starts[(keys[index] >> shift) % kSlots]++] = index;
    indices.swap(sorted);
  }
}

// The members of class c, in ascending order, are members[starts[c]] up to members[starts[c + 1]].
struct Classes {
  std::vector<int32_t> members;
  std::vector<int64_t> starts;
};

inline Classes group_by_class(const std::vector<uint64_t>& classes) {
  const int64_t N = static_cast<int64_t>(classes.size());
  Classes groups{counted(N), {}};
  sort_by_keys(classes, groups.members);
  for (int64_t p = 0; p < N; ++p) {
    if (p == 0 || classes[groups.members[p]] != classes[groups.members[p - 1]]) groups.starts.push_back(p);
  }
  groups.starts.push_back(N);
  return groups;
}

}  // namespace visdet

// What the host code of CPU operators is written with: torch, the choice of value type, and scratch memory.
#pragma once

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/checks.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"

namespace visdet {

template <typename F>
void dispatch_value_type(ScalarType type, const F& f) {
  dispatch_types_of<Float16, BFloat16>(type, f);
}

// Calls run(i) for every i below `count`. A thread takes `grain` of them or more.
template <typename F>
void parallel_each(int64_t count, int64_t grain, const F& run) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

// Calls run(scratch, i), where each thread has `numbers` of type A to work in.
template <typename A, typename F>
void parallel_each(int64_t count, int64_t grain, int64_t numbers, const F& run) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const Scratch<A> scratch(numbers);
    for (int64_t i = begin; i < end; ++i) run(scratch.data(), i);
  });
}

}  // namespace visdet

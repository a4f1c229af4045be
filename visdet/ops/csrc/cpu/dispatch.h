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

}  // namespace visdet

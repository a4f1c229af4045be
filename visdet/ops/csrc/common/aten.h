// Operators by name, through the dispatcher: torch's, and ours of another library.
#pragma once

#include <array>
#include <vector>

#include "common/checks.h"

namespace visdet {

// Runs operator `name` on the stack of its arguments, which its results replace. If it fails, the error has torch's
// words, and names the memory that the result needs (`bytes`; by default that of `input`) on the device of `input`:
// there, visdet/ops/_library.py asks torch for it again, which raises torch's own error if it does not suffice.
void call_torch(const char* name, const char* overload, StableIValue* stack, const Tensor& input, int64_t bytes = -1);

// The first `results` tensors that operator `name` returns. All arguments have to be given, those with defaults, too.
template <size_t results = 1, typename... Arguments>
std::array<Tensor, results> call_for(const char* name, const char* overload, const Tensor& input,
                                     const Arguments&... arguments) {
  static_assert(results <= 1 + sizeof...(Arguments));
  std::array<StableIValue, 1 + sizeof...(Arguments)> stack{torch::stable::detail::from(input),
                                                           torch::stable::detail::from(arguments)...};
  call_torch(name, overload, stack.data(), input);
  std::array<Tensor, results> tensors;
  for (size_t i = 0; i < results; ++i) tensors[i] = torch::stable::detail::to<Tensor>(stack[i]);
  return tensors;
}

// The only tensor that operator `name` returns.
template <typename... Arguments>
Tensor call(const char* name, const char* overload, const Tensor& input, const Arguments&... arguments) {
  return call_for<1>(name, overload, input, arguments...)[0];
}

// The sum of the slices [i, ...] of a tensor.
Tensor sum_of_slices(const Tensor& slices);

// The memory of a contiguous tensor from `offset` elements on, with these sizes, contiguous, and within it. No operator
// is called.
Tensor shaped(const Tensor& tensor, const std::vector<int64_t>& sizes, int64_t offset = 0);

}  // namespace visdet

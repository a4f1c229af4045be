// Operators by name, through the dispatcher: torch's, and ours of another library.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <vector>

#include "common/checks.h"

namespace visdet {

// The first `results` tensors that operator `name` returns. All arguments have to be given, those with defaults, too.
template <size_t results = 1, typename... Arguments>
std::array<Tensor, results> call_for(const char* name, const char* overload, const Arguments&... arguments) {
  static_assert(results <= sizeof...(Arguments));
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    // Before torch 2.13, no function returns the text of the error: torch prints it on stderr.
    const auto text =
        reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
    fail(name, ": ", text ? text() : "it failed; the reason is on stderr");
  }
  std::array<Tensor, results> tensors;
  for (size_t i = 0; i < results; ++i) tensors[i] = torch::stable::detail::to<Tensor>(stack[i]);
  return tensors;
}

// The only tensor that operator `name` returns.
template <typename... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  return call_for<1>(name, overload, arguments...)[0];
}

// The memory of a contiguous tensor from `offset` elements on, with these sizes, contiguous, and within it. No operator
// is called.
Tensor shaped(const Tensor& tensor, const std::vector<int64_t>& sizes, int64_t offset = 0);

}  // namespace visdet

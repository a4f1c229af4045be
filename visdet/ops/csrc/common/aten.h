// Operators by name, through the dispatcher: torch's, and ours of another library.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <array>
#include <vector>

#include "common/checks.h"

// The text of the thread's last error. Null before torch 2.13: older ones print that text on stderr.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace visdet {

// The first `results` tensors that operator `name` returns. All arguments have to be given, those with defaults, too.
template <size_t results = 1, typename... Arguments>
std::array<Tensor, results> call_for(const char* name, const char* overload, const Arguments&... arguments) {
  static_assert(results <= sizeof...(Arguments));
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  if (torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS) {
    const auto text = torch_exception_get_what_without_backtrace;
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

// The same memory from `offset` elements on, with these sizes and strides. No operator is called.
inline Tensor strided(const Tensor& tensor, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                      int64_t offset = 0) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), offset, &view));
  return Tensor(view);
}

// The same of a contiguous tensor's memory, contiguous, and within it.
inline Tensor shaped(const Tensor& tensor, const std::vector<int64_t>& sizes, int64_t offset = 0) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1, count = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) {
    strides[d] = stride;
    count *= sizes[d];
  }
  if (!tensor.is_contiguous() || offset + count > tensor.numel()) {
    fail("a tensor of ", shape_text(tensor), " must be contiguous and hold ", count, " elements from ", offset, " on");
  }
  return strided(tensor, sizes, strides, offset);
}

}  // namespace visdet

// Argument checks shared by every operator. A failed check raises a RuntimeError in Python whose text names the
// operator, the argument, what was expected and what came.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace visdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d) text += ", ";
    text += std::to_string(tensor.size(d));
  }
  return text + "]";
}

inline const char* dtype_text(const Tensor& tensor) { return torch::headeronly::toString(tensor.scalar_type()); }

inline bool is_value_dtype(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

// Coordinates and sums of values of this type: float64 for float64, float32 for everything else.
inline ScalarType accumulate_dtype(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Whether both lie on the same device: both on the CPU, on the same GPU, or both without data (meta).
inline bool on_device_of(const Tensor& one, const Tensor& other) {
  return other.is_cuda() == one.is_cuda() && other.is_cpu() == one.is_cpu() &&
         (!one.is_cuda() || other.get_device_index() == one.get_device_index());
}

// The tensor, contiguous. It asks first, since a call of torch's operator takes the host some 0.3 us.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Whether [B, C, H, W] lies in memory as contiguous [B, H, W, C].
inline bool is_channels_last(const Tensor& images) {
  int64_t expected = 1;
  for (const int d : {1, 3, 2, 0}) {
    if (images.size(d) != 1 && images.stride(d) != expected) return false;
    expected *= images.size(d);
  }
  return true;
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace visdet

// VISDET_CHECK(op, condition, message...): the message starts with the operator's name and holds no source path.
#define VISDET_CHECK(op, condition, ...) \
  if (!(condition)) ::visdet::fail(op, ": ", __VA_ARGS__)

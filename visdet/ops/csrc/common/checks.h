// Argument checks shared by every operator. A failed check raises a RuntimeError in Python whose text names the
// operator, the argument, what was expected and what came.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace visdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// VISDET_CHECK(op, condition, message...): the message starts with the operator's name and holds no source path.
#define VISDET_CHECK(op, condition, ...) \
  if (!(condition)) ::visdet::fail(op, ": ", __VA_ARGS__)

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

// A dimension of the shape that an argument must have: a name with its size, a name that stands for any size, or a
// size.
struct Dimension {
  Dimension(const char* name, int64_t size = -1) : name(name), size(size) {}
  Dimension(int64_t size) : size(size) {}

  std::string name_text() const { return name == nullptr ? std::to_string(size) : name; }
  std::string size_text() const { return size < 0 ? name : std::to_string(size); }

  const char* name = nullptr;
  int64_t size;
};
using Shape = std::initializer_list<Dimension>;

[[noreturn]] inline void fail_shape(const char* op, const char* name, const Tensor& tensor, Shape expected,
                                    const char* note) {
  std::string names, sizes;
  for (const Dimension& dimension : expected) {
    names += (names.empty() ? "[" : ", ") + dimension.name_text();
    sizes += (sizes.empty() ? "[" : ", ") + dimension.size_text();
  }
  fail(op, ": ", name, " must be ", names, "]", names == sizes ? "" : " = " + sizes + "]", note, ", got ",
       shape_text(tensor));
}

// The functions below check an argument by its name; `of` is the argument `of_name`, which it goes with.

// note: what the error says behind the shape.
inline void check_shape(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* note = "") {
  bool fits = tensor.dim() == static_cast<int64_t>(expected.size());
  int64_t d = 0;
  for (auto at = expected.begin(); fits && at != expected.end(); ++at, ++d) {
    fits = at->size < 0 || tensor.size(d) == at->size;
  }
  if (!fits) fail_shape(op, name, tensor, expected, note);
}

inline void check_value_type(const char* op, const char* name, ScalarType type) {
  VISDET_CHECK(op, is_value_dtype(type), name, " must be float64, float32, float16 or bfloat16, got ",
               torch::headeronly::toString(type));
}

inline void check_sum_type(const char* op, const char* name, const Tensor& tensor) {
  VISDET_CHECK(op, tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double, name,
               " must be float64 or float32, got ", dtype_text(tensor));
}

inline void check_int64(const char* op, const char* name, const Tensor& tensor) {
  VISDET_CHECK(op, tensor.scalar_type() == ScalarType::Long, name, " must be int64, got ", dtype_text(tensor));
}

inline void check_same_type(const char* op, const char* name, const Tensor& tensor, const char* of_name,
                            const Tensor& of) {
  VISDET_CHECK(op, tensor.scalar_type() == of.scalar_type(), name, " must be ", dtype_text(of), ", the type of ",
               of_name, ", got ", dtype_text(tensor));
}

// The type of coordinates and sums of values of this type; or_same: or that type.
inline void check_accumulate_type(const char* op, const char* name, const Tensor& tensor, const char* of_name,
                                  ScalarType of, bool or_same = false) {
  const ScalarType type = accumulate_dtype(of);
  VISDET_CHECK(op, tensor.scalar_type() == type || (or_same && tensor.scalar_type() == of), name, " must be ",
               torch::headeronly::toString(type),
               or_same && of != type ? std::string(" or ") + torch::headeronly::toString(of) : "", " for ", of_name,
               " of type ", torch::headeronly::toString(of), ", got ", dtype_text(tensor));
}

inline void check_device(const char* op, const char* name, const Tensor& tensor, const char* of_name,
                         const Tensor& of) {
  VISDET_CHECK(op, on_device_of(of, tensor), name, " must be on the device of ", of_name);
}

// A tensor beside another: of this shape, and of its type and device.
inline void check_like(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* of_name,
                       const Tensor& of) {
  check_shape(op, name, tensor, expected);
  check_same_type(op, name, tensor, of_name, of);
  check_device(op, name, tensor, of_name, of);
}

// A table of levels: int64, on the CPU or on the device of the values.
inline void check_table(const char* op, const char* name, const Tensor& table, const char* of_name, const Tensor& of) {
  check_int64(op, name, table);
  VISDET_CHECK(op, table.is_cpu() || (!of.is_cpu() && on_device_of(of, table)), name,
               " must be on the CPU or on the device of ", of_name);
}

// The tensor, contiguous. It asks first, since a call of torch's operator takes the host some 0.3 us.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The numbers of a tensor. V need not be the type by which torch knows them.
template <typename V>
const V* data_of(const Tensor& tensor) {
  return static_cast<const V*>(tensor.const_data_ptr());
}
template <typename V>
V* mutable_data_of(const Tensor& tensor) {
  return static_cast<V*>(tensor.mutable_data_ptr());
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

// Calls f(T{}, A{}) with the type T of values and the type A that their sums are taken in. Half and BFloat16: the types
// of 16-bit values, which the CPU and CUDA each have their own of.
template <typename Half, typename BFloat16, typename F>
void dispatch_types_of(ScalarType type, const F& f) {
  switch (type) {
    case ScalarType::Double:
      return f(double{}, double{});
    case ScalarType::Float:
      return f(float{}, float{});
    case ScalarType::Half:
      return f(Half{}, float{});
    case ScalarType::BFloat16:
      return f(BFloat16{}, float{});
    default:
      fail("visdet: unsupported value type ", torch::headeronly::toString(type));
  }
}

// The same for operators of float32 and float64 alone, which take sums in the type A of their values: returns f(A{}).
template <typename F>
auto dispatch_sum_type(ScalarType type, const F& f) {
  return type == ScalarType::Double ? f(double{}) : f(float{});
}

}  // namespace visdet

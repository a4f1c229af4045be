// Argument checks shared by every operator. A failed check raises a RuntimeError in Python whose text names the
// operator, the argument, what was expected and what came. What is not a template stands in checks.cpp, which is
// compiled once for both libraries.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <type_traits>

#include "common/torch.h"

namespace visdet {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A piece of an error's text, words or a number. It points at the words, which outlive the call of fail().
struct Piece {
  Piece(const char* words) : words(words) {}
  Piece(const std::string& words) : words(words.c_str()) {}
  Piece(double number) : real(number), is_real(true) {}
  template <typename Integer, typename = std::enable_if_t<std::is_integral_v<Integer>>>
  Piece(Integer number) : integer(static_cast<int64_t>(number)) {}

  const char* words = nullptr;  // null for a number
  int64_t integer = 0;
  double real = 0;
  bool is_real = false;
};

// Raises an error whose text is these pieces, one after the other.
[[noreturn]] void fail_with(const Piece* pieces, size_t count);
template <typename... Pieces>
[[noreturn]] void fail(const Pieces&... of_text) {
  const Piece pieces[] = {of_text...};
  fail_with(pieces, sizeof...(of_text));
}

// VISDET_CHECK(op, condition, message...): the message starts with the operator's name and holds no source path.
#define VISDET_CHECK(op, condition, ...) \
  if (!(condition)) ::visdet::fail(op, ": ", __VA_ARGS__)

std::string shape_text(const Tensor& tensor);
const char* dtype_text(const Tensor& tensor);

inline bool is_value_dtype(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

// Coordinates and sums of values of this type: float64 for float64, float32 for everything else.
inline ScalarType accumulate_dtype(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Whether both lie on the same device: both on the CPU, on the same GPU, or both without data (meta).
bool on_device_of(const Tensor& one, const Tensor& other);

// A dimension of the shape that an argument must have: a name with its size, a name that stands for any size, or a
// size.
struct Dimension {
  Dimension(const char* name, int64_t size = -1) : name(name), size(size) {}
  Dimension(int64_t size) : size(size) {}

  const char* name = nullptr;
  int64_t size;
};
using Shape = std::initializer_list<Dimension>;

// The functions below check an argument by its name; `of` is the argument `of_name`, which it goes with. note: what the
// error says behind the shape.
void check_shape(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* note = "");
void check_value_type(const char* op, const char* name, ScalarType type);
void check_sum_type(const char* op, const char* name, const Tensor& tensor);
void check_type(const char* op, const char* name, const Tensor& tensor, ScalarType type);  // int64, int32 or bool
inline void check_int64(const char* op, const char* name, const Tensor& tensor) {
  check_type(op, name, tensor, ScalarType::Long);
}
void check_same_type(const char* op, const char* name, const Tensor& tensor, const char* of_name, const Tensor& of);

// The type of coordinates and sums of values of this type; or_same: or that type.
void check_accumulate_type(const char* op, const char* name, const Tensor& tensor, const char* of_name, ScalarType of,
                           bool or_same = false);

void check_device(const char* op, const char* name, const Tensor& tensor, const char* of_name, const Tensor& of);

// A tensor beside another: of this shape, and of its type and device.
void check_like(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* of_name,
                const Tensor& of);

// A tensor of whole numbers or of flags beside another: of this shape and type, and on its device.
void check_typed(const char* op, const char* name, const Tensor& tensor, Shape expected, ScalarType type,
                 const char* of_name, const Tensor& of);

// What an operator reads from: of this shape, and of a type that operators take, or of one that sums are taken in.
void check_values(const char* op, const char* name, const Tensor& tensor, Shape expected);
void check_sums(const char* op, const char* name, const Tensor& tensor, Shape expected);

// Coordinates or weights beside values: of this shape, of the type of sums (or_same: or of the values' type), and on
// the device of values.
void check_beside(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* of_name,
                  const Tensor& of, bool or_same = false);

// A table of levels: int64, on the CPU or on the device of the values.
void check_table(const char* op, const char* name, const Tensor& table, const char* of_name, const Tensor& of);

// The tensor, contiguous. It asks first, since a call of torch's operator takes the host some 0.3 us.
Tensor dense(const Tensor& tensor);

// The tensor in another type, and a copy of it.
Tensor converted(const Tensor& tensor, ScalarType type);
Tensor copied(const Tensor& tensor);

// An uninitialised tensor on the device of `like`, of its type or of another one.
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes);
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type);

// The same with the sizes of `like`, contiguous whatever its strides.
Tensor new_like(const Tensor& like);

// The numbers of a tensor. V need not be the type by which torch knows them.
template <typename V>
const V* data_of(const Tensor& tensor) {
  return static_cast<const V*>(tensor.const_data_ptr());
}
template <typename V>
V* mutable_data_of(const Tensor& tensor) {
  return static_cast<V*>(tensor.mutable_data_ptr());
}

// The same of the type V that they are assigned to, const for those that are read. Of no tensor it is null.
struct Data {
  const Tensor* tensor;

  template <typename V>
  operator V*() const {
    if (tensor == nullptr) return nullptr;
    if constexpr (std::is_const_v<V>) {
      return data_of<V>(*tensor);
    } else {
      return mutable_data_of<V>(*tensor);
    }
  }
};
inline Data data_of(const Tensor& tensor) { return {&tensor}; }
inline Data data_of(const Tensor* tensor) { return {tensor}; }
inline Data data_of(const std::optional<Tensor>& tensor) { return {tensor ? &*tensor : nullptr}; }

// Whether [B, C, H, W] lies in memory as contiguous [B, H, W, C].
bool is_channels_last(const Tensor& images);

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

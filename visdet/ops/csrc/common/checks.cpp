// What common/checks.h and common/aten.h declare: compiled once, for both libraries.
#include "common/checks.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "common/aten.h"

namespace visdet {

using torch::headeronly::IntHeaderOnlyArrayRef, torch::headeronly::MemoryFormat;

void fail_with(const Piece* pieces, size_t count) {
  std::string message;
  for (size_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    if (piece.words != nullptr) {
      message += piece.words;
    } else if (piece.is_real) {
      char text[32];
      std::snprintf(text, sizeof(text), "%g", piece.real);
      message += text;
    } else {
      message += std::to_string(piece.integer);
    }
  }
  throw std::runtime_error(message);
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d) text += ", ";
    text += std::to_string(tensor.size(d));
  }
  return text + "]";
}

const char* dtype_text(const Tensor& tensor) { return torch::headeronly::toString(tensor.scalar_type()); }

bool on_device_of(const Tensor& one, const Tensor& other) {
  return other.is_cuda() == one.is_cuda() && other.is_cpu() == one.is_cpu() &&
         (!one.is_cuda() || other.get_device_index() == one.get_device_index());
}

void check_shape(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* note) {
  bool fits = tensor.dim() == static_cast<int64_t>(expected.size());
  int64_t d = 0;
  for (auto at = expected.begin(); fits && at != expected.end(); ++at, ++d) {
    fits = at->size < 0 || tensor.size(d) == at->size;
  }
  if (fits) return;
  std::string names, sizes;
  for (const Dimension& dimension : expected) {
    const std::string number = std::to_string(dimension.size);
    names += (names.empty() ? "[" : ", ") + (dimension.name == nullptr ? number : dimension.name);
    sizes += (sizes.empty() ? "[" : ", ") + (dimension.size < 0 ? dimension.name : number);
  }
  fail(op, ": ", name, " must be ", names, "]", names == sizes ? "" : " = " + sizes + "]", note, ", got ",
       shape_text(tensor));
}

void check_value_type(const char* op, const char* name, ScalarType type) {
  VISDET_CHECK(op, is_value_dtype(type), name, " must be float64, float32, float16 or bfloat16, got ",
               torch::headeronly::toString(type));
}

void check_sum_type(const char* op, const char* name, const Tensor& tensor) {
  VISDET_CHECK(op, tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double, name,
               " must be float64 or float32, got ", dtype_text(tensor));
}

void check_type(const char* op, const char* name, const Tensor& tensor, ScalarType type) {
  VISDET_CHECK(op, tensor.scalar_type() == type, name, " must be ",
               type == ScalarType::Long  ? "int64"
               : type == ScalarType::Int ? "int32"
                                         : "bool",
               ", got ", dtype_text(tensor));
}

void check_same_type(const char* op, const char* name, const Tensor& tensor, const char* of_name, const Tensor& of) {
  VISDET_CHECK(op, tensor.scalar_type() == of.scalar_type(), name, " must be ", dtype_text(of), ", the type of ",
               of_name, ", got ", dtype_text(tensor));
}

void check_accumulate_type(const char* op, const char* name, const Tensor& tensor, const char* of_name, ScalarType of,
                           bool or_same) {
  const ScalarType type = accumulate_dtype(of);
  VISDET_CHECK(op, tensor.scalar_type() == type || (or_same && tensor.scalar_type() == of), name, " must be ",
               torch::headeronly::toString(type),
               or_same && of != type ? std::string(" or ") + torch::headeronly::toString(of) : "", " for ", of_name,
               " of type ", torch::headeronly::toString(of), ", got ", dtype_text(tensor));
}

void check_device(const char* op, const char* name, const Tensor& tensor, const char* of_name, const Tensor& of) {
  VISDET_CHECK(op, on_device_of(of, tensor), name, " must be on the device of ", of_name);
}

void check_like(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* of_name,
                const Tensor& of) {
  check_shape(op, name, tensor, expected);
  check_same_type(op, name, tensor, of_name, of);
  check_device(op, name, tensor, of_name, of);
}

void check_typed(const char* op, const char* name, const Tensor& tensor, Shape expected, ScalarType type,
                 const char* of_name, const Tensor& of) {
  check_shape(op, name, tensor, expected);
  check_type(op, name, tensor, type);
  check_device(op, name, tensor, of_name, of);
}

void check_values(const char* op, const char* name, const Tensor& tensor, Shape expected) {
  check_shape(op, name, tensor, expected);
  check_value_type(op, name, tensor.scalar_type());
}

void check_sums(const char* op, const char* name, const Tensor& tensor, Shape expected) {
  check_shape(op, name, tensor, expected);
  check_sum_type(op, name, tensor);
}

void check_beside(const char* op, const char* name, const Tensor& tensor, Shape expected, const char* of_name,
                  const Tensor& of, bool or_same) {
  check_shape(op, name, tensor, expected);
  check_accumulate_type(op, name, tensor, of_name, of.scalar_type(), or_same);
  check_device(op, name, tensor, of_name, of);
}

void check_table(const char* op, const char* name, const Tensor& table, const char* of_name, const Tensor& of) {
  check_int64(op, name, table);
  VISDET_CHECK(op, table.is_cpu() || (!of.is_cpu() && on_device_of(of, table)), name,
               " must be on the CPU or on the device of ", of_name);
}

void call_torch(const char* name, const char* overload, StableIValue* stack, const Tensor& input, int64_t bytes) {
  if (torch_call_dispatcher(name, overload, stack, TORCH_ABI_VERSION) == AOTI_TORCH_SUCCESS) return;
  // Before torch 2.13, no function returns the text of the error: torch prints it on stderr.
  const auto text =
      reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  if (bytes < 0) bytes = input.numel() * static_cast<int64_t>(input.element_size());
  const std::string device = input.is_cuda() ? "cuda:" + std::to_string(input.get_device_index()) : "cpu";
  fail(name, ": ", text ? text() : "it failed, maybe out of memory; the reason is on stderr", " (it needs ", bytes,
       " bytes on ", device, ")");
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : call("aten::contiguous", "", tensor, MemoryFormat::Contiguous);
}

Tensor converted(const Tensor& tensor, ScalarType type) {
  return call("aten::to", "dtype", tensor, type, false, false, std::nullopt);
}

Tensor sum_of_slices(const Tensor& slices) {
  const int64_t first = 0;
  const std::optional<torch::headeronly::IntHeaderOnlyArrayRef> over({&first, 1});
  return call("aten::sum", "dim_IntList", slices, over, false, std::nullopt);
}

Tensor copied(const Tensor& tensor) { return call("aten::clone", "", tensor, std::nullopt); }

namespace {

Tensor new_empty_of(const Tensor& like, IntHeaderOnlyArrayRef sizes, ScalarType type) {
  using torch::stable::detail::from, torch::stable::detail::to;
  std::array<StableIValue, 6> stack{from(like),         from(sizes),        from(std::optional(type)),
                                    from(std::nullopt), from(std::nullopt), from(std::nullopt)};
  double bytes = aoti_torch_dtype_element_size(to<int32_t>(from(type)));
  for (const int64_t size : sizes) bytes *= static_cast<double>(size);
  call_torch("aten::new_empty", "", stack.data(), like, static_cast<int64_t>(std::min(bytes, 0x1p62)));
  return to<Tensor>(stack[0]);
}

}  // namespace

Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return new_empty(like, sizes, like.scalar_type());
}
Tensor new_empty(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return new_empty_of(like, {sizes.begin(), sizes.size()}, type);
}
Tensor new_like(const Tensor& like) { return new_empty_of(like, like.sizes(), like.scalar_type()); }

bool is_channels_last(const Tensor& images) {
  int64_t expected = 1;
  for (const int d : {1, 3, 2, 0}) {
    if (images.size(d) != 1 && images.stride(d) != expected) return false;
    expected *= images.size(d);
  }
  return true;
}

Tensor shaped(const Tensor& tensor, const std::vector<int64_t>& sizes, int64_t offset) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1, count = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) {
    strides[d] = stride;
    count *= sizes[d];
  }
  if (!tensor.is_contiguous() || offset + count > tensor.numel()) {
    fail("a tensor of ", shape_text(tensor), " must be contiguous and hold ", count, " elements from ", offset, " on");
  }
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), offset, &view));
  return Tensor(view);
}

}  // namespace visdet

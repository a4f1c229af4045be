// The one way in which CUDA kernels start. A launcher of an operator looks like this:
//
//   const DeviceScope scope(value);                        // the tensor's device is the current one from here on
//   launch({kOp, "gather_kernel", scope, blocks, threads, shared_bytes}, gather_kernel<float>, arguments...);
//
// launch() adds up the kernel's static and dynamic shared memory, opts in to more than 48 KB where they need it,
// compares sizes and registers with what the device and the compiled kernel allow, and checks every return code. Its
// errors name the operator, the kernel and the sizes. A launch without blocks does nothing.
//
// A launch that `overlaps` may start as soon as all blocks of the launch before it have called allow_next_launch() of
// common/overlap.cuh, which says what its kernel has to do in return. GPUs before sm_90 start it when the launch before
// it is done.
//
// A plan is a call of an operator on meta tensors: launch() then notes what would start instead of starting it, so that
// `visdet.ops.explain` and the tests see the choices and sizes for any device, with or without a GPU. Code of operators
// needs no branch for it, if it gets its device and stream from DeviceScope, starts kernels by launch(), and clears
// memory by torch's operators or fill_bytes(). See common/paths.h for the choice between kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/checks.h"
#include "common/device.h"

namespace visdet {

// Makes a tensor's device the current one, and knows it and its stream.
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  const Device& device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  bool is_plan() const { return is_plan_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  Device device_;
  cudaStream_t stream_ = nullptr;
  bool is_plan_ = false;
};

struct Grid {
  int64_t x, y, z;
  Grid(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};

struct Launch {
  const char* op;
  const char* kernel;
  const DeviceScope& scope;
  Grid grid;
  int64_t threads;
  int64_t dynamic_shared = 0;
  // At least how many bytes of shared memory the kernel declares itself, given for kernels that also have dynamic
  // shared memory. A plan adds them, since it has no compiled kernel to ask. A launch compares them with the compiled
  // kernel's.
  int64_t static_shared = 0;
  bool overlaps = false;
};

namespace launching {

// Checks the sizes; notes them if this is a plan, else starts the kernel. arguments: a pointer to each.
void start(const Launch& launch, const void* kernel, void** arguments);

// The type itself, of which the compiler deduces nothing: the kernel alone says what its parameters are.
template <typename Parameter>
struct Same {
  using type = Parameter;
};

}  // namespace launching

// A kernel is given all of its arguments, which are converted to the types of its parameters.
template <typename... Parameters>
void launch(const Launch& at, void (*kernel)(Parameters...), typename launching::Same<Parameters>::type... arguments) {
  void* pointers[] = {&arguments..., nullptr};
  launching::start(at, reinterpret_cast<const void*>(kernel), pointers);
}

// Sets bytes of device memory, in the order of the stream.
void fill_bytes(const char* op, const DeviceScope& scope, void* to, int value, int64_t bytes);

// Waits for all work of the stream and returns a number in device memory; 0 in a plan.
int64_t read_number(const char* op, const DeviceScope& scope, const int64_t* from);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of blocks of a kernel that loops over its work: enough for `count` things if a block takes `each` of them,
// but not more than `per_multiprocessor` for every multiprocessor of the GPU.
inline int64_t bounded_blocks(const DeviceScope& scope, int64_t count, int64_t each, int64_t per_multiprocessor) {
  return std::min(ceil_div(count, each), per_multiprocessor * scope.device().multiprocessors);
}

// Bytes that a thread loads or stores by one instruction at the most, and how many values these are.
constexpr int64_t kVectorBytes = 16;
template <typename T>
constexpr int kVectorValues = static_cast<int>(kVectorBytes / sizeof(T));
inline int64_t vector_values(const Tensor& tensor) {
  return kVectorBytes / static_cast<int64_t>(tensor.element_size());
}

inline bool aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }
inline bool aligned(const Tensor& tensor, int64_t bytes) { return aligned(tensor.const_data_ptr(), bytes); }

inline bool is_16_bit(const Tensor& tensor) { return tensor.element_size() == 2; }
inline Tensor in_float32(const Tensor& tensor) { return converted(tensor, ScalarType::Float); }

// The tensor, contiguous and at an address where a pair of coordinates can be read at once.
inline Tensor contiguous_pairs(const Tensor& tensor) {
  const Tensor packed = dense(tensor);
  return aligned(packed, kVectorBytes) ? packed : copied(packed);
}

}  // namespace visdet

// VISDET_CUDA_OPERATORS(<op>, m) { m.impl("<op>", TORCH_BOX(&function)); ... } registers functions for CUDA tensors
// and, under the namespace visdet_plan, for plans.
#define VISDET_CUDA_OPERATORS(op, m)                                                \
  static void register_##op(torch::stable::detail::StableLibrary&);                 \
  STABLE_TORCH_LIBRARY_IMPL(visdet, CUDA, library) { register_##op(library); }      \
  STABLE_TORCH_LIBRARY_IMPL(visdet_plan, Meta, library) { register_##op(library); } \
  static void register_##op(torch::stable::detail::StableLibrary& m)

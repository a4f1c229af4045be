// What common/launch.h and common/paths.h promise: device properties, the checks of a launch, and plans.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/cuda_errors.h"
#include "common/launch.h"
#include "common/paths.h"

namespace visdet {
namespace {

constexpr int kMaxDevices = 64;
constexpr int64_t kSharedWithoutOptIn = 48 << 10;
constexpr int64_t kMaxGridX = INT32_MAX, kMaxGridYZ = 65535, kMaxThreads = 1024;

void check_cuda(const char* op, cudaError_t error, const char* call) {
  VISDET_CHECK(op, error == cudaSuccess, call, " failed: ", explain_cuda_error(error));
}

Device read_device(int index) {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check_cuda("visdet", cudaDeviceGetAttribute(&value, name, index), "cudaDeviceGetAttribute");
    return int64_t{value};
  };
  Device device;
  device.index = index;
  device.multiprocessors = std::max<int64_t>(1, attribute(cudaDevAttrMultiProcessorCount));
  device.shared_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  device.shared_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.threads_multiprocessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  device.capability = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
  return device;
}

const Device& present_device(int index) {
  static std::array<Device, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> is_read;
  VISDET_CHECK("visdet", index >= 0 && index < kMaxDevices, "the CUDA device must be one of the first ", kMaxDevices,
               ", got ", index);
  std::call_once(is_read[index], [&] { devices[index] = read_device(index); });
  return devices[index];
}

// What a thread has asked for through the operators at the end of this file.
struct Inquiry {
  bool is_plan = false;
  std::optional<Device> device;                       // to choose for, instead of the present one
  std::unordered_map<std::string, std::string> only;  // operator -> the one path that may serve it
  std::vector<std::string> notes;                     // JSON objects
};
thread_local Inquiry inquiry;

std::string in_quotes(const std::string& text) { return "\"" + text + "\""; }

void note(const char* kind, const char* op, std::initializer_list<std::pair<const char*, std::string>> rest) {
  std::string json = std::string("{\"kind\": ") + in_quotes(kind) + ", \"op\": " + in_quotes(op);
  for (const auto& [key, value] : rest) json += ", " + in_quotes(key) + ": " + value;
  inquiry.notes.push_back(json + "}");
}

// What the driver says of a compiled kernel on a device, and how much dynamic shared memory it was allowed.
struct CompiledKernel {
  int64_t static_shared, max_threads, allowed_dynamic;
  int64_t capability;  // compute capability that it was compiled for, as major * 10 + minor
};

// A kernel that declares no shared memory: what the driver says of it is what the architecture reserves for itself.
__global__ void __launch_bounds__(1) empty_kernel() {}

CompiledKernel& compiled_kernel(const Launch& launch, const void* kernel) {
  struct Key {
    const void* kernel;
    int64_t device;
    bool operator==(const Key& other) const { return kernel == other.kernel && device == other.device; }
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.kernel) ^ static_cast<size_t>(key.device);
    }
  };
  thread_local std::unordered_map<Key, CompiledKernel, Hash> kernels;
  const Key key{kernel, launch.scope.device().index};
  if (const auto found = kernels.find(key); found != kernels.end()) return found->second;
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  VISDET_CHECK(launch.op, error == cudaSuccess, "the CUDA kernel ", launch.kernel,
               " cannot be loaded: ", explain_cuda_error(error));
  cudaFuncAttributes of_empty{};
  check_cuda(launch.op, cudaFuncGetAttributes(&of_empty, empty_kernel), "cudaFuncGetAttributes");
  const int64_t static_shared =
      static_cast<int64_t>(attributes.sharedSizeBytes) - static_cast<int64_t>(of_empty.sharedSizeBytes);
  return kernels[key] = {static_shared, attributes.maxThreadsPerBlock, attributes.maxDynamicSharedSizeBytes,
                         std::min(attributes.binaryVersion, attributes.ptxVersion)};
}

std::string sizes_text(const Launch& launch, int64_t static_shared) {
  const Grid& grid = launch.grid;
  return std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks of " +
         std::to_string(launch.threads) + " threads, " + std::to_string(static_shared) + " bytes of static and " +
         std::to_string(launch.dynamic_shared) + " bytes of dynamic shared memory";
}

// Allows a kernel the dynamic shared memory of a launch, and returns how much it has been allowed. The limit holds for
// all threads of the process, each of which keeps what this function returned. It is therefore never lowered.
int64_t allow_dynamic_shared(const Launch& launch, const void* kernel, int64_t static_shared) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int64_t>, int64_t> allowed;
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t& most = allowed[{kernel, launch.scope.device().index}];
  if (launch.dynamic_shared > most) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(launch.dynamic_shared));
    VISDET_CHECK(launch.op, error == cudaSuccess, "the CUDA kernel ", launch.kernel, " may not have ",
                 sizes_text(launch, static_shared), ": ", explain_cuda_error(error));
    most = launch.dynamic_shared;
  }
  return most;
}

void check_limits(const Launch& launch, int64_t static_shared, int64_t max_threads) {
  const Grid& grid = launch.grid;
  const int64_t shared = static_shared + launch.dynamic_shared, most = launch.scope.device().shared_block;
  const bool fits = grid.x <= kMaxGridX && grid.y <= kMaxGridYZ && grid.z <= kMaxGridYZ && launch.threads > 0 &&
                    launch.threads <= max_threads && launch.dynamic_shared >= 0 && shared <= most;
  VISDET_CHECK(launch.op, fits, "the CUDA kernel ", launch.kernel, " cannot run with ",
               sizes_text(launch, static_shared), ": at most ", kMaxGridX, " x ", kMaxGridYZ, " x ", kMaxGridYZ,
               " blocks of ", max_threads, " threads and ", most, " bytes of shared memory are possible");
}

}  // namespace

DeviceScope::DeviceScope(const Tensor& tensor) : is_plan_(inquiry.is_plan && !tensor.is_cuda()) {
  if (is_plan_) {
    device_ = *inquiry.device;
    return;
  }
  const int32_t index = tensor.get_device_index();
  guard_.emplace(index);
  device_ = present_device(index);
  if (inquiry.device) {
    device_ = *inquiry.device;
    device_.index = index;
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream));
  stream_ = static_cast<cudaStream_t>(stream);
}

namespace {

// Whether the kernel is to be started.
bool prepare(const Launch& launch, const void* kernel) {
  const Grid& grid = launch.grid;
  VISDET_CHECK(launch.op, grid.x >= 0 && grid.y >= 0 && grid.z >= 0, "the CUDA kernel ", launch.kernel,
               " was given a negative number of blocks: ", sizes_text(launch, launch.static_shared));
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return false;
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (inquiry.is_plan) {
    note("launch", launch.op,
         {{"kernel", in_quotes(launch.kernel)},
          {"grid", "[" + text(grid.x) + ", " + text(grid.y) + ", " + text(grid.z) + "]"},
          {"threads", text(launch.threads)},
          {"static_shared", text(launch.static_shared)},
          {"dynamic_shared", text(launch.dynamic_shared)}});
  }
  if (launch.scope.is_plan()) {
    check_limits(launch, launch.static_shared, kMaxThreads);
    return false;
  }
  CompiledKernel& compiled = compiled_kernel(launch, kernel);
  check_limits(launch, compiled.static_shared, compiled.max_threads);
  VISDET_CHECK(launch.op, launch.dynamic_shared == 0 || compiled.static_shared <= launch.static_shared,
               "the launch of the CUDA kernel ", launch.kernel, " must declare its ", compiled.static_shared,
               " bytes of static shared memory, it declares ", launch.static_shared);
  if (launch.dynamic_shared > compiled.allowed_dynamic ||
      (launch.dynamic_shared + compiled.static_shared > kSharedWithoutOptIn &&
       compiled.allowed_dynamic <= kSharedWithoutOptIn)) {
    compiled.allowed_dynamic = allow_dynamic_shared(launch, kernel, compiled.static_shared);
  }
  return true;
}

// Whether the kernel may start while the launch before it still runs.
bool can_overlap(const CompiledKernel& compiled) {
  constexpr int kGraphs = 12030;  // the driver of CUDA 12.3 is the first that can capture such a launch in a graph
  static const int driver = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }();
  return driver >= kGraphs && compiled.capability >= kOverlapCapability;
}

}  // namespace

namespace launching {

void start(const Launch& launch, const void* kernel, void** arguments) {
  if (!prepare(launch, kernel)) return;
  const auto number = [](int64_t x) { return static_cast<unsigned>(x); };
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(number(launch.grid.x), number(launch.grid.y), number(launch.grid.z));
  config.blockDim = dim3(number(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.dynamic_shared);
  config.stream = launch.scope.stream();
  config.attrs = &overlap;
  config.numAttrs = launch.overlaps && can_overlap(compiled_kernel(launch, kernel)) ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, arguments);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that it is not taken for that of a later launch
  fail(launch.op, ": the CUDA kernel ", launch.kernel, " did not start with ", sizes_text(launch, launch.static_shared),
       ": ", explain_cuda_error(error));
}

bool is_skipped(const char* op, const char* path) {
  if (inquiry.only.empty()) return false;
  const auto found = inquiry.only.find(op);
  return found != inquiry.only.end() && found->second != path;
}

void note_declined(const char* op, const char* path, const char* reason) {
  if (inquiry.is_plan) note("declined", op, {{"path", in_quotes(path)}, {"reason", in_quotes(reason)}});
}

void note_chosen(const char* op, const char* path) {
  if (inquiry.is_plan) note("chosen", op, {{"path", in_quotes(path)}});
}

void no_path(const char* op) {
  const auto found = inquiry.only.find(op);
  if (found != inquiry.only.end()) {
    fail(op, ": the path ", in_quotes(found->second), ", the only one asked for, does not serve this call");
  }
  fail(op, ": no path serves this call");
}

}  // namespace launching

void fill_bytes(const char* op, const DeviceScope& scope, void* to, int value, int64_t bytes) {
  if (scope.is_plan() || bytes == 0) return;
  check_cuda(op, cudaMemsetAsync(to, value, static_cast<size_t>(bytes), scope.stream()), "cudaMemsetAsync");
}

int64_t read_number(const char* op, const DeviceScope& scope, const int64_t* from) {
  int64_t number = 0;
  if (scope.is_plan()) return number;
  check_cuda(op, cudaMemcpyAsync(&number, from, sizeof(number), cudaMemcpyDeviceToHost, scope.stream()),
             "cudaMemcpyAsync");
  check_cuda(op, cudaStreamSynchronize(scope.stream()), "cudaStreamSynchronize");
  return number;
}

namespace {

// multiprocessors, shared_block, shared_multiprocessor, threads_multiprocessor, l2_bytes, capability
Device device_of_numbers(const std::vector<int64_t>& numbers) {
  if (numbers.size() != 6) fail("visdet_plan: a device is 6 numbers, got ", numbers.size());
  return {0, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]};
}

// The calls of this thread on meta tensors are plans for this device, until end_plan(). Launches of others are noted.
void begin_plan(std::vector<int64_t> device) {
  inquiry.is_plan = true, inquiry.device = device_of_numbers(device);
  inquiry.notes.clear();
}

// The notes since begin_plan(), as a JSON list.
std::string end_plan() {
  std::string json = "[";
  for (const std::string& text : inquiry.notes) json += (json.size() > 1 ? ", " : "") + text;
  inquiry.is_plan = false, inquiry.device.reset();
  inquiry.notes.clear();
  return json + "]";
}

// Calls of this thread choose as they would on this device; none: on the present one.
void choose_for(std::vector<int64_t> device) {
  if (device.empty()) {
    inquiry.device.reset();
  } else {
    inquiry.device = device_of_numbers(device);
  }
}

// Of this operator, this thread's calls may take only this path; an empty path: any.
void choose_only(std::string op, std::string path) {
  if (path.empty()) {
    inquiry.only.erase(op);
  } else {
    inquiry.only[op] = path;
  }
}

std::vector<int64_t> numbers_of_device(int64_t index) {
  const Device& device = present_device(static_cast<int>(index));
  return {device.multiprocessors,        device.shared_block, device.shared_multiprocessor,
          device.threads_multiprocessor, device.l2_bytes,     device.capability};
}

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet_plan, m) {
  m.def("begin_plan(int[] device) -> ()");
  m.def("end_plan() -> str");
  m.def("choose_for(int[] device) -> ()");
  m.def("choose_only(str op, str path) -> ()");
  m.def("numbers_of_device(int index) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(visdet_plan, CompositeExplicitAutograd, m) {
  m.impl("begin_plan", TORCH_BOX(&visdet::begin_plan));
  m.impl("end_plan", TORCH_BOX(&visdet::end_plan));
  m.impl("choose_for", TORCH_BOX(&visdet::choose_for));
  m.impl("choose_only", TORCH_BOX(&visdet::choose_only));
  m.impl("numbers_of_device", TORCH_BOX(&visdet::numbers_of_device));
}

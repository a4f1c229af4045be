// Errors of the CUDA runtime that are about the machine, not about the call: what they mean and what to do.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace visdet {

inline std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The oldest NVIDIA driver that runs programs compiled with the CUDA toolkit of this build.
inline std::string needed_driver_text() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  return kMajor == 13 ? "580 or newer" : kMajor == 12 ? "525 or newer" : "of CUDA " + std::to_string(kMajor);
}

// Such as "9.0", of the current device; empty if it cannot be had.
inline std::string compute_capability_text() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return "";
  }
  return std::to_string(major) + "." + std::to_string(minor);
}

// Returns what `error` means in CUDA's own words. If the driver or the GPU does not fit, the text also names the
// version that is needed, the version that was found, and a remedy.
inline std::string explain_cuda_error(cudaError_t error) {
  std::string words = cudaGetErrorString(error);
  while (!words.empty() && words.back() == '.') words.pop_back();
  const std::string toolkit = cuda_version_text(CUDART_VERSION);
  const bool is_driver = error == cudaErrorInsufficientDriver, is_ptx = error == cudaErrorUnsupportedPtxVersion;
  if (!is_driver && !is_ptx && error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) {
    return words;
  }
  int version = 0;
  cudaDriverGetVersion(&version);
  const std::string driver = version == 0 ? "there is no NVIDIA driver here"
                                          : "the driver here supports CUDA up to " + cuda_version_text(version);
  const std::string capability = is_driver ? "" : compute_capability_text();
  const std::string gpu = capability.empty() ? "this GPU" : "this GPU of compute capability " + capability;
  const std::string rebuild = "install visdet from source with TORCH_CUDA_ARCH_LIST=" +
                              (capability.empty() ? "<its compute capability>" : capability);
  cudaGetLastError();  // clears an error of the calls above, so that it is not taken for that of a later launch
  if (is_driver) {
    return words + ". visdet's CUDA library was compiled with CUDA " + toolkit + ", which needs an NVIDIA driver " +
           needed_driver_text() + "; " + driver +
           ". Update the driver, install visdet from source with an older CUDA toolkit (12.4 or newer), or use the "
           "CPU, where every operator works.";
  }
  if (is_ptx) {
    return words + ". visdet's CUDA library has no native code for " + gpu + ", and PTX of CUDA " + toolkit + "; " +
           driver + ". Update the driver, or " + rebuild + ".";
  }
  return words + ". visdet's CUDA library has no code for " + gpu + ": " + rebuild +
         " (python -m visdet.doctor shows what it was compiled for).";
}

}  // namespace visdet

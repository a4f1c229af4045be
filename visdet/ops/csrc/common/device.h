// What a choice between kernels may know of a GPU. It is plain data, so that a test can make one up.
#pragma once

#include <cstdint>

namespace visdet {

constexpr int64_t kOverlapCapability = 90;  // the least with launches that overlap, see common/overlap.cuh

struct Device {
  int64_t index = -1;                        // CUDA's number of the device
  int64_t multiprocessors = 1;               // number of streaming multiprocessors
  int64_t shared_block = 48 << 10;           // bytes of shared memory a block may have, after opting in
  int64_t shared_multiprocessor = 48 << 10;  // bytes of shared memory of a multiprocessor
  int64_t threads_multiprocessor = 1024;     // resident threads of a multiprocessor
  int64_t l2_bytes = 0;                      // size of the second-level cache
  int64_t capability = 0;                    // compute capability as major * 10 + minor

  // Bytes of shared memory, static and dynamic together, with which `blocks` blocks fit a multiprocessor. The driver
  // takes 1 KB a block for itself.
  constexpr int64_t shared_for(int64_t blocks) const {
    const int64_t of_block = shared_multiprocessor / blocks - 1024;
    return of_block < shared_block ? of_block : shared_block;
  }
};

}  // namespace visdet

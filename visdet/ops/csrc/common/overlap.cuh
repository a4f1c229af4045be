// For kernels of launches that overlap the launch before them (Launch::overlaps), by programmatic dependent launch.
//
// A kernel that calls allow_next_launch() lets the next launch start its blocks as soon as all blocks of this one have
// started: they take the multiprocessors that this launch leaves free. A kernel of a launch that overlaps calls
// await_previous_launch() in all threads that read what earlier launches wrote, and in at least one block in any case:
// so its end says that the launches before it have ended, too, which whoever comes next may rely on. No block waits for
// a block of its own launch, and all blocks that it waits for are running already. Both functions have no effect in a
// launch that does not overlap, and before sm_90.
#pragma once

#include <cuda_runtime.h>

namespace visdet {

__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Returns when the launch before this one has ended and what it wrote can be read. Loads of that must not go through
// the read-only cache: no __restrict__.
__device__ __forceinline__ void await_previous_launch() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace visdet

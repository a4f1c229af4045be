// Baseline pass only: huge pages for large results.
#pragma once

#include "../common/checks.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace visdet {

// The same tensor, whose memory the kernel is asked to back with pages of 2 MB where it is new and large. malloc maps a
// large block anew in every call, and first touching 36 MB of it in pages of 4 KB takes 8900 page faults: see
// docs/kernels.md, "ms_deform_attn on the CPU", for what that costs. A wish, no more: errors do not matter, memory that
// already has its pages keeps them, and other systems do without.
inline Tensor in_huge_pages(Tensor tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;  // whole pages of it
  if (last >= first + 2 * kPage) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return tensor;
}

}  // namespace visdet

// The instruction set the CPU kernels run with on this processor, for python -m visdet.doctor.
#include <torch/csrc/stable/library.h>

#define VISDET_ISA baseline
#include "cpu/dispatch.h"

namespace visdet {
namespace {

// 0 baseline, 1 AVX2, 2 AVX-512.
int64_t cpu_isa() { return static_cast<int64_t>(best_isa()); }

}  // namespace
}  // namespace visdet

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) { m.def("cpu_isa() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(visdet, CompositeExplicitAutograd, m) { m.impl("cpu_isa", TORCH_BOX(&visdet::cpu_isa)); }

// linear_sum_assignment: its schema. The kernel is for CUDA alone; on the CPU, scipy solves assignments.
#include "common/torch.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) { m.def("linear_sum_assignment(Tensor costs, Tensor counts) -> Tensor"); }

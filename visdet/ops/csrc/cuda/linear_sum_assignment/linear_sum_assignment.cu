// linear_sum_assignment on CUDA. The contract is in visdet/ops/fused/linear_sum_assignment.py.

#include <algorithm>
#include <vector>

#include "common/launch.h"
#include "cuda/linear_sum_assignment/shortest_path.cuh"

namespace visdet::linear_sum_assignment {
namespace {

constexpr const char* kOp = "linear_sum_assignment";
constexpr int64_t kColumnsOfThread = 4;
constexpr int64_t kMaxSize = int64_t{1} << 30;  // of N and of Q

Tensor forward(const Tensor& costs_in, const Tensor& counts_in) {
  const int64_t dim = costs_in.dim();
  VISDET_CHECK(kOp, dim >= 3, "costs must be [..., B, N, Q], got ", shape_text(costs_in));
  VISDET_CHECK(kOp, costs_in.scalar_type() == ScalarType::Double, "costs must be float64, got ", dtype_text(costs_in));
  const int64_t samples = costs_in.size(dim - 3), N = costs_in.size(dim - 2), Q = costs_in.size(dim - 1);
  VISDET_CHECK(kOp, N < kMaxSize && Q < kMaxSize && samples < kMaxSize,
               "costs must have fewer than 2^30 samples, rows and columns, got ", shape_text(costs_in));
  check_typed(kOp, "counts", counts_in, {{"B", samples}}, ScalarType::Long, "costs", costs_in);
  const DeviceScope scope(costs_in);
  const Tensor costs = dense(costs_in), counts = dense(counts_in);
  std::vector<int64_t> shape;
  for (int64_t d = 0; d < dim; ++d) {
    if (d != dim - 2) shape.push_back(costs.size(d));
  }
  Tensor index = new_empty(costs, shape, ScalarType::Long);
  if (index.numel() == 0) return index;
  const int64_t problems = index.numel() / Q, rows = std::min(N, Q), columns = std::max(N, Q);
  const int64_t bytes = memory_bytes(rows, columns), warps = ceil_div(columns, 32 * kColumnsOfThread);
  const int64_t own_bytes = kMaxWarps * sizeof(Candidate);
  const bool fits = bytes + own_bytes <= scope.device().shared_block;
  const Tensor scratch = new_empty(costs, {fits ? 0 : problems * bytes / static_cast<int64_t>(sizeof(double))});
  launch({kOp, "assignment_kernel", scope, problems, 32 * std::min<int64_t>(warps, kMaxWarps), fits ? bytes : 0,
          own_bytes},
         assignment_kernel, data_of(costs), data_of(counts), static_cast<int>(samples), static_cast<int>(N),
         static_cast<int>(Q), data_of(fits ? nullptr : &scratch), bytes / static_cast<int64_t>(sizeof(double)),
         data_of(index));
  return index;
}

}  // namespace
}  // namespace visdet::linear_sum_assignment

VISDET_CUDA_OPERATORS(linear_sum_assignment, m) {
  m.impl("linear_sum_assignment", TORCH_BOX(&visdet::linear_sum_assignment::forward));
}

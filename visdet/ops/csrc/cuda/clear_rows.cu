// Rows set to zero where a mask says so. The contract is in ../ms_deform_attn_projected.cpp.
#include "common/launch.h"

namespace visdet::clear_rows {
namespace {

constexpr int kThreads = 256;

// A warp owns 32 rows. Each lane reads the mask of one of them, and all lanes write the rows that are masked.
__global__ void __launch_bounds__(kThreads)
    clear_rows_kernel(const bool* __restrict__ mask, uint4* __restrict__ rows, int64_t count, int64_t packs) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, first = row - lane;
  uint32_t masked = __ballot_sync(0xffffffffu, row < count && mask[row]);
  for (; masked != 0; masked &= masked - 1) {
    uint4* const to = rows + (first + __ffs(masked) - 1) * packs;
    for (int64_t pack = lane; pack < packs; pack += 32) to[pack] = uint4{0, 0, 0, 0};
  }
}

Tensor clear(Tensor rows, const Tensor& mask) {
  const int64_t bytes = rows.dim() == 3 ? rows.size(2) * static_cast<int64_t>(rows.element_size()) : 0;
  VISDET_CHECK("clear_rows_",
               rows.dim() == 3 && rows.is_contiguous() && bytes % kVectorBytes == 0 && aligned(rows, kVectorBytes),
               "rows must be contiguous [B, S, C] of a multiple of 16 bytes, got ", shape_text(rows));
  VISDET_CHECK("clear_rows_",
               mask.dim() == 2 && mask.size(0) == rows.size(0) && mask.size(1) == rows.size(1) &&
                   mask.scalar_type() == ScalarType::Bool && on_device_of(rows, mask),
               "mask must be bool [B, S] on the device of rows, got ", shape_text(mask), " for ", shape_text(rows));
  const DeviceScope scope(rows);
  const Tensor packed = dense(mask);
  const int64_t count = rows.size(0) * rows.size(1);
  launch({"clear_rows_", "clear_rows_kernel", scope, ceil_div(count, kThreads), kThreads}, clear_rows_kernel,
         data_of<bool>(packed), mutable_data_of<uint4>(rows), count, bytes / kVectorBytes);
  return rows;
}

}  // namespace
}  // namespace visdet::clear_rows

VISDET_CUDA_OPERATORS(clear_rows, m) { m.impl("clear_rows_", TORCH_BOX(&visdet::clear_rows::clear)); }

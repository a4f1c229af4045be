// box_iou_rotated on CUDA. The contract is in ../box_iou_rotated.cpp.
#include "box_iou_rotated.h"
#include "common/launch.h"

namespace visdet::box_iou_rotated {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 16;  // boxes of boxes1 that a block compares with each of its boxes of boxes2

// A thread owns a box of boxes2 and writes its overlaps with the block's boxes of boxes1, which are in shared memory.
template <typename A, bool ROTATED>
__global__ void __launch_bounds__(kThreads)
    pairs_kernel(const A* __restrict__ boxes1, const A* __restrict__ boxes2, int64_t M, int64_t N, OverlapMode mode,
                 A* __restrict__ overlaps) {
  __shared__ Quadrilateral rows[kRows];
  const int64_t across = (N + kThreads - 1) / kThreads, n = blockIdx.x % across * kThreads + threadIdx.x;
  const int64_t first = blockIdx.x / across * kRows, count = M - first < kRows ? M - first : kRows;
  if (threadIdx.x < count) rows[threadIdx.x] = box_at<ROTATED>(boxes1, first + threadIdx.x);
  __syncthreads();  // the rows are there
  if (n >= N) return;
  const Quadrilateral mine = box_at<ROTATED>(boxes2, n);
  for (int i = 0; i < count; ++i) overlaps[(first + i) * N + n] = overlap_of<A, ROTATED>(rows[i], mine, mode);
}

// A thread owns a pair.
template <typename A, bool ROTATED>
__global__ void __launch_bounds__(kThreads) aligned_kernel(const A* __restrict__ boxes1, const A* __restrict__ boxes2,
                                                           int64_t M, OverlapMode mode, A* __restrict__ overlaps) {
  const int64_t m = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (m >= M) return;
  overlaps[m] = overlap_of<A, ROTATED>(box_at<ROTATED>(boxes1, m), box_at<ROTATED>(boxes2, m), mode);
}

}  // namespace

template <bool ROTATED, typename A>
void write_overlaps(const OnDevice& device, const Tensor& boxes1, const Tensor& boxes2, OverlapMode mode,
                    bool is_aligned, A* to) {
  const int64_t M = boxes1.size(0), N = boxes2.size(0);
  if (is_aligned) {
    launch({device.op, "aligned_kernel", device.scope, ceil_div(M, kThreads), kThreads}, aligned_kernel<A, ROTATED>,
           data_of(boxes1), data_of(boxes2), M, mode, to);
  } else {
    launch({device.op, "pairs_kernel", device.scope, ceil_div(N, kThreads) * ceil_div(M, kRows), kThreads},
           pairs_kernel<A, ROTATED>, data_of(boxes1), data_of(boxes2), M, N, mode, to);
  }
}

}  // namespace visdet::box_iou_rotated

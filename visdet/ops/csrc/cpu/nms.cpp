// The CPU kernel of nms for axis-aligned boxes. nms.h says why every operation is rounded by itself.
#include "cpu/nms.h"

#include "cpu/vec.h"

VISDET_NO_CONTRACTION

namespace visdet::VISDET_ISA {

template <typename A>
void write_areas(const A* boxes, int64_t N, A* areas) {
  for (int64_t n = 0; n < N; ++n, boxes += 4) areas[n] = (boxes[2] - boxes[0]) * (boxes[3] - boxes[1]);
}

template <typename A>
bool is_suppressed(const A* blocks, int64_t count, const A* box, A limit, A low) {
  const Vec<A> zero = {}, x1 = zero + box[0], y1 = zero + box[1], x2 = zero + box[2], y2 = zero + box[3];
  const Vec<A> area = zero + box[4];
  const IntVec<A> always = limit < 0 ? IntVec<A>{} == IntVec<A>{} : IntVec<A>{};
  for (int64_t block = 0; block < count; ++block, blocks += kBoxBlock) {
    for (int64_t i = 0; i < kAnyLanes; i += kLanes<A>) {
      const Vec<A> left = load(blocks + i), top = load(blocks + kAnyLanes + i);
      const Vec<A> right = load(blocks + 2 * kAnyLanes + i), bottom = load(blocks + 3 * kAnyLanes + i);
      Vec<A> width = (right < x2 ? right : x2) - (left > x1 ? left : x1);
      Vec<A> height = (bottom < y2 ? bottom : y2) - (top > y1 ? top : y1);
      width = width > 0 ? width : zero;
      height = height > 0 ? height : zero;
      const Vec<A> shared = width * height, both = load(blocks + 4 * kAnyLanes + i) + area - shared;
      const IntVec<A> is_near = ((shared > zero) & (shared >= low * both)) | always;
      if (any_lane<A>(is_near) && any_lane<A>(shared / both > limit)) return true;
    }
  }
  return false;
}

}  // namespace visdet::VISDET_ISA

VISDET_SUM_KERNELS(NmsKernels, write_areas<A>, is_suppressed<A>)

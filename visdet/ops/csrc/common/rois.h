// What operators that pool regions of interest check alike.
#pragma once

#include "common/bilinear.h"
#include "common/checks.h"
#include "common/rounded.h"

namespace visdet {

// Returns whether a region's batch index, a float, is one of the whole numbers 0 to B - 1.
template <typename A>
VISDET_HOST_DEVICE bool is_image(A index, int64_t B) {
  return index >= 0 && index < A(int64_t{1} << 62) && static_cast<int64_t>(index) < B &&
         static_cast<A>(static_cast<int64_t>(index)) == index;
}

// rois [N, 5 or more], whose shape is checked before. values: input, or a gradient of its type.
inline void check_rois(const char* op, const Tensor& rois, const Tensor& values) {
  check_value_type(op, "input", values.scalar_type());
  check_accumulate_type(op, "rois", rois, "input", values.scalar_type());
  check_device(op, "rois", rois, "input", values);
}

// The sizes of input and output.
template <typename Problem>
void check_roi_sizes(const char* op, const Problem& p) {
  VISDET_CHECK(op, p.PH > 0 && p.PW > 0, "output_size must be positive, got ", p.PH, " x ", p.PW);
  VISDET_CHECK(op, p.B >= 0 && p.H >= 0 && p.W >= 0, "input's sizes must not be negative, got ", p.B, ", ", p.H, ", ",
               p.W);
  VISDET_CHECK(op, p.H == 0 || p.W <= INT32_MAX / p.H, "input must have fewer than 2^31 pixels, got ", p.H, " x ", p.W);
}

}  // namespace visdet

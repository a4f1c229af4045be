// The schemas of points_inside.h, and its functions for CPU tensors.
#include "points_inside.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("points_in_boxes_part(Tensor points, Tensor boxes) -> Tensor");
  m.def("points_in_boxes_all(Tensor points, Tensor boxes) -> Tensor");
  m.def("points_in_polygons(Tensor points, Tensor polygons) -> Tensor");
  m.def("dynamic_voxelize(Tensor points, Tensor voxel_size, Tensor coors_range) -> Tensor");
}

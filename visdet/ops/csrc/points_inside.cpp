// The schemas of points_inside.h, and its functions for CPU tensors.
#include "points_inside.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("points_in_boxes_part(Tensor points, Tensor boxes) -> Tensor");
  m.def("points_in_boxes_all(Tensor points, Tensor boxes) -> Tensor");
  m.def("points_in_polygons(Tensor points, Tensor polygons) -> Tensor");
  m.def("dynamic_voxelize(Tensor points, Tensor voxel_size, Tensor coors_range) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("points_in_boxes_part", TORCH_BOX(&visdet::points_in_boxes_part<visdet::OnCpu>));
  m.impl("points_in_boxes_all", TORCH_BOX(&visdet::points_in_boxes_all<visdet::OnCpu>));
  m.impl("points_in_polygons", TORCH_BOX(&visdet::points_in_polygons<visdet::OnCpu>));
  m.impl("dynamic_voxelize", TORCH_BOX(&visdet::dynamic_voxelize<visdet::OnCpu>));
}

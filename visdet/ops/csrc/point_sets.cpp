// Operators on point sets: their schemas, and their registration for the CPU. point_sets.h holds the rest.
#include "point_sets.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("min_area_polygons(Tensor pointsets) -> Tensor");
  m.def("convex_iou(Tensor pointsets, Tensor polygons) -> Tensor");
  m.def("convex_giou(Tensor pointsets, Tensor polygons) -> (Tensor giou, Tensor gradient)");
  m.def("nearest_points(Tensor points, Tensor others) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(visdet, CPU, m) {
  m.impl("min_area_polygons", TORCH_BOX(&visdet::min_area_polygons<visdet::OnCpu>));
  m.impl("convex_iou", TORCH_BOX(&visdet::convex_iou<visdet::OnCpu>));
  m.impl("convex_giou", TORCH_BOX(&visdet::convex_giou<visdet::OnCpu>));
  m.impl("nearest_points", TORCH_BOX(&visdet::nearest_points<visdet::OnCpu>));
}

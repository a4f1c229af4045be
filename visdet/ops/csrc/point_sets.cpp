// Operators on point sets: their schemas, and their registration for the CPU. point_sets.h holds the rest.
#include "point_sets.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def("min_area_polygons(Tensor pointsets) -> Tensor");
  m.def("convex_iou(Tensor pointsets, Tensor polygons) -> Tensor");
  m.def("convex_giou(Tensor pointsets, Tensor polygons) -> (Tensor giou, Tensor gradient)");
  m.def("nearest_points(Tensor points, Tensor others) -> Tensor");
}

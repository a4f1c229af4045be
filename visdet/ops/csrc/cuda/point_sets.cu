// Operators on point sets on CUDA. ../point_sets.h holds them.
#include "point_sets.h"

VISDET_CUDA_OPERATORS(point_sets, m) {
  m.impl("min_area_polygons", TORCH_BOX(&visdet::min_area_polygons<visdet::OnGpu>));
  m.impl("convex_iou", TORCH_BOX(&visdet::convex_iou<visdet::OnGpu>));
  m.impl("convex_giou", TORCH_BOX(&visdet::convex_giou<visdet::OnGpu>));
  m.impl("nearest_points", TORCH_BOX(&visdet::nearest_points<visdet::OnGpu>));
}

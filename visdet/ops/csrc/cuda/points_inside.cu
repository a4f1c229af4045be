// The functions of ../points_inside.h for CUDA tensors.
#include "points_inside.h"

VISDET_CUDA_OPERATORS(points_inside, m) {
  m.impl("points_in_boxes_part", TORCH_BOX(&visdet::points_in_boxes_part<visdet::OnGpu>));
  m.impl("points_in_boxes_all", TORCH_BOX(&visdet::points_in_boxes_all<visdet::OnGpu>));
  m.impl("points_in_polygons", TORCH_BOX(&visdet::points_in_polygons<visdet::OnGpu>));
  m.impl("dynamic_voxelize", TORCH_BOX(&visdet::dynamic_voxelize<visdet::OnGpu>));
}

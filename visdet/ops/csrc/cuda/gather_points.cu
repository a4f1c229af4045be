// The functions of ../gather_points.h for CUDA tensors.
#include "gather_points.h"

VISDET_CUDA_OPERATORS(gather_points, m) {
  m.impl("gather_points", TORCH_BOX(&visdet::gather_points<visdet::OnGpu>));
  m.impl("gather_points_backward", TORCH_BOX(&visdet::gather_points_backward<visdet::OnGpu>));
  m.impl("stacked_indices", TORCH_BOX(&visdet::stacked_indices<visdet::OnGpu>));
}

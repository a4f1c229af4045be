// The schemas of cast_rays.h, and its functions for CPU tensors.
#include "cast_rays.h"

STABLE_TORCH_LIBRARY_FRAGMENT(visdet, m) {
  m.def(
      "cast_rays(Tensor occupancy, Tensor origins, Tensor points, Tensor times)"
      " -> (Tensor distances, Tensor exits, Tensor voxels)");
  m.def("render_rays(Tensor density, Tensor origins, Tensor points, Tensor times) -> Tensor");
  m.def(
      "render_rays_backward(Tensor grad_output, Tensor density, Tensor origins, Tensor points, Tensor times)"
      " -> Tensor grad_density");
}

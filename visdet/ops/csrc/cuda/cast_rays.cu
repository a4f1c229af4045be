// The functions of ../cast_rays.h for CUDA tensors.
#include "cast_rays.h"

VISDET_CUDA_OPERATORS(cast_rays, m) {
  m.impl("cast_rays", TORCH_BOX(&visdet::cast_rays<visdet::OnGpu>));
  m.impl("render_rays", TORCH_BOX(&visdet::render_rays<visdet::OnGpu>));
  m.impl("render_rays_backward", TORCH_BOX(&visdet::render_rays_backward<visdet::OnGpu>));
}

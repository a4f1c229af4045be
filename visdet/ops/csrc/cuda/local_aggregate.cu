// The functions of ../local_aggregate.h for CUDA tensors.
#include "local_aggregate.h"

VISDET_CUDA_OPERATORS(local_aggregate, m) {
  m.impl("local_aggregate", TORCH_BOX(&visdet::local_aggregate<visdet::OnGpu>));
  m.impl("local_aggregate_backward", TORCH_BOX(&visdet::local_aggregate_backward<visdet::OnGpu>));
}

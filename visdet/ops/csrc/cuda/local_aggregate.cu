// The functions of ../local_aggregate.h for CUDA tensors.
#include "local_aggregate.h"

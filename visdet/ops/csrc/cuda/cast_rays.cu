// The functions of ../cast_rays.h for CUDA tensors.
#include "cast_rays.h"

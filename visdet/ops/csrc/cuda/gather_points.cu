// The functions of ../gather_points.h for CUDA tensors.
#include "gather_points.h"

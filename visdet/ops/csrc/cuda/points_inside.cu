// The functions of ../points_inside.h for CUDA tensors.
#include "points_inside.h"

// Operators on point sets on CUDA. ../point_sets.h holds them.
#include "point_sets.h"

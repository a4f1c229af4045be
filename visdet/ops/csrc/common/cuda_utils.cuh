// The names of these headers that operators' sources still ask for under this one.
#pragma once

#include "common/launch.h"
#include "common/values.cuh"
#include "common/warp.cuh"

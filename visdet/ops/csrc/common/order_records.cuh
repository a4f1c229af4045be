// A header that operators' sources still ask for under this name.
#pragma once

#include "common/cells.cuh"

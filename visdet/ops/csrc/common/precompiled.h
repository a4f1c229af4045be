// What every file of host code includes: setup.py compiles it once, for all of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/dispatch.h"

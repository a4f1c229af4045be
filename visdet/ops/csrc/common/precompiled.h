// What every file of host code includes: setup.py compiles it once, for all of them.
#include "cpu/dispatch.h"

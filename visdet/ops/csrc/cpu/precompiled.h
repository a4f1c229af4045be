// What every kernel file includes: setup.py compiles it once per instruction set, for all of them.
#include "cpu/vec.h"

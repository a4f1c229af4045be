"""A clock for mmengine's timer that goes on evenly, also if somebody sets the clock of the machine."""

import time
from types import SimpleNamespace

from mmengine.hooks import iter_timer_hook

iter_timer_hook.time = SimpleNamespace(time=time.perf_counter)
IterTimerHook = iter_timer_hook.IterTimerHook

"""Modules and functions in plain torch that only mmcv's interface has. ``visdet.ops`` exports them."""

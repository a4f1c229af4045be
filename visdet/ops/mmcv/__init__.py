"""Modules and functions that only mmcv's interface has. ``visdet.ops`` exports them."""

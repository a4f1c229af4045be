"""Detection operators, modules and detectors for PyTorch, chosen from mmengine-style configs.

``VISDET_MMCV_OPS=1`` in the environment makes ``import visdet`` provide ``mmcv._ext`` (visdet.compat.mmcv_ops).
"""

import os

__version__ = "0.1.0"

if os.environ.get("VISDET_MMCV_OPS", "0") not in ("", "0"):
    from .compat.mmcv_ops import install

    install()

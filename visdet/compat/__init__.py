"""Bridges to other packages; nothing here is imported by the rest of visdet."""

import os

if os.environ.get("VISDET_MMCV_OPS", "0") not in ("", "0"):
    from .mmcv_ops import install

    install()

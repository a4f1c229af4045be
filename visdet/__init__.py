"""Detection operators, modules and detectors for PyTorch, chosen from mmengine-style configs.

``visdet.init_detector`` gives a detector for images, ``visdet.train`` and ``visdet.evaluate`` run a config, and
``visdet.export`` writes a model for other runtimes. Their packages are imported when they are first used.
``VISDET_MMCV_OPS=1`` in the environment makes ``import visdet`` provide ``mmcv._ext`` (visdet.compat.mmcv_ops).
"""

import os
from typing import TYPE_CHECKING

from .lazy_names import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import ops
    from .data_folder import evaluate, train
    from .engine.inference.detections import Detections
    from .engine.inference.detector import Detector, init_detector
    from .engine.run import TrainingResult
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Detections": "engine.inference.detections",
            "Detector": "engine.inference.detector",
            "evaluate": "data_folder",
            "export": "export",
            "init_detector": "engine.inference.detector",
            "ops": "ops",
            "train": "data_folder",
            "TrainingResult": "engine.run",
        },
    )

if os.environ.get("VISDET_MMCV_OPS", "0") not in ("", "0"):
    from .compat.mmcv_ops import install

    install()

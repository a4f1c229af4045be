"""Running a config: additions to mmengine's Runner, and the functions behind the command-line tools."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from .checkpoint import read_checkpoint, write_checkpoint
from .config import (
    CfgOptions,
    check_required_keys,
    check_work_dir,
    complete_config,
    dataset_config,
    load_config,
)
from .console import say
from .distributed import checked_launcher
from .dump_detections import DumpDetections
from .errors import CheckpointError, ConfigError, UserError, tool_session
from .hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    DetVisualizationHook,
    NonFiniteLossError,
    NumClassCheckHook,
    ProgressHook,
    RunReportHook,
    RuntimeInfoHook,
)
from .inference import Detector, detect_files, find_images
from .log_curves import draw_curves, read_scalars
from .loops import EpochBasedTrainLoop, IterBasedTrainLoop
from .optim_wrapper import AmpOptimWrapper, OptimWrapper
from .prepare import (
    build_runner,
    draw_detections,
    enable_amp,
    enable_auto_scale_lr,
    set_resume,
    write_detections,
)
from .resume import newest_readable_checkpoint
from .runner import DetRunner

__all__ = [
    "AmpOptimWrapper",
    "CfgOptions",
    "CheckInvalidLossHook",
    "CheckpointError",
    "CheckpointHook",
    "ConfigError",
    "DetRunner",
    "DetVisualizationHook",
    "Detector",
    "DumpDetections",
    "EpochBasedTrainLoop",
    "IterBasedTrainLoop",
    "NonFiniteLossError",
    "NumClassCheckHook",
    "OptimWrapper",
    "ProgressHook",
    "RunReportHook",
    "RuntimeInfoHook",
    "UserError",
    "build_runner",
    "check_required_keys",
    "check_work_dir",
    "checked_launcher",
    "complete_config",
    "dataset_config",
    "detect_files",
    "draw_curves",
    "draw_detections",
    "enable_amp",
    "enable_auto_scale_lr",
    "find_images",
    "load_config",
    "newest_readable_checkpoint",
    "read_checkpoint",
    "read_scalars",
    "say",
    "set_resume",
    "tool_session",
    "write_checkpoint",
    "write_detections",
]

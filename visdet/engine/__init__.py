"""Running a config: the trainer, and the functions behind the command-line tools."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names
from visdet.train_extra import require_train_extra

require_train_extra(__name__)

if TYPE_CHECKING:
    from visdet.option_values import CfgOptions

    from .checkpoints.checkpoint import read_checkpoint, write_checkpoint
    from .checkpoints.held_config import load_config
    from .checkpoints.resume import newest_readable_checkpoint
    from .config.load import (
        check_required_keys,
        complete_config,
        dataset_config,
    )
    from .errors import CheckpointError, ConfigError, UserError
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
    from .inference.detect_files import detect_files
    from .inference.detections import Detections
    from .inference.detector import Detector, init_detector
    from .inference.dump_detections import DumpDetections
    from .inference.image_files import find_images
    from .log_curves import draw_curves, read_scalars
    from .optim.muon import MuonWithAuxAdam
    from .optim.optim_wrapper import AmpOptimWrapper, OptimWrapper
    from .prepare import (
        build_runner,
        draw_detections,
        enable_amp,
        enable_auto_scale_lr,
        set_resume,
        write_detections,
    )
    from .process.console import say
    from .process.distributed import checked_launcher
    from .process.places import check_out_file, check_work_dir
    from .process.session import tool_session
    from .run import TrainingResult, evaluate, train
    from .stages import StagedModel
    from .trainer import DetRunner
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "AmpOptimWrapper": "optim.optim_wrapper",
            "build_runner": "prepare",
            "CfgOptions": "visdet.option_values",
            "check_out_file": "process.places",
            "check_required_keys": "config.load",
            "check_work_dir": "process.places",
            "checked_launcher": "process.distributed",
            "CheckInvalidLossHook": "hooks",
            "CheckpointError": "errors",
            "CheckpointHook": "hooks",
            "complete_config": "config.load",
            "ConfigError": "errors",
            "dataset_config": "config.load",
            "detect_files": "inference.detect_files",
            "Detections": "inference.detections",
            "Detector": "inference.detector",
            "DetRunner": "trainer",
            "DetVisualizationHook": "hooks",
            "draw_curves": "log_curves",
            "draw_detections": "prepare",
            "DumpDetections": "inference.dump_detections",
            "enable_amp": "prepare",
            "enable_auto_scale_lr": "prepare",
            "evaluate": "run",
            "find_images": "inference.image_files",
            "init_detector": "inference.detector",
            "load_config": "checkpoints.held_config",
            "MuonWithAuxAdam": "optim.muon",
            "newest_readable_checkpoint": "checkpoints.resume",
            "NonFiniteLossError": "hooks",
            "NumClassCheckHook": "hooks",
            "OptimWrapper": "optim.optim_wrapper",
            "ProgressHook": "hooks",
            "read_checkpoint": "checkpoints.checkpoint",
            "read_scalars": "log_curves",
            "RunReportHook": "hooks",
            "RuntimeInfoHook": "hooks",
            "say": "process.console",
            "set_resume": "prepare",
            "StagedModel": "stages",
            "tool_session": "process.session",
            "train": "run",
            "TrainingResult": "run",
            "UserError": "errors",
            "write_checkpoint": "checkpoints.checkpoint",
            "write_detections": "prepare",
        },
    )

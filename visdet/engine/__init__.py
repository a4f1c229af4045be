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
    from .inference.detections import Detections
    from .inference.detector import Detector, detect_files, init_detector
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
            "visdet.option_values": ["CfgOptions"],
            "checkpoints.checkpoint": ["read_checkpoint", "write_checkpoint"],
            "config.load": [
                "check_required_keys",
                "complete_config",
                "dataset_config",
            ],
            "checkpoints.held_config": ["load_config"],
            "process.console": ["say"],
            "process.session": ["tool_session"],
            "process.distributed": ["checked_launcher"],
            "inference.detections": ["Detections"],
            "inference.dump_detections": ["DumpDetections"],
            "errors": ["CheckpointError", "ConfigError", "UserError"],
            "hooks": [
                "CheckInvalidLossHook",
                "CheckpointHook",
                "DetVisualizationHook",
                "NonFiniteLossError",
                "NumClassCheckHook",
                "ProgressHook",
                "RunReportHook",
                "RuntimeInfoHook",
            ],
            "inference.image_files": ["find_images"],
            "inference.detector": ["Detector", "detect_files", "init_detector"],
            "log_curves": ["draw_curves", "read_scalars"],
            "optim.muon": ["MuonWithAuxAdam"],
            "optim.optim_wrapper": ["AmpOptimWrapper", "OptimWrapper"],
            "process.places": ["check_out_file", "check_work_dir"],
            "prepare": [
                "build_runner",
                "draw_detections",
                "enable_amp",
                "enable_auto_scale_lr",
                "set_resume",
                "write_detections",
            ],
            "checkpoints.resume": ["newest_readable_checkpoint"],
            "run": ["TrainingResult", "evaluate", "train"],
            "stages": ["StagedModel"],
            "trainer": ["DetRunner"],
        },
    )

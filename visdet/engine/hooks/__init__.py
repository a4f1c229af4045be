"""Hooks that mmengine lacks, a safer version of its checkpoint hook, and a faster one of its hook for the log."""

from .check_invalid_loss_hook import CheckInvalidLossHook, NonFiniteLossError
from .checkpoint_hook import CheckpointHook
from .iter_timer_hook import IterTimerHook
from .logger_hook import LoggerHook
from .num_class_check_hook import NumClassCheckHook
from .pipeline_switch_hook import PipelineSwitchHook
from .progress_hook import ProgressHook
from .run_report_hook import RunReportHook
from .runtime_info_hook import RuntimeInfoHook
from .visualization_hook import DetVisualizationHook

__all__ = [
    "CheckInvalidLossHook",
    "CheckpointHook",
    "DetVisualizationHook",
    "IterTimerHook",
    "LoggerHook",
    "NonFiniteLossError",
    "NumClassCheckHook",
    "PipelineSwitchHook",
    "ProgressHook",
    "RunReportHook",
    "RuntimeInfoHook",
]

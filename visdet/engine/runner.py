"""A version of mmengine's Runner with safe checkpoints, exact resuming, and training on CPUs under torchrun."""

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.runner import EpochBasedTrainLoop, Runner, TestLoop, ValLoop
from mmengine.runner.base_loop import BaseLoop
from torch import nn
from torch.fx.proxy import TraceError
from torch.utils.data import DataLoader

from visdet.errors import ConfigError, MissingFileError, build_step
from visdet.registry import DATASETS, HOOKS, METRICS, PARAM_SCHEDULERS, RUNNERS, VISUALIZERS

from .advice import advice_for_training
from .build_errors import build_model, building, check_texts
from .checkpoints.checkpointing_runner import CheckpointingRunner
from .config import complete_config
from .config_checks import check_parts, schedules_of
from .config_text import values_without_code
from .console import ConsoleHandler, WorkerStart
from .data_workers import (
    check_shared_memory,
    explain_collation,
    report_lost_batches,
    worker_failures_explained,
)
from .distributed import start_process_group, wrapper_on_the_cpu
from .environment import environment
from .errors import log_fatal_error, nearest_names
from .graphs.methods import GraphedMethod, graphs_for
from .hooks.check_invalid_loss_hook import CheckInvalidLossHook
from .loops import check_frames_come_one_by_one, check_metrics_are_apart, check_there_are_samples
from .monitored_metrics import check_monitored
from .places import only_training_in
from .run_config import RunConfig

__all__ = ["DetRunner"]

# The first of these hooks replaces mmengine's. The others come after mmengine's own six. The default_hooks of a config
# change a hook under its key, or remove it by None.
_DEFAULT_HOOKS = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "num_class_check": {"type": "NumClassCheckHook"},
    "invalid_loss": {"type": "CheckInvalidLossHook"},
    "progress": {"type": "ProgressHook"},
    "report": {"type": "RunReportHook"},
}
_MMENGINE_HOOKS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")


@RUNNERS.register_module()
class DetRunner(CheckpointingRunner):
    """Trains and tests a model by a config.

    It differs from mmengine's Runner as follows:

    * Checkpoints hold tensors and plain types. A crash leaves no incomplete checkpoint. Reading a checkpoint runs no
      code from the file, unless the config says ``trust_checkpoint=True``.
    * A resumed run continues with the seed, the data order and the random state of the earlier run, in its data
      workers, too. If the newest checkpoint is damaged, the run resumes from the one before it. ``resume`` is 'auto',
      a path, or True as in mmengine.
    * ``load_from`` refuses weights that do not fit, unless the config says ``strict_load=False``. Weights with NaN
      or infinite numbers are refused, unless it says ``allow_nonfinite_weights=True``.
    * ``launcher='pytorch'`` works on machines without GPUs, where it uses gloo.
    * The backward pass runs in the training thread, on GPUs, too.
    * On a GPU, training steps and predictions are replayed as CUDA graphs, unless the config says ``graph=False``; see
      :class:`GraphedLoss` and :class:`GraphedPrediction`.
    * The terminal shows warnings, progress and results. The environment, the config and every log line go to the log
      file.

    Args: see :class:`mmengine.runner.Runner`. ``from_cfg`` completes the config first by :func:`complete_config`.
    """

    @functools.wraps(Runner.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self._logging_fatal_errors():
            super().__init__(*args, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Config) -> "DetRunner":
        """Build a runner from a config, which is not changed."""
        cfg = RunConfig.copy_of(cfg)
        complete_config(cfg)
        check_parts(cfg)
        return super().from_cfg(cfg)

    def setup_env(self, env_cfg: dict) -> None:
        """Join the process group and set up the environment by ``env_cfg``."""
        start_process_group(self.launcher, env_cfg.get("dist_cfg", {}).get("timeout"))
        if self.distributed:  # mmengine sets these, too, but every process warns about it.
            for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ.setdefault(variable, "1")
        super().setup_env(env_cfg)

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | None = None, **options: Any
    ) -> MMLogger:
        """Build the logger. Its file gets every message, and the terminal gets warnings and errors only."""
        try:
            logger = super().build_logger(log_level, log_file, **options)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"log_level must be a level of logging, such as 'INFO', got {log_level!r}"
            ) from error
        logger.handlers[:] = [h for h in logger.handlers if type(h) is not logging.StreamHandler]
        logger.handlers.append(ConsoleHandler())
        return logger

    def wrap_model(self, model_wrapper_cfg: dict | None, model: nn.Module) -> nn.Module:
        """Move the model to its device and wrap it for distributed training, on CPUs, too."""
        if self.distributed and not torch.cuda.is_available():
            unused = self.cfg.get("find_unused_parameters", False)
            model_wrapper_cfg = wrapper_on_the_cpu(model_wrapper_cfg, find_unused_parameters=unused)
        with warnings.catch_warnings():
            # With this argument, mmengine leaves batch statistics to each process. torch has renamed it.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            return super().wrap_model(model_wrapper_cfg, model)

    def build_model(self, model: nn.Module | dict) -> nn.Module:
        """Build the model."""
        # mmengine would build it by its own registry, which does not check arguments.
        if isinstance(model, dict):
            model = build_model(self.cfg, model)
        return super().build_model(model)

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build the visualizer. Its name is the run's folder, because mmengine keeps one visualizer per name."""
        if isinstance(visualizer, dict):
            visualizer = {**visualizer, "name": self.log_dir}
            visualizer.setdefault("save_dir", self.log_dir)
        with building(self.cfg, "visualizer"):
            if isinstance(visualizer, dict):  # visdet's registry compares the arguments with their types.
                visualizer = VISUALIZERS.build(visualizer)
            return super().build_visualizer(visualizer)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader | dict, seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader:
        """Build a loader, whose workers leave the terminal to the training process."""
        if isinstance(dataloader, dict) and isinstance(dataloader.get("dataset"), dict):
            dataset = DATASETS.build(
                dataloader["dataset"]
            )  # mmengine's registry would not check its arguments.
            if hasattr(dataset, "full_init"):
                dataset.full_init()
            dataloader = {**dataloader, "dataset": dataset}
        loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        if not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
        if not torch.cuda.is_available():
            loader.pin_memory = (
                False  # A config serves machines with and without a GPU, and torch would warn.
            )
        report_lost_batches(loader)
        explain_collation(loader)
        check_shared_memory(loader)
        return loader

    def build_train_loop(self, loop: BaseLoop | dict) -> BaseLoop:
        """Build the training loop. A loop without a ``type`` is one of this package's, which ``by_epoch`` chooses."""
        if isinstance(loop, dict) and "type" not in loop:
            loop = copy.deepcopy(loop)
            loop["type"] = "EpochBasedTrainLoop" if loop.pop("by_epoch", True) else "IterBasedTrainLoop"
        defaults = {"train_cfg": EpochBasedTrainLoop, "train_dataloader": DataLoader}
        with building(self.cfg, "train_cfg", "train_dataloader", defaults=defaults):
            return super().build_train_loop(loop)

    def build_val_loop(self, loop: BaseLoop | dict) -> BaseLoop:
        """Build the validation loop."""
        return self._checked_loop("val", super().build_val_loop, loop, ValLoop)

    def build_test_loop(self, loop: BaseLoop | dict) -> BaseLoop:
        """Build the test loop."""
        return self._checked_loop("test", super().build_test_loop, loop, TestLoop)

    def _checked_loop(self, stage: str, build: Callable[[Any], Any], loop: Any, default: type) -> Any:
        config, loader, evaluator = (f"{stage}_{part}" for part in ("cfg", "dataloader", "evaluator"))
        with building(self.cfg, config, loader, evaluator, defaults={config: default, loader: DataLoader}):
            built = build(loop)
            check_there_are_samples(built.dataloader.dataset, loader)
            check_frames_come_one_by_one(built.dataloader, loader)
            check_metrics_are_apart(built.evaluator.metrics, evaluator)
            return built

    def build_evaluator(self, evaluator: Any) -> Any:
        """Build the metrics of validation or of a test."""
        with building(self.cfg, "val_evaluator", "test_evaluator"):
            if isinstance(evaluator, list) or (isinstance(evaluator, dict) and "metrics" not in evaluator):
                metrics = evaluator if isinstance(evaluator, list) else [evaluator]
                # visdet's registry compares the arguments with their types, which mmengine's evaluator does not.
                evaluator = [
                    METRICS.build(metric) if isinstance(metric, dict) else metric for metric in metrics
                ]
            return super().build_evaluator(evaluator)

    def _build_what_needs_no_data(self, *stages: str) -> None:
        """Check the config of the stages, and build what needs no data, to find mistakes before data are read.

        Args:
            stages: 'train', 'val' or 'test'.
        """
        loops = {"train": EpochBasedTrainLoop, "val": ValLoop, "test": TestLoop}
        for stage in stages:
            defaults = {f"{stage}_cfg": loops[stage], f"{stage}_dataloader": DataLoader}
            check_texts(self.cfg, *defaults, f"{stage}_evaluator", defaults=defaults)
        if "train" in stages:
            check_texts(self.cfg, "optim_wrapper", "param_scheduler")
            self.optim_wrapper = self.build_optim_wrapper(self.optim_wrapper)
            with building(self.cfg, "param_scheduler"):
                for schedule in schedules_of(self.param_schedulers):
                    PARAM_SCHEDULERS.get(schedule["type"])
        for name in (f"_{stage}_evaluator" for stage in stages if stage != "train"):
            if getattr(self, name) is not None:
                with suppress(MissingFileError):  # The data set may be drawn later, or the loop says so.
                    setattr(self, name, self.build_evaluator(getattr(self, name)))

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the optimizer and its wrapper."""
        with building(self.cfg, "optim_wrapper"):
            return super().build_optim_wrapper(optim_wrapper)

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build the schedules."""
        with building(self.cfg, "param_scheduler"):
            for schedule in schedules_of(scheduler):
                # mmengine ends a schedule without an end when training ends, and refuses one that ends before it
                # begins. ``complete_config`` sees to those that count what the training loop counts.
                begin = schedule.get("begin", 0)
                if not schedule.get("by_epoch", True) and 0 < self.max_iters <= begin:
                    schedule.setdefault("end", begin + 1)
            return super().build_param_scheduler(scheduler)

    def build_log_processor(self, log_processor: Any) -> Any:
        """Build the log processor."""
        with building(self.cfg, "log_processor"):
            return super().build_log_processor(log_processor)

    def register_hook(self, hook: Any, priority: Any = None) -> None:
        """Register a hook. If it is a config, build it first."""
        with building(self.cfg, "default_hooks", "custom_hooks"), build_step(_type_of(hook)):
            if isinstance(hook, dict):
                hook = dict(hook)
                given = hook.pop("priority", None)
                hook, priority = HOOKS.build(hook), given if priority is None else priority
            super().register_hook(hook, priority)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the method of this name of every hook. Some find a value of the config only when a run begins."""
        begins = fn_name in ("before_run", "before_train")
        with building(self.cfg, "default_hooks", "custom_hooks") if begins else nullcontext():
            super().call_hook(fn_name, **kwargs)

    def register_default_hooks(self, hooks: dict | None = None) -> None:
        """Register the default hooks of mmengine, of this package and of the config."""
        merged = {**copy.deepcopy(_DEFAULT_HOOKS), **(hooks or {})}
        # None removes any default hook. mmengine does that for its own hooks only.
        check_texts(self.cfg, "default_hooks", "custom_hooks")
        ours = {name: hook for name, hook in merged.items() if hook is not None or name in _MMENGINE_HOOKS}
        super().register_default_hooks(ours)

    def train(self) -> nn.Module:
        """Train the model and return it. Training continues from a checkpoint if there is one to resume."""
        with advice_for_training(self), only_training_in(self.work_dir) if self.rank == 0 else nullcontext():
            return self._announcing_the_end(self._train)

    def _log_env(self, env_cfg: dict) -> None:
        """Write the environment, the settings and the config to the log. ``Runner.__init__`` calls this."""
        settings = {
            **env_cfg,
            **self._randomness_cfg,
            "seed": self.seed,
            "launcher": self.launcher,
            "processes": self.world_size,
        }
        for title, facts in (("System environment", environment()), ("Runtime environment", settings)):
            self.logger.info(
                "\n    ".join([f"{title}:", *(f"{name}: {fact}" for name, fact in facts.items())])
            )
        self.logger.info(f"Config:\n{self.cfg.pretty_text}")

    def dump_config(self) -> None:
        """Write the config to the work_dir, and warn of values that the copy cannot have."""
        super().dump_config()
        if lost := values_without_code(self.cfg.to_dict()):
            self.logger.warning(
                f"the copy of the config in the work_dir has a description in place of {', '.join(lost)}, which "
                f"cannot be written as code. Keep {self.cfg.filename}"
            )

    def _train(self) -> nn.Module:
        self._find_checkpoint_to_resume()
        self._build_what_needs_no_data("train", "val")
        check_monitored(self)
        self._check_names_of_parts("activation_checkpointing", "efficient_conv_bn_eval")
        # A process trains on one device, so that a separate thread for the backward pass would only take time.
        with torch.autograd.set_multithreading_enabled(False), self.graphs_installed():
            try:
                model = super().train()
            except TraceError as error:
                raise ConfigError(
                    f"efficient_conv_bn_eval: torch.fx cannot trace one of {self.cfg.get('efficient_conv_bn_eval')}: "
                    f"{error}. Name smaller parts of the model, or leave it out"
                ) from error
            except Exception:
                self._check_losses()
                raise
        self._report_graphs()
        return model

    def _maybe_compile(self, target: str) -> None:
        try:
            super()._maybe_compile(target)
        except (TypeError, RuntimeError) as error:  # The model is not run yet.
            raise ConfigError(f"compile: torch refuses {self.cfg.get('compile')}: {error}") from error

    def _check_names_of_parts(self, *keys: str) -> None:
        parts = dict(self.model.named_modules())
        for key in keys:
            names = self.cfg.get(key) or []
            for name in [names] if isinstance(names, str) else names:
                if name not in parts:
                    near = ", ".join(nearest_names(name, parts))
                    raise ConfigError(f"{key}: the model has no part {name!r}{near and f'; near: {near}'}")

    def _check_losses(self) -> None:
        """Raise an error if a loss that has not been checked yet is NaN or infinite.

        Such a loss may have caused the error that ends the training, and it is easier to understand than that error.
        """
        for hook in self.hooks:
            if isinstance(hook, CheckInvalidLossHook):
                hook.check(self)

    @functools.cached_property
    def graphs(self) -> list[GraphedMethod]:
        """The objects that replay steps of the model as CUDA graphs. The list is empty if graphs are not used."""
        return graphs_for(self.cfg, self.model, self.logger)

    @contextmanager
    def graphs_installed(self) -> Iterator[None]:
        """Let the model run with CUDA graphs inside the block, unless the config says otherwise."""
        with ExitStack() as stack:
            for graphs in self.graphs:
                stack.enter_context(graphs.installed())
            yield

    def _report_graphs(self) -> None:
        for graphs in self.graphs:
            if graphs.counts:
                self.logger.info(graphs.report())

    def val(self) -> dict:
        """Validate and return the metrics."""
        return self._announcing_the_end(functools.partial(self._evaluate, "val", super().val))

    def test(self) -> dict:
        """Test and return the metrics."""
        return self._announcing_the_end(functools.partial(self._evaluate, "test", super().test))

    def _evaluate(self, stage: str, evaluate: Callable[[], dict]) -> dict:
        self._build_what_needs_no_data(stage)
        with self.graphs_installed():
            metrics = evaluate()
        self._report_graphs()
        return metrics

    def _announcing_the_end(self, stage: Any) -> Any:
        """Run a stage, and call the ``on_exit`` of the hooks even if it fails. Hooks release the terminal there."""
        with self._logging_fatal_errors():
            try:
                with worker_failures_explained():
                    return stage()
            finally:
                self.call_hook("on_exit")

    @contextmanager
    def _logging_fatal_errors(self) -> Iterator[None]:
        """Write an error of the block to the run's log file, if that file exists yet."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if getattr(self, "logger", None) is not None:
                log_fatal_error(self.logger, error, self.logger.log_file)
            raise


def _type_of(hook: Any) -> str:
    kind = hook.get("type", "a hook") if isinstance(hook, dict) else type(hook)
    return kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__

"""A version of mmengine's Runner with safe checkpoints, exact resuming, and training on CPUs under torchrun."""

import copy
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mmengine
import torch
from mmengine.config import Config
from mmengine.dist import master_only
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.logging import MMLogger
from mmengine.model import is_model_wrapper
from mmengine.runner import EpochBasedTrainLoop, Runner, TestLoop, ValLoop
from mmengine.runner.base_loop import BaseLoop
from mmengine.runner.checkpoint import weights_to_cpu
from torch import nn
from torch.utils.data import DataLoader

from visdet.errors import build_step
from visdet.registry import RUNNERS

from .build_errors import building
from .checkpoint import (
    read_checkpoint,
    register_checkpoint_readers,
    write_checkpoint,
)
from .config import complete_config
from .console import ConsoleHandler, WorkerStart, say
from .cuda_graphs import GraphedMethod, graphs_for
from .distributed import start_process_group, wrapper_on_the_cpu
from .environment import environment
from .errors import CheckpointError, log_fatal_error
from .hooks.check_invalid_loss_hook import CheckInvalidLossHook
from .hooks.runtime_info_hook import RuntimeInfoHook
from .loops import weights_cast_once
from .plain_state import restore_message_hub, to_plain
from .random_state import set_random_state
from .resume import checkpoint_to_resume, decided_by_the_main_process, read_on_every_process
from .run_config import RunConfig
from .temporal_state import restore_temporal_state
from .weights import load_weights, weights_of

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
class DetRunner(Runner):
    """Trains and tests a model by a config.

    It differs from mmengine's Runner as follows:

    * Checkpoints hold tensors and plain types. A crash leaves no incomplete checkpoint. Reading a checkpoint runs no
      code from the file, unless the config says ``trust_checkpoint=True``.
    * A resumed run continues with the seed, the data order and the random state of the earlier run, in its data
      workers, too. If the newest checkpoint is damaged, the run resumes from the one before it. ``resume`` is 'auto',
      a path, or True as in mmengine.
    * ``load_from`` refuses weights that do not fit, unless the config says ``strict_load=False``.
    * ``launcher='pytorch'`` works on machines without GPUs, where it uses gloo.
    * The backward pass runs in the training thread, on GPUs, too.
    * ``graph=True`` in the config replays training steps and predictions as CUDA graphs; see :class:`GraphedLoss` and
      :class:`GraphedPrediction`.
    * The terminal shows warnings, progress and results. The environment, the config and every log line go to the log
      file.

    Args: see :class:`mmengine.runner.Runner`. ``from_cfg`` completes the config first by :func:`complete_config`.
    """

    # These two attributes are mmengine's.
    _resume: Any
    _load_from: Any

    @functools.wraps(Runner.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self._logging_fatal_errors():
            super().__init__(*args, **kwargs)

    @classmethod
    def from_cfg(cls, cfg: Config) -> "DetRunner":
        """Build a runner from a config, which is not changed."""
        cfg = RunConfig.copy_of(cfg)
        complete_config(cfg)
        return super().from_cfg(cfg)

    def setup_env(self, env_cfg: dict) -> None:
        """Join the process group and set up the environment by ``env_cfg``."""
        register_checkpoint_readers(trust=self._trusts_checkpoints)
        self._random_state: dict[str, Any] | None = None
        self._checkpoint: tuple[str, dict] | None = None
        start_process_group(self.launcher, env_cfg.get("dist_cfg", {}).get("timeout"))
        if self.distributed:  # mmengine sets these, too, but every process warns about it.
            for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ.setdefault(variable, "1")
        super().setup_env(env_cfg)

    def build_logger(
        self, log_level: int | str = "INFO", log_file: str | None = None, **options: Any
    ) -> MMLogger:
        """Build the logger. Its file gets every message, and the terminal gets warnings and errors only."""
        logger = super().build_logger(log_level, log_file, **options)
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
        with building(self.cfg, "model"):
            return super().build_model(model)

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build the visualizer."""
        with building(self.cfg, "visualizer"):
            return super().build_visualizer(visualizer)

    @staticmethod
    def build_dataloader(
        dataloader: DataLoader | dict, seed: int | None = None, diff_rank_seed: bool = False
    ) -> DataLoader:
        """Build a loader, whose workers leave the terminal to the training process."""
        loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
        if not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
        if not torch.cuda.is_available():
            loader.pin_memory = (
                False  # A config serves machines with and without a GPU, and torch would warn.
            )
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
        defaults = {"val_cfg": ValLoop, "val_dataloader": DataLoader}
        with building(self.cfg, "val_cfg", "val_dataloader", "val_evaluator", defaults=defaults):
            return super().build_val_loop(loop)

    def build_test_loop(self, loop: BaseLoop | dict) -> BaseLoop:
        """Build the test loop."""
        defaults = {"test_cfg": TestLoop, "test_dataloader": DataLoader}
        with building(self.cfg, "test_cfg", "test_dataloader", "test_evaluator", defaults=defaults):
            return super().build_test_loop(loop)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build the optimizer and its wrapper."""
        with building(self.cfg, "optim_wrapper"):
            return super().build_optim_wrapper(optim_wrapper)

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build the schedules."""
        with building(self.cfg, "param_scheduler"):
            return super().build_param_scheduler(scheduler)

    def build_log_processor(self, log_processor: Any) -> Any:
        """Build the log processor."""
        with building(self.cfg, "log_processor"):
            return super().build_log_processor(log_processor)

    def register_hook(self, hook: Any, priority: Any = None) -> None:
        """Register a hook. If it is a config, build it first."""
        with building(self.cfg, "default_hooks", "custom_hooks"), build_step(_type_of(hook)):
            super().register_hook(hook, priority)

    def register_default_hooks(self, hooks: dict | None = None) -> None:
        """Register mmengine's default hooks, this package's, and those of the config."""
        merged = {**copy.deepcopy(_DEFAULT_HOOKS), **(hooks or {})}
        # None removes any default hook. mmengine does that for its own hooks only.
        ours = {name: hook for name, hook in merged.items() if hook is not None or name in _MMENGINE_HOOKS}
        super().register_default_hooks(ours)

    def train(self) -> nn.Module:
        """Train the model and return it. Training continues from a checkpoint if there is one to resume."""
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

    def _train(self) -> nn.Module:
        self._find_checkpoint_to_resume()
        # A process trains on one device, so that a separate thread for the backward pass gains nothing. Waking that
        # thread costs time: a step that is bound by kernel launches is about 5 % shorter without it.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                model = super().train()
            except Exception:
                self._check_losses()
                raise
        self._report_graphs()
        return model

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
        """Let the model run with CUDA graphs inside the block if the config asks for them."""
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
        return self._announcing_the_end(functools.partial(self._evaluate, super().val))

    def test(self) -> dict:
        """Test and return the metrics."""
        return self._announcing_the_end(functools.partial(self._evaluate, super().test))

    def _evaluate(self, stage: Callable[[], dict]) -> dict:
        with self.graphs_installed(), weights_cast_once():
            metrics = stage()
        self._report_graphs()
        return metrics

    def _announcing_the_end(self, stage: Any) -> Any:
        """Run a stage, and call the ``on_exit`` of the hooks even if it fails. Hooks release the terminal there."""
        with self._logging_fatal_errors():
            try:
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

    def _find_checkpoint_to_resume(self) -> None:
        """Find the checkpoint to resume.

        The run takes over the seed of the checkpoint, on which the data order depends, unless the config sets a seed.
        """
        if not self._resume:
            return
        found, remarks = decided_by_the_main_process(
            lambda: checkpoint_to_resume(
                self._resume, self._load_from, self.work_dir, self._trusts_checkpoints
            )
        )
        for remark in remarks if self.rank == 0 else ():
            self.logger.warning(f"a newer checkpoint is passed over: {remark}")
        self._resume = found is not None
        if found is None:
            start = f"the weights of {self._load_from}" if self._load_from else "scratch"
            say(f"resume: {self.work_dir} has no checkpoint that can be resumed; the run starts from {start}")
            return
        self._load_from = found
        checkpoint = read_on_every_process(found, self._trusts_checkpoints)
        lacking = [key for key in ("optimizer", "message_hub", "meta") if key not in checkpoint]
        if lacking:
            raise CheckpointError(
                f"checkpoint {self._load_from} cannot be resumed: it has no {', '.join(lacking)}. To start training "
                f"from its weights, drop --resume and use --cfg-options load_from={self._load_from}"
            )
        self._checkpoint = (self._load_from, checkpoint)
        seed = checkpoint["meta"].get("seed")
        if seed is not None and self._randomness_cfg.get("seed") is None:
            self._randomness_cfg["seed"] = seed
            self.set_randomness(**self._randomness_cfg)

    @property
    def _trusts_checkpoints(self) -> bool:
        return bool(self.cfg.get("trust_checkpoint", False))

    def load_checkpoint(
        self,
        filename: str,
        map_location: Any = "cpu",
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = ((r"^module\.", ""),),
    ) -> dict:
        """Load the weights of a checkpoint into the model and return the checkpoint.

        Args:
            filename: a file or an http(s) address.
            map_location: This has no effect and is accepted because mmengine passes it. Tensors are read to the CPU.
            strict: whether to refuse weights that do not fit. The default is True for a run that is resumed, and the
                config's ``strict_load`` for any other run.
            revise_keys: pairs of a regular expression and its replacement, which are applied to the keys in turn.

        Raises:
            CheckpointError: the file is missing or damaged, or its weights are refused (see :func:`load_weights`).
        """
        cached, self._checkpoint = self._checkpoint, None
        if cached is not None and cached[0] == filename:
            checkpoint = cached[1]
        else:
            checkpoint = read_checkpoint(filename, trust=self._trusts_checkpoints)
        if strict is None:
            strict = self._resume or self.cfg.get("strict_load", True)
        checkpoint = {**checkpoint, "state_dict": weights_of(checkpoint, filename)}
        if "message_hub" in checkpoint:
            checkpoint["message_hub"] = restore_message_hub(checkpoint["message_hub"])
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        model = self.model.module if is_model_wrapper(self.model) else self.model
        load_weights(model, checkpoint["state_dict"], filename, strict, revise_keys)
        self._has_loaded = True
        self.logger.info(f"weights loaded from {filename}")
        return checkpoint

    def resume(
        self,
        filename: str,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Any = "cpu",
    ) -> None:
        """Load the weights, the optimizer, the schedules, the counters, the random state and the temporal state.

        Args:
            filename: the checkpoint, a file or an http(s) address.
            resume_optimizer: whether to load the state of the optimizer.
            resume_param_scheduler: whether to load the states of the schedules.
            map_location: the device that mmengine passes on to :meth:`load_checkpoint`, where it has no effect.

        Raises:
            CheckpointError: the file is missing or damaged, or its weights do not fit the model.
        """
        if self._checkpoint is None:
            self._checkpoint = (filename, read_checkpoint(filename, trust=self._trusts_checkpoints))
        meta = self._checkpoint[1]["meta"]
        states = meta.pop("random_states", None)
        if states is not None and len(states) == self.world_size:
            self._random_state = states[self.rank]
        elif states is not None:
            self.logger.warning(
                f"{filename} comes from a run with {len(states)} processes, but this run has {self.world_size}. Its "
                "data order and random numbers differ from those of the earlier run"
            )
        remembered = meta.pop("temporal_states", None)
        if remembered is not None:
            restore_temporal_state(self.model, remembered, self.rank, self.world_size)
        # mmengine compares the pickles of the two, which can differ although the objects are equal. The pickles of one
        # object are the same.
        dataset_meta = getattr(self.train_dataloader.dataset, "metainfo", None)
        if to_plain(dataset_meta) == to_plain(meta.get("dataset_meta")):
            meta["dataset_meta"] = dataset_meta
        super().resume(filename, resume_optimizer, resume_param_scheduler, map_location)

    def restore_random_state(self) -> None:
        """Set the random state that the resumed checkpoint holds. Later calls, and those of a new run, do nothing."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    @master_only
    def save_checkpoint(
        self,
        out_dir: str,
        filename: str,
        file_client_args: dict | None = None,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        meta: dict | None = None,
        by_epoch: bool = True,
        backend_args: dict | None = None,
    ) -> None:
        """Write a checkpoint in mmengine's layout.

        :meth:`mmengine.runner.Runner.save_checkpoint` describes the arguments. ``meta`` may replace 'epoch' and
        'iter', which otherwise are the counts after the current step. After a crash, a local file is either the old
        one or the complete new one. If ``out_dir`` is not a local folder, mmengine writes the checkpoint.
        """
        for hook in self.hooks:
            if isinstance(hook, RuntimeInfoHook):
                hook.write(self)
        backend = get_file_backend(out_dir, backend_args=backend_args)
        if file_client_args is not None or not isinstance(backend, LocalBackend):
            super().save_checkpoint(
                out_dir,
                filename,
                file_client_args,
                save_optimizer,
                save_param_scheduler,
                meta,
                by_epoch,
                backend_args,
            )
            return
        model = self.model.module if is_model_wrapper(self.model) else self.model
        checkpoint = {
            "meta": {
                "epoch": self.epoch + int(by_epoch),
                "iter": self.iter + int(not by_epoch),
                **(meta or {}),
                "cfg": self.cfg.pretty_text,
                "seed": self.seed,
                "experiment_name": self.experiment_name,
                "time": time.strftime("%Y%m%d_%H%M%S"),
                "mmengine_version": mmengine.__version__,
                "dataset_meta": getattr(self.train_dataloader.dataset, "metainfo", None),
            },
            "state_dict": weights_to_cpu(model.state_dict()),
            "message_hub": self.message_hub.state_dict(),
        }
        if save_optimizer:
            checkpoint["optimizer"] = self.optim_wrapper.state_dict()
        if save_param_scheduler and self.param_schedulers is not None:
            checkpoint["param_schedulers"] = _states(self.param_schedulers)
        self.call_hook("before_save_checkpoint", checkpoint=checkpoint)
        write_checkpoint(checkpoint, os.path.join(out_dir, filename))


def _type_of(hook: Any) -> str:
    kind = hook.get("type", "a hook") if isinstance(hook, dict) else type(hook)
    return kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__


def _states(schedulers: list | dict) -> list | dict:
    """Return the states of schedulers, which are given as a list or as a dict of lists by the names of optimizers."""
    if isinstance(schedulers, dict):
        return {name: _states(of_one_optimizer) for name, of_one_optimizer in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]

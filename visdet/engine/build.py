"""The parts of a run, each built from its section of the config."""

import logging
import os
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import broadcast, master_only
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import convert_sync_batchnorm, is_model_wrapper, revert_sync_batchnorm
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval
from mmengine.optim import OptimWrapperDict, _ParamScheduler
from mmengine.runner import EpochBasedTrainLoop as ByEpoch
from mmengine.runner import IterBasedTrainLoop as ByIteration
from mmengine.runner import LogProcessor, Runner, TestLoop, ValLoop, get_priority
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmengine.visualization import Visualizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from visdet.errors import ConfigError, MissingFileError, build_step
from visdet.files.writing import written_whole
from visdet.registry import (
    EVALUATOR,
    HOOKS,
    LOG_PROCESSORS,
    LOOPS,
    METRICS,
    MODEL_WRAPPERS,
    PARAM_SCHEDULERS,
    VISUALIZERS,
    built,
)

from .config.build_errors import build_model, building
from .config.checks import section_of, several_of
from .config.text import values_without_code
from .data.loaders import check_evaluation_data, check_training_data
from .loops import EpochBasedTrainLoop, EvaluationLoop, IterBasedTrainLoop, TrainLoop
from .monitored_metrics import check_metrics_are_apart, check_monitored
from .optim.gradients import parameters_in
from .optim.optim_wrapper import OptimWrapper
from .optim.options import check_custom_keys, paramwise_cfg
from .optim.wrappers import unwrapped
from .process.console import ConsoleHandler, warn
from .process.distributed import start_process_group
from .process.environment import environment

# The first six are mmengine's. The default_hooks of a config change a hook under its key, or remove it by None.
_DEFAULT_HOOKS = {
    "runtime_info": "RuntimeInfoHook",
    "timer": "IterTimerHook",
    "sampler_seed": "DistSamplerSeedHook",
    "logger": "LoggerHook",
    "param_scheduler": "ParamSchedulerHook",
    "checkpoint": "CheckpointHook",
    "num_class_check": "NumClassCheckHook",
    "invalid_loss": "CheckInvalidLossHook",
    "progress": "ProgressHook",
    "report": "RunReportHook",
}


def enter_environment(env_cfg: dict, launcher: str) -> str:
    """Join the process group, set up the process by ``env_cfg``, and return the time at which the run begins.

    Without a ``dist_cfg``, mmengine takes NCCL on GPUs.

    Raises:
        ConfigError: a value of ``env_cfg`` cannot be used.
    """
    is_one_of_several = launcher != "none"
    start_process_group(launcher, env_cfg.get("dist_cfg", {}).get("timeout"))
    if is_one_of_several:  # mmengine sets these, too, but every process warns about it.
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")
    run: Any = SimpleNamespace(launcher=launcher, distributed=is_one_of_several)
    try:
        Runner.setup_env(run, env_cfg)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"env_cfg cannot be used: {error}") from error
    return run._timestamp


def build_logger(name: str, log_file: str, level: int | str) -> MMLogger:
    """Return the logger of a run. Its file gets every message, and the terminal gets warnings and errors only."""
    try:
        logger = MMLogger.get_instance(name, log_level=level, log_file=log_file, file_mode="a")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"log_level must be a level of logging, such as 'INFO', got {level!r}") from error
    files = [handler for handler in logger.handlers if type(handler) is not logging.StreamHandler]
    logger.handlers[:] = [*files, ConsoleHandler()]
    return logger


def log_environment(runner: Any, env_cfg: dict) -> None:
    """Write the environment, the settings and the config to the log."""
    settings = {**env_cfg, **runner.randomness, "seed": runner.seed, "launcher": runner.launcher}
    settings["processes"] = runner.world_size
    log = runner.logger.info
    for title, facts in (("System environment", environment()), ("Runtime environment", settings)):
        lines = "".join(f"\n    {name}: {fact}" for name, fact in facts.items())
        log(f"{title}:{lines}")
    log(f"Config:\n{runner.cfg.pretty_text}")


@master_only
def write_config(runner: Any) -> None:
    """Write the config to the work_dir, and warn of values that the copy cannot have."""
    cfg = runner.cfg
    name = Path(cfg.filename or f"{runner.timestamp}.py").name
    with written_whole(Path(runner.work_dir, name)) as partial:
        cfg.dump(partial)
    if lost := values_without_code(cfg.to_dict()):
        runner.logger.warning(
            f"the copy of the config in the work_dir has a description in place of {', '.join(lost)}, which cannot be "
            f"written as code. Keep {cfg.filename}"
        )


def build_log_processor(cfg: Config) -> LogProcessor:
    """Return what makes the lines of the log."""
    with building(cfg, "log_processor"):
        return LOG_PROCESSORS.build({"type": "LogProcessor", **section_of(cfg, "log_processor")})


def build_visualizer(cfg: Config, folder: str) -> Visualizer:
    """Return the visualizer. Its name is the run's folder, because mmengine keeps one visualizer per name."""
    given = cfg.get("visualizer") or {"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]}
    if isinstance(given, Visualizer):
        return given
    with building(cfg, "visualizer"):
        return VISUALIZERS.build({"save_dir": folder, **given, "name": folder})


def model_of(cfg: Config) -> nn.Module:
    """Return the model of a config, with the ``data_preprocessor`` of the config unless it has one itself."""
    model = cfg.model
    data_preprocessor = cfg.get("data_preprocessor")
    if isinstance(model, nn.Module):
        return model
    if data_preprocessor is not None:
        model.setdefault("data_preprocessor", data_preprocessor)
    return build_model(cfg, model)


def wrap_model(cfg: Config, model: nn.Module, is_one_of_several: bool) -> nn.Module:
    """Return a model on its device, wrapped if it is trained by several processes, on GPUs or on CPUs."""
    if is_model_wrapper(model):
        return model
    model = model.to(get_device())
    given = cfg.get
    if not is_one_of_several:
        return revert_sync_batchnorm(model)
    if implementation := given("sync_bn"):
        model = convert_sync_batchnorm(model, implementation)
    options = given("model_wrapper_cfg") or {
        "broadcast_buffers": False,  # Each process keeps batch statistics of its own.
        "find_unused_parameters": given("find_unused_parameters", False),
    }
    wrapper = {"type": "MMDistributedDataParallel", **options}
    if issubclass(MODEL_WRAPPERS.get(wrapper["type"]), DistributedDataParallel):
        gpus = [int(os.environ["LOCAL_RANK"])] if torch.cuda.is_available() else None
        wrapper.setdefault("device_ids", gpus)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return MODEL_WRAPPERS.build(wrapper, default_args={"module": model})


def build_schedules(cfg: Config, optim_wrapper: Any, loop: TrainLoop) -> list[_ParamScheduler]:
    """Return the schedules of a run. A schedule without an end ends with training.

    A warning says which milestones the run does not reach.
    """
    schedules = []
    defaults = {"optimizer": optim_wrapper, "epoch_length": len(loop.dataloader)}
    with building(cfg, "param_scheduler"):
        for schedule in several_of(cfg, "param_scheduler"):
            if isinstance(schedule, dict):
                end = loop.max_epochs if schedule.get("by_epoch", True) else loop.max_iters
                end = max(end, schedule.get("begin", 0) + 1)  # A run may be shortened for a trial.
                schedule = PARAM_SCHEDULERS.build({"end": end, **schedule}, default_args=defaults)
            schedules.append(schedule)
            last = loop.max_epochs if schedule.by_epoch else loop.max_iters
            late = [step for step in getattr(schedule, "milestones", ()) if step >= last]
            if late:
                warn(
                    f"param_scheduler: {type(schedule).__name__} never comes to its milestones {late}, because the "
                    f"run ends at {last}"
                )
    return schedules


def check_before_data(runner: Any, *stages: str) -> None:
    """Find mistakes in the config of the stages before data are read, and build what needs no data.

    Args:
        runner: the runner, which gets the metrics and the optimizer.
        stages: 'train', 'val' or 'test'.
    """
    cfg = runner.cfg
    for stage in stages:
        if stage != "train" and cfg.get(f"{stage}_evaluator") is not None:
            with suppress(MissingFileError):  # The data set may be drawn later, or the loop says so.
                runner.evaluators[stage] = build_evaluator(cfg, stage)
    if "train" in stages:
        with building(cfg, "optim_wrapper"):
            given = cfg.optim_wrapper
            is_of_mmengine = isinstance(given, dict) and "constructor" not in given
            custom_keys = paramwise_cfg(**section_of(given, "paramwise_cfg")) if is_of_mmengine else {}
            runner.optim_wrapper = optim_wrapper = runner.build_optim_wrapper(given)
            if isinstance(optim_wrapper, OptimWrapperDict):
                raise ConfigError(
                    "optim_wrapper must be that of one optimizer, which may have groups of parameters"
                )
            _check_parameters(optim_wrapper, runner.model)
            check_custom_keys(custom_keys, unwrapped(runner.model), optim_wrapper.optimizer)
        check_monitored(runner)


def _check_parameters(optim_wrapper: Any, model: nn.Module) -> None:
    """Refuse an optimizer that the config gives as an object and that trains other parameters than the model's."""
    if not set(model.parameters()).issuperset(parameters_in(optim_wrapper.optimizer.param_groups)):
        raise ConfigError(
            "optim_wrapper is an object whose optimizer has parameters that the model does not have. Give the model as "
            "an object, too, or the optimizer as a dict"
        )


def let_updates_average(optim_wrapper: Any, model: nn.Module) -> None:
    """Let the updates average the gradients of the processes, instead of the model's wrapper."""
    if isinstance(optim_wrapper, OptimWrapper) and isinstance(model, DistributedDataParallel):
        optim_wrapper.averages_gradients = not (model.find_unused_parameters or model.static_graph)


def scale_learning_rate(runner: Any, optim_wrapper: Any, options: dict) -> None:
    """Multiply the learning rates by the images of an update over those for which they are, if this is enabled.

    An update has the batches of all processes and of all iterations whose gradients are accumulated.
    """
    if not options.get("enable"):
        return
    images = runner.world_size * runner.train_dataloader.batch_sampler.batch_size
    ratio = images * optim_wrapper._accumulative_counts / options["base_batch_size"]
    for group in optim_wrapper.optimizer.param_groups:
        group["lr"] *= ratio
    runner.logger.info(f"the learning rate is multiplied by {ratio}, as auto_scale_lr says")


def initialize_weights(cfg: Config, model: Any) -> None:
    """Initialise the weights, alike in all processes, and switch on what the config says of parts of the model."""
    if hasattr(model, "init_weights"):
        model.init_weights()
        for tensor in model.state_dict().values():
            broadcast(tensor)
    switches = {
        "activation_checkpointing": turn_on_activation_checkpointing,
        "efficient_conv_bn_eval": turn_on_efficient_conv_bn_eval,
    }
    for key, switch_on in switches.items():
        parts = cfg.get(key)
        if parts is not None:
            with building(cfg, key):
                switch_on(model, parts)


def compile_step(cfg: Config, steps: Any) -> None:
    """Compile the training step if the config says so."""
    if options := cfg.get("compile"):
        with building(cfg, "compile"):
            steps.train_step = torch.compile(steps.train_step, **({} if options is True else options))


def build_train_loop(runner: Any) -> TrainLoop:
    """Return the training loop with its data.

    Raises:
        ConfigError: ``train_cfg`` names a loop of one's own, or the data cannot be trained on.
    """
    cfg = runner.cfg
    given = dict(cfg.train_cfg)
    name = "EpochBasedTrainLoop" if given.pop("by_epoch", True) else "IterBasedTrainLoop"
    kinds = {ByEpoch: EpochBasedTrainLoop, ByIteration: IterBasedTrainLoop}
    kind = _loop_class("train_cfg", given.pop("type", name), kinds)
    with building(cfg, "train_cfg", "train_dataloader"):
        loop = kind(runner, runner.build_dataloader(cfg.train_dataloader), **given)
        check_training_data(loop.dataloader, loop.by_epoch)
        return loop


def build_evaluation_loop(runner: Any, stage: str) -> EvaluationLoop:
    """Return the loop of validation or of a test with its data and its metrics.

    Args:
        runner: the runner. stage: 'val' or 'test'.
    """
    config, loader, evaluator = (f"{stage}_{part}" for part in ("cfg", "dataloader", "evaluator"))
    cfg = runner.cfg
    given = dict(cfg[config])
    kinds = {ValLoop: EvaluationLoop, TestLoop: EvaluationLoop}
    kind = _loop_class(config, given.pop("type", f"{stage.title()}Loop"), kinds)
    with building(cfg, config, loader, evaluator):
        data = runner.build_dataloader(cfg[loader])
        metrics = runner.evaluators.get(stage) or build_evaluator(cfg, stage)
        check_evaluation_data(data, loader)
        check_metrics_are_apart(metrics.metrics, evaluator)
        return kind(runner, data, metrics, **given)


def _loop_class(section: str, name: Any, kinds: dict[Any, Any]) -> Any:
    """Return the class for a loop of mmengine, of which the order of a run stands in :class:`DetRunner`."""
    kind = kinds.get(LOOPS.get(name))
    if kind is None:
        raise ConfigError(
            f"{section}.type must be {' or '.join(repr(known.__name__) for known in kinds)}, got {name!r}. A loop of "
            "your own needs runner_type='mmengine.Runner'. Often, a hook does what it adds"
        )
    return kind


def build_evaluator(cfg: Config, stage: str) -> Evaluator:
    """Return the metrics of a stage, which is 'val' or 'test'."""
    section = f"{stage}_evaluator"
    given = cfg[section]
    if isinstance(given, Evaluator):
        return given
    with building(cfg, section):
        if isinstance(given, dict) and "metrics" in given:
            return EVALUATOR.build({"type": "Evaluator", **given})
        # visdet's registry compares the arguments with their types, which mmengine's evaluator does not.
        return Evaluator([built(metric, METRICS) for metric in several_of(cfg, section)])


def build_hooks(cfg: Config) -> list[Hook]:
    """Return the default hooks of mmengine, of this package and of the config, and then the custom ones."""
    by_default = {key: {"type": name} for key, name in _DEFAULT_HOOKS.items()}
    by_key = {**by_default, **section_of(cfg, "default_hooks")}
    given = [*by_key.values(), *several_of(cfg, "custom_hooks")]
    return [build_hook(cfg, hook) for hook in given if hook is not None]


def build_hook(cfg: Config, hook: Hook | dict) -> Hook:
    """Return a hook by its config, which may have a ``priority``."""
    if isinstance(hook, Hook):
        return hook
    options = dict(hook)
    priority = options.pop("priority", None)
    with building(cfg, "default_hooks", "custom_hooks"):
        made = HOOKS.build(options)
        if priority is not None:
            with build_step(type(made).__name__):
                get_priority(priority)
            made.priority = priority
        return made

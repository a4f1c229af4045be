"""Training, validating and testing a model by a config: the order of a run, from its parts to its end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import get_dist_info
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.registry import DefaultScope
from mmengine.runner import get_priority, set_random_seed
from torch import nn
from torch.utils.data import DataLoader

from visdet.errors import ConfigError
from visdet.registry import RUNNERS, mmengine_unlocked

from . import build
from .advice import advice_for_training
from .checkpoints.checkpoint import register_checkpoint_readers
from .checkpoints.run_state import is_kept
from .checkpoints.schedules import recipe_of
from .config.build_errors import building
from .config.checks import section_of
from .config.load import complete_config
from .config.run_config import RunConfig
from .data.data_workers import worker_failures_explained
from .data.loaders import build_dataloader
from .errors import log_fatal_error
from .graphs.methods import graphs_for, replay_average, share_gradients
from .graphs.planned import prepare_sizes
from .late_numbers import LateNumbers
from .loops import EvaluationLoop, TrainLoop, stop_workers
from .optim.wrappers import unwrapped
from .process.compilations import compilations_told
from .process.garbage import living_objects_not_collected
from .process.interrupts import Interrupted, NotedSignal, signals_noted
from .process.places import only_training_in
from .process.random_state import preserved_random_state, set_random_state
from .process.threads import one_thread_beside_a_gpu
from .run_checkpoints import RunCheckpoints
from .stages import StagedModel

_VALIDATED = "validated_at_iter"


@RUNNERS.register_module()
class DetRunner(RunCheckpoints):
    """Trains and tests a model by a config, and calls mmengine's hooks.

    Hooks see what they see of mmengine's own Runner: their methods are called in the same order, and attributes have
    the same names. They can call ``build_dataloader``, ``build_evaluator``, ``build_optim_wrapper``,
    ``build_param_scheduler``, ``scale_lr``, ``register_hook``, ``register_hooks``, ``load_or_resume``,
    ``load_checkpoint``, ``save_checkpoint`` and ``call_hook``. The other methods of that runner are not here.

    * Checkpoints hold tensors and plain types. A crash leaves no incomplete checkpoint. Reading a checkpoint runs no
      code from the file, unless the config says ``trust_checkpoint=True``.
    * A resumed run continues with the seed, the data order and the random state of the earlier run, in its data
      workers, too. What its config has changed, such as the length or the learning rate, goes on as if it had been so
      from the start. If the newest checkpoint is damaged, the run resumes from the one before it. ``resume`` is 'auto',
      a path, or True as in mmengine. A validation that was due when the run was killed is made up for.
    * ``load_from`` refuses weights that do not fit, unless the config says ``strict_load=False``. Weights with NaN
      or infinite numbers are refused, unless it says ``allow_nonfinite_weights=True``.
    * ``launcher='pytorch'`` works on machines without GPUs, where it uses gloo.
    * Validation does not change the random state.
    * At Ctrl-C, SIGTERM, SIGHUP and SIGUSR1, the run ends after the iteration and saves a checkpoint, from which it
      goes on as if it had not been interrupted. Another signal, five seconds later, ends it at once.
    * On a GPU, training steps and predictions are replayed as CUDA graphs, unless the config says ``graph=False``; see
      :class:`GraphedLoss` and :class:`GraphedPrediction`.
    * The terminal shows warnings, progress and results. The environment, the config and every log line go to the log
      file.

    Args:
        cfg: the config, which is not changed. :func:`complete_config` completes a copy.

    Attributes:
        cfg, model, optim_wrapper, param_schedulers, hooks, logger, message_hub, visualizer, log_processor: the parts.
        train_loop, val_loop, test_loop: the data, the length and the metrics of each stage, built when they are first
            read. ``val_loop`` is None if nothing is validated.
        evaluators: the metrics that were built before the data, by 'val' and 'test'.
        metrics: the values of the newest evaluation by name.
        resumed_from: the checkpoint that training continues from, or None.
        load_from: the checkpoint whose weights the run starts with, or None.
    """

    # ------------------------------------------------------------------ the parts that need no data

    def __init__(self, cfg: Config) -> None:
        with self._logging_fatal_errors(), mmengine_unlocked():
            self._build(cfg)

    @classmethod
    def from_cfg(cls, cfg: Config) -> "DetRunner":
        """Return the runner of a config."""
        return cls(cfg)

    def _build(self, cfg: Config) -> None:
        self.cfg = cfg = RunConfig.copy_of(cfg)
        complete_config(cfg)
        given = cfg.get
        self.work_dir = os.path.abspath(cfg.work_dir)
        self.launcher = launcher = given("launcher", "none")
        self.distributed = launcher != "none"
        self.load_from: str | None = given("load_from")
        self.resumed_from: str | None = None
        self.trusts_checkpoints = trusts = given("trust_checkpoint", False)
        self.allows_nonfinite = allows_nonfinite = given("allow_nonfinite_weights", False)
        register_checkpoint_readers(trusts, allows_nonfinite)
        env_cfg = section_of(cfg, "env_cfg")
        self.timestamp = time = build.enter_environment(env_cfg, launcher)
        self.rank, self.world_size = get_dist_info()
        self._seed_with(dict(section_of(cfg, "randomness")))
        given_name = given("experiment_name") or Path(cfg.filename or "").stem
        self.experiment_name = name = f"{given_name}_{time}".lstrip("_")
        self.log_dir = self._log_dir = folder = f"{self.work_dir}/{time}"
        os.makedirs(folder, exist_ok=True)
        self.default_scope = DefaultScope.get_instance(name, scope_name=cfg.default_scope)
        self.log_processor = build.build_log_processor(cfg)
        self.logger = build.build_logger(name, f"{folder}/{time}.log", given("log_level", "INFO"))
        build.log_environment(self, env_cfg)
        self.message_hub = MessageHub.get_instance(name)
        self.visualizer = build.build_visualizer(cfg, folder)
        self.visualizer.add_config(cfg)
        self.model: Any = build.wrap_model(cfg, build.model_of(cfg), self.distributed)
        self.model_name = type(unwrapped(self.model)).__name__
        self.optim_wrapper: Any = None
        self.param_schedulers: Any = None
        self.evaluators: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.has_loaded = False
        self._signal = NotedSignal()
        self.late_numbers = LateNumbers()
        self.recipe: dict[str, Any] = {}
        self.hooks: list[Hook] = []
        self._calls: list[_Call] = []
        for hook in build.build_hooks(cfg):
            self.register_hook(hook)
        self.logger.info(f"Hooks will be executed in the following order:\n{self.get_hooks_info()}")
        build.write_config(self)

    def _seed_with(self, randomness: dict[str, Any]) -> None:
        """Seed all generators. Without a seed, a deterministic run takes 0; else the main process draws one for all."""
        seed = randomness.get("seed")
        is_deterministic = bool(randomness.get("deterministic"))
        self.randomness = randomness
        self.deterministic = is_deterministic
        if is_deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Without it, torch refuses cuBLAS.
            # torch would fill each new tensor, in case that something reads it before it is written.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            seed = seed or 0
        self.seed = set_random_seed(**{**randomness, "seed": seed})

    # ------------------------------------------------------------------ the stages, each with its data

    @cached_property
    def train_loop(self) -> TrainLoop:
        self._train_loop = loop = build.build_train_loop(self)
        self.visualizer.dataset_meta = getattr(loop.dataloader.dataset, "metainfo", None)
        return loop

    @cached_property
    def val_loop(self) -> EvaluationLoop | None:
        self._val_loop = loop = self._evaluation_loop("val")
        return loop

    @cached_property
    def test_loop(self) -> EvaluationLoop | None:
        self._test_loop = loop = self._evaluation_loop("test")
        return loop

    def _evaluation_loop(self, stage: str) -> EvaluationLoop | None:
        if self.cfg.get(f"{stage}_cfg") is None:
            return None
        loop = build.build_evaluation_loop(self, stage)
        self.visualizer.dataset_meta = loop.evaluator.dataset_meta
        return loop

    def build_dataloader(self, dataloader: DataLoader | dict) -> DataLoader:
        """Return a loader by its config."""
        return build_dataloader(dataloader, self.seed, self.randomness.get("diff_rank_seed", False))

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: dict | None = None) -> None:
        """Multiply the learning rates by the images of an update over those for which they are, if this is enabled."""
        build.scale_learning_rate(self, optim_wrapper, auto_scale_lr or {})

    # ------------------------------------------------------------------ training

    def train(self) -> nn.Module:
        """Train the model and return it. Training continues from a checkpoint if there is one to resume."""
        lock = only_training_in(self.work_dir) if self.rank == 0 else nullcontext()
        # A process trains on one device, so that a separate thread for the backward pass would only take time.
        with advice_for_training(self), lock, self._stage(), torch.autograd.set_multithreading_enabled(False):
            try:
                self._train()
            except Exception:
                # A loss that is not finite, and not checked yet, may have caused the error, and is easier understood.
                self.late_numbers.read()
                raise
        return self.model

    def _train(self) -> None:
        cfg = self.cfg
        call_hook = self.call_hook
        given = cfg.get
        if given("train_cfg") is None:
            raise ConfigError(
                "the config has no train_cfg, train_dataloader and optim_wrapper, which training needs"
            )
        found = self._find_checkpoint()
        build.check_before_data(self, "train", "val")
        optim_wrapper = self.optim_wrapper
        loop = self.train_loop
        by_epoch = loop.by_epoch
        _ = self.val_loop  # Both read the data.
        self.scale_lr(optim_wrapper, given("auto_scale_lr"))
        self.param_schedulers = schedules = build.build_schedules(cfg, optim_wrapper, loop)
        self.recipe = recipe_of(optim_wrapper.optimizer, schedules)
        self.late_numbers = LateNumbers()
        call_hook("before_run")
        model = self.model  # A hook may replace both.
        optim_wrapper = self.optim_wrapper
        build.initialize_weights(cfg, unwrapped(model))
        random_state = self._start_from(found)
        optim_wrapper.initialize_count_status(model, loop.iter, loop.max_iters)
        build.let_updates_average(optim_wrapper, model)
        graphs = self.graphs
        steps = self.steps
        share_gradients(graphs, optim_wrapper)
        replay_average(graphs, self.hooks)
        build.compile_step(cfg, steps)
        call_hook("before_train")
        if not by_epoch:  # The whole training counts as one epoch.
            call_hook("before_train_epoch")
        if random_state is not None:
            set_random_state(random_state)
        if self._must_catch_up(loop):
            self._validate()
        is_compiled = bool(given("compile"))
        with living_objects_not_collected(), compilations_told(is_compiled), signals_noted() as self._signal:
            model.train()
            prepare_sizes(unwrapped(model), optim_wrapper, loop.dataloader, graphs.get("loss"), self.logger)
            if by_epoch:
                self._train_by_epochs(loop)
            else:
                self._train_by_iterations(loop)
        self.late_numbers.read()
        if not by_epoch:
            call_hook("after_train_epoch")
        call_hook("after_train")
        call_hook("after_run")

    def _train_by_epochs(self, loop: TrainLoop) -> None:
        while not loop.is_finished():
            self.call_hook("before_train_epoch")
            self.model.train()
            # A checkpoint of an epoch's last iteration was saved before the hooks at the end of the epoch ran. A run
            # that resumes from it has only those hooks left to run.
            loader = loop.dataloader
            iteration = loop.iter
            length = len(loader)
            done = iteration - loop.epoch * length
            start = done if 0 < done <= length else 0
            loader.batch_sampler.start_at(self.seed, iteration, skipped=start)
            for index, batch in enumerate(loader if start < length else (), start):
                self._train_step(index, batch)
            self.call_hook("after_train_epoch")
            loop.epoch += 1
            if loop.is_validation_due():
                self._validate()

    def _train_by_iterations(self, loop: TrainLoop) -> None:
        loader = loop.dataloader
        done = loop.iter
        loader.batch_sampler.start_at(self.seed, done, skipped=done + loop.batches_ahead)
        loop.dataloader_iterator = iter(loader)
        while not loop.is_finished():
            self._train_step(loop.iter, next(loop.dataloader_iterator))
            if loop.is_validation_due():
                self._validate()
                self.model.train()  # Not in each iteration: it takes the host 2 ms.

    def _train_step(self, index: int, batch: Any) -> None:
        loop = self.train_loop
        numbers = self.late_numbers
        signal = self._signal
        self.call_hook("before_train_iter", batch_idx=index, data_batch=batch)
        device = next(self.model.parameters()).device
        with one_thread_beside_a_gpu(device):
            losses = self.steps.train_step(batch, self.optim_wrapper)
        numbers.take(loop.iter + 1, losses or {}, device, signal.number)
        self.call_hook("after_train_iter", batch_idx=index, data_batch=batch, outputs=losses)
        if number := signal.number if self.world_size == 1 else numbers.signal:
            self._save_interrupted()
            raise Interrupted(number)
        loop.iter += 1

    # ------------------------------------------------------------------ validation and tests

    def val(self) -> dict[str, float]:
        """Validate and return the metrics."""
        return self._evaluate("val")

    def test(self) -> dict[str, float]:
        """Test and return the metrics."""
        return self._evaluate("test")

    def _evaluate(self, stage: str) -> dict[str, float]:
        with self._stage():
            build.check_before_data(self, stage)
            loop = getattr(self, f"{stage}_loop")
            if loop is None:
                raise ConfigError(f"the config has no {stage}_dataloader, {stage}_cfg and {stage}_evaluator")
            self.call_hook("before_run")
            self.load_or_resume()
            metrics = self._run_evaluation(stage, loop)
            self.call_hook("after_run")
        return metrics

    def _must_catch_up(self, loop: TrainLoop) -> bool:
        """Return whether a run was finished, or killed between its checkpoint and the validation that was due."""
        if loop.is_finished():
            return True
        is_inside_an_epoch = loop.by_epoch and loop.iter != loop.epoch * len(loop.dataloader)
        is_due = not is_inside_an_epoch and loop.progress()[0] > 0 and loop.is_validation_due()
        return is_due and self.message_hub.get_info(_VALIDATED) != loop.iter

    def _validate(self) -> None:
        """Validate within training, whose random state stays as it is."""
        loop = self.val_loop
        signal = self._signal
        done = self.iter
        if loop is not None:
            # This is noted before, because a hook may write a checkpoint as soon as it knows the metrics.
            self.message_hub.update_info(_VALIDATED, done)
            # A run that goes on from a checkpoint of this iteration makes up for the validation.
            signal.at_once = may_end = self._saved_at == done
            if may_end and signal.number:
                raise Interrupted(signal.number)
            with preserved_random_state():
                self._run_evaluation("val", loop)
            signal.at_once = False

    def _run_evaluation(self, stage: str, loop: EvaluationLoop) -> dict[str, float]:
        """Return the metrics of a stage, which is 'val' or 'test'."""
        call_hook = self.call_hook
        self.late_numbers.read()  # Damaged weights are not validated.
        call_hook(f"before_{stage}")
        call_hook(f"before_{stage}_epoch")
        model = self.model  # A hook may replace it, as the one for augmented tests does.
        model.eval()
        device = next(model.parameters()).device.type
        steps = StagedModel(model, self.graphs)  # An evaluation begins without memory.
        for index, batch in enumerate(loop.dataloader):
            with torch.no_grad():
                call_hook(f"before_{stage}_iter", batch_idx=index, data_batch=batch)
                with torch.autocast(device, torch.bfloat16, enabled=loop.fp16):
                    outputs = steps.test_step(batch, f"{stage}_step")
                loop.process(batch, outputs)
                call_hook(f"after_{stage}_iter", batch_idx=index, data_batch=batch, outputs=outputs)
        self.metrics = metrics = loop.evaluate()
        call_hook(f"after_{stage}_epoch", metrics=metrics)
        call_hook(f"after_{stage}")
        return metrics

    # ------------------------------------------------------------------ hooks

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the method of this name of every hook that has one."""
        # Some find a value of the config only when a run begins.
        begins = fn_name in ("before_run", "before_train")
        call = _Call(fn_name, kwargs, list(self.hooks))
        self._calls.append(call)
        try:
            sections = ("default_hooks", "custom_hooks")
            with building(self.cfg, *sections, messages_name_it=True) if begins else nullcontext():
                while call.waiting:
                    call.of(call.waiting[0], self)
        finally:
            self._calls.pop()

    def _moment(self) -> str | None:
        """Return the method of all hooks that is being called, or None. Another one may be called within it."""
        return self._calls[0].name if self._calls else None

    def _call_kept_hooks(self) -> None:
        """Call the hooks of which a checkpoint holds something, if they wait, so that it has what they have seen.

        A hook that saves a checkpoint may be called before them.
        """
        for call in self._calls:
            for hook in filter(is_kept, list(call.waiting)):
                call.of(hook, self)

    def register_hook(self, hook: Hook | dict, priority: Any = None) -> None:
        """Register a hook or its config. It runs after those of the same or a higher priority."""
        hook = build.build_hook(self.cfg, hook)
        if priority is not None:
            hook.priority = priority
        self.hooks.append(hook)
        self.hooks.sort(key=_priority_of)

    @contextmanager
    def _stage(self) -> Iterator[None]:
        """Run a stage, and end it in order, even if it fails.

        The ``on_exit`` of hooks releases the terminal.
        """
        with self._logging_fatal_errors():
            try:
                with worker_failures_explained():
                    yield
                for graphs in self.graphs.values():
                    if graphs.counts:
                        self.logger.info(graphs.report())
            finally:
                for loop in filter(None, (self._train_loop, self._val_loop, self._test_loop)):
                    stop_workers(loop)
                self.call_hook("on_exit")

    @cached_property
    def graphs(self) -> dict[str, Any]:
        """What replays the losses and the predictions as CUDA graphs, by the name of the method, if graphs are used."""
        return graphs_for(self.cfg, self.model, self.logger)

    @cached_property
    def steps(self) -> StagedModel:
        """The steps of training, and what the model remembers from one to the next."""
        return StagedModel(self.model, self.graphs)

    @contextmanager
    def _logging_fatal_errors(self) -> Iterator[None]:
        """Write an error of the block to the run's log file, if that file exists yet."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = self.work_dir  # A write to an open file does not name it.
            if logger := getattr(self, "logger", None):
                log_fatal_error(logger, error, logger.log_file)
            raise


@dataclass
class _Call:
    """A call of a method of all hooks, some of which still wait for it."""

    name: str
    arguments: dict[str, Any]
    waiting: list[Hook]

    def of(self, hook: Hook, runner: DetRunner) -> None:
        self.waiting.remove(hook)
        if hasattr(hook, self.name):
            getattr(hook, self.name)(runner, **self.arguments)


def _priority_of(hook: Hook) -> int:
    return get_priority(hook.priority)

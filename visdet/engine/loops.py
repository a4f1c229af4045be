"""mmengine's two training loops, which can be resumed at any iteration without reading data again."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from mmengine.dataset import InfiniteSampler
from mmengine.dist import all_gather_object
from mmengine.runner import EpochBasedTrainLoop as _EpochBasedTrainLoop
from mmengine.runner import IterBasedTrainLoop as _IterBasedTrainLoop
from mmengine.runner.base_loop import BaseLoop
from mmengine.runner.utils import calc_dynamic_intervals
from torch import nn
from torch.utils.data import DataLoader

from visdet.errors import InvalidInputError
from visdet.registry import LOOPS

from .checkpoints.random_state import preserved_random_state
from .checkpoints.resumable_batches import ResumableBatches, new_loader
from .errors import ConfigError

_VALIDATED = "validated_at_iter"


class _Training:
    """The part that both loops share, which runs an iteration and decides when to validate.

    A loop's ``_progress`` returns the number of epochs or iterations that are done, and their total.
    """

    # mmengine's loops have these, and give them no types.
    runner: Any
    dataloader: Any
    dataloader_iterator: Any
    val_begin: int
    val_interval: int
    _decide_current_val_interval: Callable[[], None]

    def _progress(self) -> tuple[int, int]:
        raise NotImplementedError

    def _stop_workers(self) -> None:
        """End the data workers, by replacing their loader by one that has started none.

        If they were left to the garbage collector, it would close their queues before it asks them to end, and then
        wait five seconds for each of them.
        """
        self.dataloader_iterator = None
        self.dataloader = new_loader(self.dataloader, self.dataloader.batch_sampler)

    def _is_validation_due(self) -> bool:
        self._decide_current_val_interval()
        done, total = self._progress()
        return done >= self.val_begin and (done % self.val_interval == 0 or done == total)

    def _must_catch_up(self) -> bool:
        """Return whether a resumed run was killed between its checkpoint and the validation that was due."""
        return self._progress()[0] > 0 and self._is_validation_due() and not _is_validated(self.runner)


@LOOPS.register_module()
class EpochBasedTrainLoop(_Training, _EpochBasedTrainLoop):
    """Epoch-based training, which can also resume from a checkpoint that was saved inside an epoch.

    It differs from mmengine's loop as follows:

    * A resumed run continues with the next batch of the epoch.
    * A resumed run continues with the random state of the checkpoint. The random numbers that workers draw depend on
      the batch alone.
    * If the run was killed before a validation that was due, the resumed run validates first.
    * Validation does not change the random state.

    Args: see :class:`mmengine.runner.EpochBasedTrainLoop`.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        max_epochs = _whole_number(self, "max_epochs", max_epochs, least=0)
        val_interval = _whole_number(self, "val_interval", val_interval, least=1)
        super().__init__(runner, dataloader, max_epochs, val_begin, val_interval, dynamic_intervals)
        _check_epochs_end(self.dataloader)
        self.dataloader = ResumableBatches.install(self.dataloader, endless=False)
        _check_there_are_batches(self.dataloader)
        _check_epochs_are_equal(self.dataloader)

    def run(self) -> nn.Module:
        """Train to the last epoch, validate when it is due, and return the model.

        A run that was finished before it was resumed is validated once.
        """
        self.runner.call_hook("before_train")
        was_finished = self._epoch >= self._max_epochs
        _restore_random_state(self.runner)
        if was_finished or (self._iter == self._epoch * len(self.dataloader) and self._must_catch_up()):
            _validate(self.runner)
        try:
            with living_objects_not_collected():
                while self._epoch < self._max_epochs and not self.stop_training:
                    self.run_epoch()
                    if self._is_validation_due():
                        _validate(self.runner)
        finally:
            self._stop_workers()
        self.runner.call_hook("after_train")
        return self.runner.model

    def run_epoch(self) -> None:
        """Train on the current epoch, or on the rest of it if the run was resumed inside it."""
        self.runner.call_hook("before_train_epoch")
        self.runner.model.train()
        done = self._iter - self._epoch * len(self.dataloader)
        start = done if 0 < done <= len(self.dataloader) else 0
        self.dataloader.batch_sampler.start_at(self.runner.seed, self._iter, skipped=start)
        # A checkpoint of an epoch's last iteration was saved before the hooks at the end of the epoch ran. A run that
        # resumes from it has only those hooks left to run.
        for batch_idx, data_batch in enumerate(
            self.dataloader if start < len(self.dataloader) else (), start
        ):
            self.run_iter(batch_idx, data_batch)
        self.runner.call_hook("after_train_epoch")
        self._epoch += 1

    def _progress(self) -> tuple[int, int]:
        return self._epoch, self._max_epochs


@LOOPS.register_module()
class IterBasedTrainLoop(_Training, _IterBasedTrainLoop):
    """Iteration-based training, which resumes without loading the images of earlier iterations.

    It differs from mmengine's loop as follows:

    * A resumed run has the data order of an uninterrupted one. It skips batches of indices instead of loading them.
    * A resumed run continues with the random state of the checkpoint. The random numbers that workers draw depend on
      the batch alone.
    * When a finite sampler ends, its next epoch begins without a restart of the workers.
    * If the run was killed before a validation that was due, the resumed run validates first.
    * Validation does not change the random state.

    Args: see :class:`mmengine.runner.IterBasedTrainLoop`.
    """

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        # The constructor of mmengine's loop would start the workers on batches that a resumed run has seen. It is not
        # called, so that this one sets all attributes of that loop (test_loops.py compares them).
        BaseLoop.__init__(self, runner, dataloader)
        self._max_iters = _whole_number(self, "max_iters", max_iters, least=0)
        self._max_epochs = 1
        self._epoch = 0
        self._iter = 0
        self.val_begin = val_begin
        self.val_interval = val_interval = _whole_number(self, "val_interval", val_interval, least=1)
        self.stop_training = False
        self.dynamic_milestones, self.dynamic_intervals = calc_dynamic_intervals(
            val_interval, dynamic_intervals
        )
        self.runner.visualizer.dataset_meta = getattr(self.dataloader.dataset, "metainfo", None)
        self.dataloader = ResumableBatches.install(self.dataloader, endless=True)
        _check_there_are_batches(self.dataloader)

    def run(self) -> nn.Module:
        """Train to the last iteration, validate when it is due, and return the model.

        A run that was finished before it was resumed is validated once.
        """
        _warn_of_schedules_by_epoch(self.runner)
        self.runner.call_hook("before_train")
        self.runner.call_hook("before_train_epoch")  # The whole training counts as one epoch.
        was_finished = self._iter >= self._max_iters
        _restore_random_state(self.runner)
        if was_finished or self._must_catch_up():
            _validate(self.runner)
        self.dataloader.batch_sampler.start_at(self.runner.seed, self._iter, skipped=self._iter)
        try:
            self.dataloader_iterator = iter(self.dataloader)
            with living_objects_not_collected():
                while self._iter < self._max_iters and not self.stop_training:
                    self.runner.model.train()
                    self.run_iter(next(self.dataloader_iterator))
                    if self._is_validation_due():
                        _validate(self.runner)
        finally:
            self._stop_workers()
        self.runner.call_hook("after_train_epoch")
        self.runner.call_hook("after_train")
        return self.runner.model

    def _progress(self) -> tuple[int, int]:
        return self._iter, self._max_iters


def _warn_of_schedules_by_epoch(runner: Any) -> None:
    """Warn of schedules that count epochs, which is mmengine's default, because iteration-based training has only one.

    ReduceOnPlateauLR counts validations, in spite of its ``by_epoch=True``.
    """
    given = runner.param_schedulers or []
    for schedules in given.values() if isinstance(given, dict) else [given]:
        for schedule in schedules:
            if schedule.by_epoch and not getattr(schedule, "need_val_args", False):
                runner.logger.warning(
                    f"param_scheduler: {type(schedule).__name__} counts epochs, but the training loop counts "
                    f"iterations, so that it never changes {schedule.param_name!r}. Set by_epoch=False and give its "
                    "lengths in iterations"
                )


def _whole_number(loop: Any, name: str, value: Any, least: int) -> int:
    """Return the number that a config gives for an argument of a loop.

    Raises:
        InvalidInputError: the value is not a whole number, or it is below ``least``.
    """
    if not isinstance(value, int | float) or value % 1 != 0 or value < least:
        raise InvalidInputError(
            f"{type(loop).__name__}: {name} must be a whole number, {least} or more, got {value!r}"
        )
    return int(value)


def _check_epochs_end(dataloader: DataLoader) -> None:
    """Refuse a sampler without an end, because an epoch ends when its sampler does.

    Raises:
        ConfigError: the sampler has no end. The message names it.
    """
    batches = dataloader.batch_sampler
    for sampler in (batches, getattr(batches, "sampler", None), dataloader.sampler):
        if isinstance(sampler, InfiniteSampler) or getattr(sampler, "endless", False):
            raise ConfigError(
                f"train_dataloader: {type(sampler).__name__} gives batches without end, so that EpochBasedTrainLoop "
                "would never end its first epoch. Use train_cfg=dict(by_epoch=False, max_iters=...), or a sampler "
                "whose epochs end, such as DefaultSampler"
            )


def _check_epochs_are_equal(dataloader: DataLoader) -> None:
    """Refuse epochs that have more batches in some processes. These would wait for the others.

    Raises:
        ConfigError: the numbers of batches differ. Every process raises it.
    """
    lengths = all_gather_object(len(dataloader))
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"train_dataloader: an epoch has {', '.join(map(str, lengths))} batches in the processes, but they must be "
            "equally many. Set train_dataloader.sampler.round_up=True"
        )


def _check_there_are_batches(dataloader: DataLoader) -> None:
    """Refuse a loader without a batch, such as one that drops the only batch because it is incomplete.

    Raises:
        ConfigError: the loader has no batch. The message gives the sizes.
    """
    batches: Any = dataloader.batch_sampler
    dataset: Any = dataloader.dataset
    check_there_are_samples(dataset, "train_dataloader")
    if len(batches) == 0:
        raise ConfigError(
            f"train_dataloader gives no batch: its data set has {len(dataset)} samples, "
            f"{type(batches.batch_sampler).__name__} makes batches of {batches.batch_size} and drops incomplete ones. "
            "Set batch_size to at most the number of samples of a process, or set drop_last=False"
        )


def check_there_are_samples(dataset: Any, loader: str) -> None:
    """Refuse a data set without a sample, such as one whose samples are all filtered out.

    Raises:
        ConfigError: the data set has no sample. The message names it.
    """
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ConfigError(
            f"{loader}.dataset ({type(dataset).__name__}) has no samples. Look at its annotation file and at what "
            "leaves samples out (filter_cfg, indices, metainfo.classes)"
        )


def check_metrics_are_apart(metrics: Sequence[Any], section: str) -> None:
    """Refuse metrics of an evaluator that write to one file, or whose values have the same names.

    Raises:
        ConfigError: two metrics have the same ``outfile_prefix`` or ``out_file``, or are of one class with the same
            ``prefix`` and ``metric_items``.
    """
    seen: set[tuple] = set()
    for metric in metrics:
        paths = {key: getattr(metric, key, None) for key in ("outfile_prefix", "out_file")}
        claims: set[tuple] = {(key, os.path.abspath(path), "") for key, path in paths.items() if path}
        if not (getattr(metric, "format_only", False) or paths["out_file"]):
            items = getattr(metric, "metric_items", [""])
            claims |= {("prefix", metric.prefix, f"{type(metric).__name__} {item}") for item in items}
        if clash := seen & claims:
            key, value, _ = min(clash)
            raise ConfigError(
                f"{section}: two metrics, of which one is a {type(metric).__name__}, have {key}={value!r}, so that "
                f"the results of one would replace those of the other. Give each a {key} of its own"
            )
        seen |= claims


def check_frames_come_one_by_one(dataloader: Any, loader: str) -> None:
    """Refuse batches of several frames of a sampler that plays one scene after another.

    Raises:
        ConfigError: a batch has several frames. The model would go on from each with frames of its own.
    """
    batch_size = getattr(dataloader, "batch_size", None)
    if getattr(dataloader.sampler, "batches_have_one", False) and batch_size not in (None, 1):
        raise ConfigError(
            f"{loader}.batch_size must be 1 with {type(dataloader.sampler).__name__}, which plays the frames of a "
            f"scene one after another, got {batch_size}"
        )


def _validate(runner: Any) -> None:
    if runner.val_loop is not None:
        # This is noted before the validation, because a hook may write a checkpoint as soon as it knows the metrics.
        runner.message_hub.update_info(_VALIDATED, runner.iter)
        with preserved_random_state():
            runner.val_loop.run()


@contextmanager
def living_objects_not_collected() -> Iterator[None]:
    """Let Python's garbage collector leave out, within the block, all objects that exist when it begins.

    To search all objects that packages and a model have made would take up to a tenth of the training. Where a program
    has frozen its objects itself, nothing is done, because ``gc.unfreeze`` would undo that too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_validated(runner: Any) -> bool:
    """Return whether a validation of the weights of this iteration began before they were saved."""
    return runner.message_hub.get_info(_VALIDATED) == runner.iter


def _restore_random_state(runner: Any) -> None:
    """Continue with the random state of a resumed checkpoint. mmengine's own runner keeps none."""
    if hasattr(runner, "restore_random_state"):
        runner.restore_random_state()

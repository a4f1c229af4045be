"""How long a run trains and when it is validated, and what else hooks of mmengine read of a runner."""

import bisect
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from mmengine.evaluator import Evaluator
from mmengine.runner import EpochBasedTrainLoop as _ByEpoch
from mmengine.runner import IterBasedTrainLoop as _ByIteration
from mmengine.runner import Runner
from mmengine.runner.utils import calc_dynamic_intervals
from torch.utils.data import DataLoader

from visdet.checks.arguments import Count, Positive, checked
from visdet.execution.host_copy import ArrivingSamples

from .checkpoints.class_names import category_ids_of
from .data.resumable_batches import ResumableBatches


def stop_workers(loop: Any) -> None:
    """End the data workers of a loop.

    If they were left to the garbage collector, it would close their queues before it asks them to end, and then wait
    five seconds for each of them.
    """
    loop.dataloader_iterator = loop.dataloader._iterator = None


class TrainLoop:
    """The data and the length of training, its validations, and how far it is. :class:`DetRunner` runs it.

    Attributes:
        by_epoch: whether epochs are counted, rather than iterations.
        epoch, iter: the epochs and iterations that are done.
        max_epochs, max_iters: how many there are to do. Training by iterations has one epoch.
        batches_ahead: how many batches more than iterations the data have given, in training by iterations that goes on
            from a run with larger batches. It is negative after smaller ones.
        val_begin, val_interval: the first epoch or iteration after which the run may be validated, and the interval.
        stop_training: whether to stop, which a hook may set.
    """

    by_epoch: bool
    dataloader_iterator: Any
    max_epochs: int
    max_iters: int

    def __init__(
        self, runner: Any, dataloader: DataLoader, val_begin: int, val_interval: int, dynamic_intervals: Any
    ) -> None:
        self.runner = runner
        self.dataloader: Any = ResumableBatches.install(dataloader, endless=not self.by_epoch)
        self.epoch = self.iter = self.batches_ahead = 0
        self.val_begin = val_begin
        self.val_interval = val_interval
        self._milestones, self._intervals = calc_dynamic_intervals(val_interval, dynamic_intervals)
        self.stop_training = False

    def progress(self) -> tuple[int, int]:
        """Return how many epochs or iterations are done, and how many there are to do."""
        return (self.epoch, self.max_epochs) if self.by_epoch else (self.iter, self.max_iters)

    def is_finished(self) -> bool:
        """Return whether nothing is left to do."""
        done, total = self.progress()
        return done >= total or self.stop_training

    def is_validation_due(self) -> bool:
        """Return whether the run is to be validated now, as it always is at its end."""
        done, _ = self.progress()
        self.val_interval = self._intervals[bisect.bisect(self._milestones, done + 1) - 1]
        return self.is_finished() or (done >= self.val_begin and done % self.val_interval == 0)


@_ByEpoch.register
class EpochBasedTrainLoop(TrainLoop):
    """Training by epochs. The arguments are those of mmengine's class of this name."""

    by_epoch = True

    @checked
    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader,
        max_epochs: Count,
        val_begin: Count = 1,
        val_interval: Positive = 1,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self.max_epochs = max_epochs
        self.max_iters = self.max_epochs * len(self.dataloader)


@_ByIteration.register
class IterBasedTrainLoop(TrainLoop):
    """Training by iterations. The arguments are those of mmengine's class of this name."""

    by_epoch = False

    @checked
    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader,
        max_iters: Count,
        val_begin: Count = 1,
        val_interval: Positive = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(runner, dataloader, val_begin, val_interval, dynamic_intervals)
        self.max_epochs = 1
        self.max_iters = max_iters


class EvaluationLoop:
    """The data and the metrics of validation or of a test.

    Args:
        runner: the runner.
        dataloader: the data.
        evaluator: the metrics. They read the predictions for a batch when those for the next one are on their way, so
            that the device need not wait for them.
        fp16: whether the model runs under autocast to bfloat16.
    """

    def __init__(self, runner: Any, dataloader: DataLoader, evaluator: Evaluator, fp16: bool = False) -> None:
        self.runner = runner
        self.dataloader: Any = dataloader
        self.evaluator = evaluator
        self.fp16 = fp16
        self._arriving: tuple[Any, ArrivingSamples] | None = None
        meta = getattr(dataloader.dataset, "metainfo", None)
        evaluator.dataset_meta = meta and {**meta, "category_ids": category_ids_of(dataloader.dataset)}

    def process(self, batch: Any = None, predictions: Sequence[Any] = ()) -> None:
        """Take the predictions for a batch, and give the metrics those for the batch before it."""
        arrived = self._arriving
        self._arriving = (batch, ArrivingSamples(predictions))
        if arrived is not None:
            before, samples = arrived
            self.evaluator.process(data_samples=samples.read(), data_batch=before)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all batches."""
        self.process()
        self._arriving = None
        return self.evaluator.evaluate(len(self.dataloader.dataset))


class RunnerInterface:
    """The attributes and the methods of mmengine's runner that hooks use, for a runner with loops."""

    train_loop: Any
    val_loop: Any
    test_loop: Any
    resumed_from: str | None

    build_evaluator = Runner.build_evaluator
    build_optim_wrapper = Runner.build_optim_wrapper
    build_param_scheduler = Runner.build_param_scheduler
    _build_param_scheduler = Runner._build_param_scheduler
    register_hooks = Runner.register_hooks
    register_default_hooks = Runner.register_default_hooks
    register_custom_hooks = Runner.register_custom_hooks
    get_hooks_info = Runner.get_hooks_info

    # mmengine's hooks ask whether a loop has been built, and whether training continues from a checkpoint.
    _train_loop: TrainLoop | None = None
    _val_loop: EvaluationLoop | None = None
    _test_loop: EvaluationLoop | None = None

    @property
    def _resume(self) -> bool:
        return self.resumed_from is not None

    @property
    def epoch(self) -> Any:
        loop = self._train_loop
        return loop.epoch if loop else 0

    @property
    def iter(self) -> Any:
        loop = self._train_loop
        return loop.iter if loop else 0

    max_epochs = property(attrgetter("train_loop.max_epochs"))
    max_iters = property(attrgetter("train_loop.max_iters"))
    val_interval = property(attrgetter("train_loop.val_interval"))
    val_begin = property(attrgetter("train_loop.val_begin"))
    train_dataloader = property(attrgetter("train_loop.dataloader"))
    val_dataloader = property(attrgetter("val_loop.dataloader"))
    test_dataloader = property(attrgetter("test_loop.dataloader"))
    val_evaluator = property(attrgetter("val_loop.evaluator"))
    test_evaluator = property(attrgetter("test_loop.evaluator"))

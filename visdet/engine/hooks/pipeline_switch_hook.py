"""A hook that gives the training data another pipeline during a run."""

from collections.abc import Iterable
from typing import Any

from mmengine.dataset import Compose
from mmengine.hooks import Hook

from visdet.registry import HOOKS

from ..data.inner_parts import parts_of
from ..errors import ConfigError


@HOOKS.register_module()
class PipelineSwitchHook(Hook):
    """Replaces the pipeline of the training data, for example by one without strong augmentation or with larger images.

    Args:
        switch_epoch: the first epoch, counted from 0, that reads the new pipeline, or None.
        switch_pipeline: the configs of the new pipeline's transforms.
        switch_iter: the first iteration, counted from 0, that reads the new pipeline, or None. Exactly one of
            ``switch_epoch`` and ``switch_iter`` must be given.

    Raises:
        ConfigError: both or none of them are given, or data workers would keep the old pipeline. Workers are started
            for each epoch unless ``persistent_workers=True``, so that only ``switch_epoch`` can serve them.

    Source: the name and the first two arguments are those of mmdet's hook.
    """

    def __init__(
        self, switch_epoch: int | None = None, switch_pipeline: Any = (), switch_iter: int | None = None
    ) -> None:
        if (switch_epoch is None) == (switch_iter is None):
            raise ConfigError(
                "PipelineSwitchHook: either switch_epoch or switch_iter must be given, got "
                f"{switch_epoch} and {switch_iter}"
            )
        self.switch_epoch = switch_epoch
        self.switch_iter = switch_iter
        self.pipeline = Compose(switch_pipeline)

    def before_train(self, runner: Any) -> None:
        """Find the data sets with a pipeline, and check the data workers."""
        loader = runner.train_dataloader
        dataset = loader.dataset
        # A data set with a pipeline may read others by pipelines of their own, which stay.
        parts: Iterable[Any] = [dataset] if hasattr(dataset, "pipeline") else parts_of(dataset)
        self._datasets = [part for part in parts if hasattr(part, "pipeline")]
        if not self._datasets:
            raise ConfigError(f"PipelineSwitchHook: {type(dataset).__name__} has no pipeline to replace")
        switch_epoch = self.switch_epoch
        workers = loader.num_workers
        are_kept = loader.persistent_workers
        if workers and (switch_epoch is None or are_kept):
            raise ConfigError(
                "PipelineSwitchHook: workers would keep the old pipeline. It needs train_dataloader.num_workers=0, or "
                f"switch_epoch and persistent_workers=False, got num_workers={workers}, switch_epoch={switch_epoch} "
                f"and persistent_workers={are_kept}"
            )

    def before_train_epoch(self, runner: Any) -> None:
        """Switch before the first batch of an epoch, or of a resumed run, is read."""
        self._switch_if_due(runner, runner.iter)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Switch before the next batch is read."""
        self._switch_if_due(runner, runner.iter + 1)

    def _switch_if_due(self, runner: Any, next_iter: int) -> None:
        pipeline = self.pipeline
        switch_iter = self.switch_iter
        is_due = runner.epoch >= (self.switch_epoch or 0) if switch_iter is None else next_iter >= switch_iter
        old = [dataset for dataset in self._datasets if dataset.pipeline is not pipeline]
        if is_due and old:
            for dataset in old:
                dataset.pipeline = pipeline
            runner.logger.info(f"training data: new pipeline from iteration {next_iter} on")

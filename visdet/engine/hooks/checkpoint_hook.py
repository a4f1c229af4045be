"""A version of mmengine's checkpoint hook that loses no checkpoint if the run is killed at any moment."""

import os
from typing import Any

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook as _CheckpointHook
from torch import nn

from visdet.registry import HOOKS

from ..checkpoints.checkpoint import add_thresholds
from ..checkpoints.newest import name_newest
from ..checkpoints.score_thresholds import thresholds_of
from ..errors import ConfigError
from ..process.places import check_free_space, check_work_dir


@HOOKS.register_module()
class CheckpointHook(_CheckpointHook):
    """Saves checkpoints so that a run loses none if it is killed. ``DetRunner.save_checkpoint`` says what they hold.

    An old checkpoint is removed only after the new one has been written completely.

    The arguments are those of :class:`mmengine.hooks.CheckpointHook`. Old checkpoints of ``max_keep_ckpts`` and
    ``save_best`` are removed from local folders only.

    Attributes:
        saved_at: the number of iterations after which this hook has saved its last checkpoint.
    """

    saved_at = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args:  # mmengine keeps unknown keywords and fails on them only at the first checkpoint.
            raise TypeError(
                f"CheckpointHook.__init__() got an unexpected keyword argument {next(iter(self.args))!r}"
            )
        try:
            self._names_differ()
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(
                "CheckpointHook: filename_tmpl must be a text with {} in the place of the number, such as "
                f"'iter_{{}}.pth', got {self.filename_tmpl!r}"
            ) from error

    def before_train(self, runner: Any) -> None:
        """Create the folder of the checkpoints, and look there for the best checkpoint of the run that is resumed.

        If that run has another folder, its best checkpoint stays, even if a better one is found.

        Raises:
            UserError: the folder cannot be written, or has no space for a checkpoint.
        """
        steps = runner.message_hub.get_info("keep_ckpt_ids")
        if steps and self.max_keep_ckpts > 0 and self.filename_tmpl is not None and not self._names_differ():
            # mmengine would remove the checkpoints that are too many, which have the name of the one to keep.
            runner.message_hub.update_info("keep_ckpt_ids", steps[-self.max_keep_ckpts :])
        super().before_train(runner)
        if isinstance(self.file_backend, LocalBackend) and is_main_process():
            check_work_dir(self.out_dir, "default_hooks.checkpoint.out_dir")
            check_free_space(self.out_dir, _size_of_checkpoint(runner.model), "a checkpoint")
        if self.save_best is not None:
            best = self._best_paths()
            for key, path in best.items():
                # Only the name counts, because the folder may have been moved or copied since.
                best[key] = self._existing(path) if path else None
            self._set_best_paths(best)

    def _existing(self, path: str) -> str | None:
        """Return the path of the file in the folder of this run that has the name of ``path``, or None."""
        here = os.path.join(self.out_dir, os.path.basename(path))
        return here if os.path.isfile(here) else None

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        outdated = self._keep(runner, step) if self.max_keep_ckpts > 0 else []
        name = self.filename_tmpl.format(step)
        path, previous = os.path.join(self.out_dir, name), runner.message_hub.get_info("last_ckpt")
        self._set_last(runner, path)
        try:
            runner.save_checkpoint(
                self.out_dir,
                name,
                self.file_client_args,
                save_optimizer=self.save_optimizer,
                save_param_scheduler=self.save_param_scheduler,
                meta=meta,
                by_epoch=self.by_epoch,
                backend_args=self.backend_args,
            )
        except BaseException:
            self._set_last(runner, previous)
            raise
        self.saved_at = meta["iter"]
        if is_main_process():
            name_newest(runner.work_dir, runner.message_hub)
            for old_step in outdated if self._names_differ() else []:
                _remove(os.path.join(self.out_dir, self.filename_tmpl.format(old_step)))

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Save the best checkpoint, and add the thresholds of this validation to a checkpoint of this iteration."""
        super().after_val_epoch(runner, metrics)
        is_of_now = self.saved_at == runner.iter and is_main_process()
        if is_of_now and self.last_ckpt and os.path.isfile(self.last_ckpt):
            add_thresholds(self.last_ckpt, thresholds_of(runner.val_evaluator.metrics))

    def _names_differ(self) -> bool:
        """Return whether checkpoints of different steps have different names."""
        return self.filename_tmpl.format(0) != self.filename_tmpl.format(1)

    def _set_last(self, runner: Any, path: str | None) -> None:
        self.last_ckpt = path
        runner.message_hub.update_info("last_ckpt", path)

    def _keep(self, runner: Any, step: int) -> list[int]:
        """Add ``step`` to the steps whose checkpoints are kept, and return the steps that are no longer kept."""
        steps = [kept for kept in self.keep_ckpt_ids if kept != step] + [step]
        outdated, kept = steps[: -self.max_keep_ckpts], steps[-self.max_keep_ckpts :]
        self.keep_ckpt_ids.clear()
        self.keep_ckpt_ids.extend(kept)
        runner.message_hub.update_info("keep_ckpt_ids", kept)
        return outdated

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        if not self.save_best:
            return
        missing = [name for name in self.key_indicators if name != "auto" and name not in metrics]
        if missing or not metrics:
            raise ConfigError(
                f"save_best of the checkpoint hook: validation returned no metric "
                f"{missing[0] if missing else 'at all'}; there are {', '.join(metrics) or 'none'}"
            )
        # mmengine would remove the previous best checkpoint before it writes the new one. The paths are hidden from
        # it, so that the file stays until then.
        previous = self._best_paths()
        self._set_best_paths(dict.fromkeys(previous))
        super()._save_best_checkpoint(runner, metrics)
        current = self._best_paths()
        for key, path in previous.items():
            if current.get(key) is None:
                current[key] = path
        self._set_best_paths(current)
        if is_main_process():
            name_newest(runner.work_dir, runner.message_hub)
            for path in previous.values():
                if path and path not in current.values():
                    _remove(path)

    def _best_paths(self) -> dict[str, str | None]:
        if len(self.key_indicators) == 1:
            return {"": self.best_ckpt_path}
        return dict(self.best_ckpt_path_dict)

    def _set_best_paths(self, paths: dict[str, str | None]) -> None:
        if len(self.key_indicators) == 1:
            self.best_ckpt_path = paths[""]
        else:
            self.best_ckpt_path_dict = paths


def _size_of_checkpoint(model: nn.Module) -> int:
    """Return the bytes of a checkpoint, in which an optimizer keeps two numbers for each weight that it trains."""
    weights = [*model.parameters(), *model.buffers()]
    trained = [weight for weight in weights if weight.requires_grad]
    return sum(weight.nbytes for weight in [*weights, *trained, *trained])


def _remove(path: str) -> None:
    if os.path.isfile(path):
        os.remove(path)

"""A version of mmengine's checkpoint hook that loses no checkpoint if the run is killed at any moment."""

import os
from itertools import chain
from typing import Any

from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook as _CheckpointHook
from torch import nn

from visdet.errors import listed
from visdet.registry import HOOKS

from ..checkpoints.checkpoint import add_thresholds
from ..checkpoints.newest import name_newest
from ..checkpoints.score_thresholds import thresholds_of
from ..errors import ConfigError
from ..monitored_metrics import undefined_metrics
from ..process.places import check_free_space, check_work_dir

# What the message hub holds of the best checkpoints, and the metrics by which they are chosen.
_OF_BEST = ("best_score", "best_ckpt")
_CHOSEN_BY = "chosen_by"


@HOOKS.register_module()
class CheckpointHook(_CheckpointHook):
    """Saves checkpoints so that a run loses none if it is killed. ``DetRunner.save_checkpoint`` says what they hold.

    An old checkpoint is removed only after the new one has been written completely.

    The arguments are those of :class:`mmengine.hooks.CheckpointHook`. Old checkpoints of ``max_keep_ckpts`` and
    ``save_best`` are removed from local folders only.
    """

    file_backend: Any
    last_ckpt: Any
    # The iterations after which the last checkpoint was saved, if that was before their validation, and its file.
    _lacks_thresholds_of = None
    _saved_file = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args:  # mmengine keeps unknown keywords and fails on them only at the first checkpoint.
            raise TypeError(
                f"CheckpointHook.__init__() got an unexpected keyword argument {next(iter(self.args))!r}"
            )
        template = self.filename_tmpl
        try:
            self._names_differ = template.format(0) != template.format(1)
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(
                "CheckpointHook: filename_tmpl must be a text with {} in the place of the number, such as "
                f"'iter_{{}}.pth', got {template!r}"
            ) from error

    def before_train(self, runner: Any) -> None:
        """Create the folder of the checkpoints.

        Raises:
            UserError: the folder cannot be written, or has no space for a checkpoint.
        """
        hub = runner.message_hub
        most = self.max_keep_ckpts
        steps = hub.get_info("keep_ckpt_ids")
        if steps and most > 0 and not self._names_differ:
            # mmengine would remove the checkpoints that are too many, which have the name of the one to keep.
            hub.update_info("keep_ckpt_ids", steps[-most:])
        super().before_train(runner)
        backend = self.file_backend
        folder = self.out_dir
        if isinstance(backend, LocalBackend) and is_main_process():
            check_work_dir(folder, "default_hooks.checkpoint.out_dir")
            check_free_space(folder, _size_of_checkpoint(runner.model), "a checkpoint")
        self.file_backend = _LateRemoval(backend, folder)

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        hub = runner.message_hub
        previous = hub.get_info("last_ckpt")
        try:
            super()._save_checkpoint_with_step(runner, step, meta)
        except BaseException:
            self.last_ckpt = previous
            hub.update_info("last_ckpt", previous)
            raise
        done = meta["iter"]
        self._lacks_thresholds_of = None if hub.get_info("validated_at_iter") == done else done
        self._saved_file = _identity(self.last_ckpt)
        self._end_saving(runner)

    def _end_saving(self, runner: Any) -> None:
        """Name the newest checkpoint and the best one, and remove those that they replace."""
        if is_main_process():
            hub = runner.message_hub
            name_newest(runner.work_dir, hub)
            known = hub.runtime_info.items()
            named = [path for name, path in known if name.startswith(("last_ckpt", "best_ckpt"))]
            self.file_backend.remove_outdated(named)

    def after_val_epoch(self, runner: Any, metrics: dict | None = None) -> None:
        """Save the best checkpoint, and add the thresholds of this validation to a checkpoint of this iteration.

        A metric that the validation does not define, such as an AP without true boxes, chooses no best checkpoint.
        A run that is resumed with another ``save_best`` or other validation data forgets the best scores, whose
        checkpoints stay.
        """
        super().after_val_epoch(runner, metrics)
        is_of_now = self._lacks_thresholds_of == runner.iter and is_main_process()
        thresholds = thresholds_of(runner.val_evaluator.metrics) if is_of_now else {}
        # Another process may have replaced the file.
        if thresholds and self._saved_file == _identity(self.last_ckpt) is not None:
            add_thresholds(self.last_ckpt, thresholds)

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        if not self.save_best:
            return
        wanted = self.key_indicators
        missing = [name for name in wanted if name != "auto" and name not in metrics]
        if missing:
            raise ConfigError(
                f"save_best of the checkpoint hook: validation returned no metric {missing[0]}; there are "
                f"{', '.join(metrics)}"
            )
        warn = runner.logger.warning
        chosen_by = listed([next(iter(metrics)) if name == "auto" else name for name in wanted])
        dataset = runner.val_loop.dataloader.dataset
        data = os.path.basename(getattr(dataset, "ann_file", None) or type(dataset).__name__)
        chosen_on = f"{chosen_by} on {len(dataset)} samples of {data}"
        hub = runner.message_hub
        before = hub.get_info(_CHOSEN_BY, chosen_by)
        if before not in (chosen_by, chosen_on):  # Older checkpoints have the former.
            for name in [name for name in hub.runtime_info if name.startswith(_OF_BEST)]:
                hub.pop_info(name)
            self.best_ckpt_path = None
            self.best_ckpt_path_dict = dict.fromkeys(wanted)
            warn(f"the best checkpoint is chosen by {chosen_on} from now on, and no longer by {before}")
        hub.update_info(_CHOSEN_BY, chosen_on)
        undefined = undefined_metrics(metrics, runner.val_evaluator.metrics)
        super()._save_best_checkpoint(runner, metrics | dict.fromkeys(undefined))
        self._end_saving(runner)
        if names := [name for name in wanted if name in undefined]:
            warn(
                f"no best checkpoint is chosen by {listed(names)}, which this validation does not define: its data "
                "have no ground truth for it"
            )

    def after_train(self, runner: Any) -> None:
        """Publish the last checkpoint and the best ones, but none of another folder, which may have been moved."""
        if os.path.isdir(self.out_dir):
            existing = self.file_backend.existing
            self.best_ckpt_path = existing(getattr(self, "best_ckpt_path", None))
            best = {key: existing(path) for key, path in getattr(self, "best_ckpt_path_dict", {}).items()}
            self.best_ckpt_path_dict = {key: path for key, path in best.items() if path}
        super().after_train(runner)


class _LateRemoval:
    """A file backend that only notes which checkpoints mmengine wants removed, until the new ones have been written.

    Only the name of a checkpoint counts, because the folder may have been moved or copied since. If a run that is
    resumed has another folder, its checkpoints stay.

    Args:
        backend: the backend that does everything else.
        folder: where the checkpoints are.
    """

    def __init__(self, backend: Any, folder: str) -> None:
        self.backend = backend
        self.folder = folder
        self.outdated: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def existing(self, path: str | None) -> str | None:
        """Return the path of the file in the folder that has the name of ``path``, or None."""
        here = os.path.join(self.folder, os.path.basename(path or ""))
        return here if os.path.isfile(here) else None

    def isfile(self, path: str) -> bool:
        return self.existing(path) is not None

    def isdir(self, path: str) -> bool:
        return False

    def remove(self, path: str) -> None:
        if here := self.existing(path):
            self.outdated.append(here)

    def remove_outdated(self, kept: list[str]) -> None:
        """Remove what has been noted, beside files that have been written anew."""
        for path in self.outdated:
            if path not in kept and os.path.isfile(path):
                os.remove(path)
        self.outdated.clear()


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return what tells a local file from another one of its name, or None if there is none."""
    if not os.path.isfile(path):
        return None
    facts = os.stat(path)
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _size_of_checkpoint(model: nn.Module) -> int:
    """Return the bytes of a checkpoint, in which an optimizer keeps two numbers for each weight that it trains."""
    weights = chain(model.parameters(), model.buffers())
    return sum(weight.nbytes * (3 if weight.requires_grad else 1) for weight in weights)

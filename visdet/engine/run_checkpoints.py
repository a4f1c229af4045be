"""What a run reads from checkpoints and writes to them."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.logging import MessageHub
from mmengine.runner import save_checkpoint as save_elsewhere
from torch import nn

from visdet.checks.state_dicts import nonfinite_names
from visdet.registry import DATASETS

from .checkpoints.checkpoint import read_checkpoint, write_checkpoint
from .checkpoints.class_names import ClassLists, class_lists, lists_of_checkpoint, matched_by_name
from .checkpoints.held_config import say_differences
from .checkpoints.newest import name_newest
from .checkpoints.plain_state import to_plain
from .checkpoints.published import revised
from .checkpoints.resume import read_to_resume
from .checkpoints.run_state import collected_state, refusal, restore
from .checkpoints.weights import MODULE_PREFIX, check_finite, load_weights, own_names, weights_of
from .config.load import given_dataset
from .config.text import leaves
from .errors import CheckpointError
from .first_hook import first_hook
from .late_numbers import LateNumbers
from .loops import RunnerInterface
from .optim.wrappers import unwrapped
from .process.console import say

_INTERRUPTED = "interrupted.pth"


class RunCheckpoints(RunnerInterface):
    """The half of a runner that begins from a checkpoint and saves others."""

    cfg: Config
    model: Any
    allows_nonfinite: bool
    class_lists: ClassLists
    hooks: list[Hook]
    late_numbers: LateNumbers
    logger: Any
    message_hub: MessageHub
    randomness: dict[str, Any]
    rank: int
    work_dir: str
    load_from: str | None
    trusts_checkpoints: bool
    call_hook: Callable[..., None]
    _call_kept_hooks: Callable[[], None]
    _moment: Callable[[], str | None]
    _seed_with: Callable[[dict[str, Any]], None]
    has_loaded = False
    _saved_at: int | None = None  # the iterations after which the last checkpoint to go on from was saved

    def _find_checkpoint(self) -> tuple[str, dict[str, Any]] | None:
        """Return the checkpoint to resume and its content, if there is one, and take over its seed.

        The order of the data depends on the seed. A seed of the config stays.
        """
        weights = self.load_from
        work_dir = self.work_dir
        randomness = self.randomness
        if not (resume := self.cfg.get("resume")):
            return None
        found = read_to_resume(resume, weights, work_dir, self.trusts_checkpoints)
        if found is None:
            start = f"the weights of {weights}" if weights else "scratch"
            say(f"resume: {work_dir} has no checkpoint that can be resumed; the run starts from {start}")
            return None
        path, content, remarks = found
        self.resumed_from = path
        for remark in remarks:
            self.logger.warning(f"a newer checkpoint is passed over: {remark}")
        if (seed := content["meta"].get("seed")) is not None and randomness.get("seed") is None:
            self._seed_with({**randomness, "seed": seed})
        return path, content

    def _start_from(self, found: tuple[str, dict[str, Any]] | None) -> dict[str, Any] | None:
        """Restore a checkpoint and return its random state, or load the weights that the config names, if any."""
        if found is None:
            self.load_or_resume()
            return None
        path, content = found
        self._load(path, content, strict=True)
        state = restore(self, path, content)
        self.logger.info(f"resumed from {path} after {self.epoch} epochs and {self.iter} iterations")
        return state

    def load_or_resume(self) -> None:
        """Load the weights that the config names by ``load_from``, if any, unless it has been done.

        A run is resumed by :meth:`train` alone, because it needs the data and the optimizer.
        """
        if self.load_from and not self.has_loaded:
            self.load_checkpoint(self.load_from)

    def load_checkpoint(
        self,
        filename: str,
        map_location: Any = "cpu",
        strict: bool | None = None,
        revise_keys: Sequence[tuple[str, str]] = MODULE_PREFIX,
    ) -> dict:
        """Load the weights of a checkpoint into the model and return the checkpoint.

        Args:
            filename: a file or an http(s) address.
            map_location: This has no effect and is accepted because mmengine passes it. Tensors are read to the CPU.
            strict: whether to refuse weights that do not fit. The default is the config's ``strict_load``.
            revise_keys: pairs of a regular expression and its replacement, which are applied to the keys in turn.

        Raises:
            CheckpointError: the file is missing or damaged, or its weights are refused (see :func:`load_weights`).
        """
        strict = self.cfg.get("strict_load", True) if strict is None else strict
        content = read_checkpoint(filename, trust=self.trusts_checkpoints)
        return self._load(filename, content, strict, revise_keys)

    def _load(
        self,
        path: str,
        content: dict[str, Any],
        strict: bool,
        revise_keys: Sequence[tuple[str, str]] = MODULE_PREFIX,
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint into the model, and return its content, whose weights hooks see, too.

        Raises:
            CheckpointError: the weights do not fit or are not finite (see :func:`load_weights`), or the averaged
                weights or the optimizer of a run that is resumed are not finite.
        """
        model = unwrapped(self.model)
        trained = lists_of_checkpoint(content)
        wanted = class_lists(self._metainfo())
        if self.resumed_from is not None:
            _check_resumable(model, path, content, self.allows_nonfinite)
            if any(trained.get(kind, names) != names for kind, names in wanted.items()):
                raise CheckpointError(
                    refusal(path, f"its classes are {trained}, and those of the training data are {wanted}")
                )
        if self._train_loop is None:
            say_differences(self.cfg, content, path)
        weights = own_names(weights_of(content, path), model, revise_keys)
        weights = matched_by_name(model, weights, trained, wanted, path, strict)
        if self.resumed_from is not None and first_hook(self.hooks, EMAHook) is None:
            # A run without averages goes on from the weights that have been trained, and not from their averages.
            own = revised(content.get("ema_state_dict", {}), MODULE_PREFIX)
            weights.update((name, own[name]) for name in weights.keys() & own.keys())
        self.class_lists = wanted or trained
        content = {**content, "state_dict": weights}
        self.call_hook("after_load_checkpoint", checkpoint=content)
        load_weights(model, content["state_dict"], path, strict, (), self.allows_nonfinite, lists_all=True)
        self.has_loaded = True
        self.logger.info(f"weights loaded from {path}")
        return content

    def _metainfo(self) -> Any:
        """Return the meta information of the data that this run trains or tests on, which may not be read yet."""
        for loop in (self._train_loop, self._test_loop, self._val_loop):
            if loop is not None:
                return getattr(loop.dataloader.dataset, "metainfo", None)
        dataset = given_dataset(self.cfg, "test")
        given = dataset.get("metainfo") or dataset
        if class_lists(given) or not dataset:
            return given
        return getattr(DATASETS.get(dataset.get("type")), "METAINFO", None)

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
        """Write a checkpoint in mmengine's layout, which holds all that a run needs to go on.

        All processes call this, and the main one writes the file. :meth:`mmengine.runner.Runner.save_checkpoint`
        describes the arguments. ``meta`` may replace 'epoch' and 'iter', which otherwise are what is done by then; a
        hook need not say it by ``by_epoch``. After a crash, a local file is either the old one or the complete new
        one. If ``out_dir`` is not a local folder, mmengine writes the checkpoint.
        """
        self.late_numbers.read()  # Damaged weights are not saved, and the file has the newest numbers.
        self._call_kept_hooks()
        counts = {**self._counts(by_epoch), **(meta or {})}
        state = collected_state(self, counts, save_optimizer, save_param_scheduler)
        backend = get_file_backend(out_dir, backend_args=backend_args)
        path = backend.join_path(out_dir, filename)
        if self.rank == 0:
            self.call_hook("before_save_checkpoint", checkpoint=state)
            if file_client_args is None and isinstance(backend, LocalBackend):
                write_checkpoint(state, path)
            else:
                save_elsewhere(
                    to_plain(state), path, file_client_args=file_client_args, backend_args=backend_args
                )
        if save_optimizer and path == self.message_hub.get_info("last_ckpt"):
            self._saved_at = counts["iter"]

    def _counts(self, by_epoch: bool) -> dict[str, int]:
        """Return the epochs and the iterations that are done at the moment which the hooks are told of.

        Outside of hooks, ``by_epoch`` says whether an epoch or an iteration has just ended.
        """
        of_caller = "after_train_epoch" if by_epoch else "after_train_iter"
        moment = self._moment() or of_caller
        ends_epoch = moment == "after_train_epoch"
        ends_iteration = moment == "after_train_iter"
        return {"epoch": self.epoch + ends_epoch, "iter": self.iter + ends_iteration}

    def _save_interrupted(self) -> None:
        """Save a checkpoint of this iteration where the checkpoint hook saves, unless there is one already."""
        hook = first_hook(self.hooks, CheckpointHook)
        done = self.iter + 1
        hub = self.message_hub
        if hook is None or self._saved_at == done:
            return
        folder = str(hook.out_dir)
        hub.update_info("last_ckpt", os.path.join(folder, _INTERRUPTED))
        counts = {"epoch": self.epoch, "iter": done}
        self.save_checkpoint(
            folder, _INTERRUPTED, hook.file_client_args, meta=counts, backend_args=hook.backend_args
        )
        if self.rank == 0:
            name_newest(self.work_dir, hub)


def _check_resumable(model: nn.Module, path: str, content: dict[str, Any], allows_nonfinite: bool) -> None:
    """Refuse weights, averaged weights and an optimizer that are not finite. Masks of the model itself may be so."""
    masks = tuple(nonfinite_names(model.state_dict()))
    parts = {key: content.get(key) for key in ("state_dict", "ema_state_dict", "optimizer")}
    state = {place: value for place, value in leaves(parts) if not place.endswith(masks)}
    check_finite(state, path, allows_nonfinite)

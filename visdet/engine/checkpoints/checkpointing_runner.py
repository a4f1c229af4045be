"""A version of mmengine's Runner whose checkpoints are safe and resumed exactly."""

import os
import time
from collections.abc import Sequence
from typing import Any

import mmengine
import torch
from mmengine.dist import master_only
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict, _ParamScheduler
from mmengine.runner import EpochBasedTrainLoop, Runner
from mmengine.runner.checkpoint import weights_to_cpu

from visdet.checks.state_dicts import nonfinite_names

from ..console import say
from ..errors import CheckpointError, ConfigError
from ..hooks.runtime_info_hook import RuntimeInfoHook
from .accumulated_gradients import restore_gradients
from .checkpoint import read_checkpoint, register_checkpoint_readers, write_checkpoint
from .plain_state import restore_message_hub, to_plain
from .random_state import preserved_random_state, set_random_state
from .resume import (
    checkpoint_to_resume,
    decided_by_the_main_process,
    ema_remarks,
    read_on_every_process,
    restore_optimizer,
    restore_schedules,
    restoring,
)
from .temporal_states import restore_temporal_state
from .weights import check_finite, load_weights, revised, tensors_of, weights_of


class CheckpointingRunner(Runner):
    """Reads, writes and resumes checkpoints as :class:`DetRunner` describes.

    Args: see :class:`mmengine.runner.Runner`.
    """

    # These two attributes are mmengine's.
    _resume: Any
    _load_from: Any

    def setup_env(self, env_cfg: dict) -> None:
        """Set up the environment by ``env_cfg``, and let no checkpoint run code that the config does not trust."""
        register_checkpoint_readers(self._trusts_checkpoints, self._allows_nonfinite)
        self._random_state: dict[str, Any] | None = None
        self._checkpoint: tuple[str, dict] | None = None
        try:
            super().setup_env(env_cfg)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"env_cfg cannot be used: {error}") from error

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
        lacking = [
            key for key in ("optimizer", "message_hub", "meta") if not isinstance(checkpoint.get(key), dict)
        ]
        lacking = lacking or _incomplete_parts(checkpoint)
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

    @property
    def _allows_nonfinite(self) -> bool:
        return bool(self.cfg.get("allow_nonfinite_weights", False))

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
        # Hooks load these weights, too.
        checkpoint = {**checkpoint, "state_dict": revised(weights_of(checkpoint, filename), revise_keys)}
        if "message_hub" in checkpoint:
            checkpoint["message_hub"] = restore_message_hub(checkpoint["message_hub"])
        self.call_hook("after_load_checkpoint", checkpoint=checkpoint)
        model = self.model.module if is_model_wrapper(self.model) else self.model
        load_weights(model, checkpoint["state_dict"], filename, strict, (), self._allows_nonfinite)
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
            CheckpointError: the file is missing or damaged, or a part of it does not fit this run.
        """
        if self._checkpoint is None:
            self._checkpoint = (filename, read_checkpoint(filename, trust=self._trusts_checkpoints))
        content = self._checkpoint[1]
        meta = content["meta"]
        meta.pop("config", None)  # mmengine would run it as a config.
        masks = tuple(nonfinite_names(self.model.state_dict()))
        parts = {key: content.get(key) for key in ("state_dict", "ema_state_dict", "optimizer")}
        state = {key: value for key, value in tensors_of(parts, "").items() if not key.endswith(masks)}
        check_finite(state, filename, self._allows_nonfinite)
        states = meta.pop("random_states", None)
        with restoring(filename, "meta['random_states']"), preserved_random_state():
            if states is not None and len(states) == self.world_size:
                self._random_state = states[self.rank]
                set_random_state(self._random_state)  # a trial, as training restores it when it begins
            elif states is not None:
                self.logger.warning(
                    f"{filename} comes from a run with {len(states)} processes, but this run has {self.world_size}. "
                    "Its data order and random numbers differ from those of the earlier run"
                )
        remembered = meta.pop("temporal_states", None) or []
        with restoring(filename, "meta['temporal_states']"):
            restore_temporal_state(self.model, remembered, self.rank, self.world_size)
        # mmengine compares the pickles of the two, which can differ although the objects are equal. The pickles of one
        # object are the same.
        dataset_meta = getattr(self.train_dataloader.dataset, "metainfo", None)
        if to_plain(dataset_meta) == to_plain(meta.get("dataset_meta")):
            meta["dataset_meta"] = dataset_meta
        if resume_optimizer:
            self.optim_wrapper: Any = self.build_optim_wrapper(self.optim_wrapper)
            with restoring(filename, "optimizer"):
                self._check_optimizers(filename, meta.get("optimizers"), content["optimizer"])
        ends = _ends(self.param_schedulers)
        super().resume(filename, False, False, map_location)
        remarks = ema_remarks(content, self.hooks, filename)
        if resume_optimizer:
            optimizers = list(_optimizers(self.optim_wrapper).values())
            remarks += restore_optimizer(self.optim_wrapper, optimizers, content["optimizer"], filename)
        if resume_param_scheduler and self.param_schedulers is not None:
            remarks += restore_schedules(self.param_schedulers, content.get("param_schedulers"), filename)
        for remark in remarks:
            self.logger.warning(remark)
        self._resume_accumulation(filename, meta)
        kept = _ends(self.param_schedulers)
        if ends and kept != ends:
            self.logger.warning(
                f"{filename} comes from a run whose schedules end at {kept}. They are kept, although those of the "
                f"config end at {ends}. After its end, a schedule changes nothing"
            )
        self._adapt_to_epoch_length(filename, meta.get("iterations_per_epoch"))

    def _resume_accumulation(self, filename: str, meta: dict[str, Any]) -> None:
        """Restore the gradients that the next update needs, and warn if they are lost."""
        counts = [wrapper._accumulative_counts for wrapper in _wrappers(self.optim_wrapper).values()]
        needed = any(self.train_loop.iter % count for count in counts)
        saved = meta.pop("accumulated_gradients", {} if needed else None)
        with restoring(filename, "meta['accumulated_gradients']"):
            is_lost = saved is not None and not restore_gradients(self.model, self.optim_wrapper, saved)
        if is_lost:
            self.logger.warning(
                f"{filename} was saved between two updates, and the gradients that were accumulated since the first "
                "are lost: it holds none for this accumulative_counts and number of processes"
            )

    def _check_optimizers(self, filename: str, before: dict[str, str] | None, state: dict) -> None:
        """Raise CheckpointError if a checkpoint has the state of another optimizer or other groups of parameters.

        Checkpoints of mmengine do not say which optimizer wrote them.
        """
        now = _optimizers(self.optim_wrapper)
        kinds = {name: type(optimizer).__name__ for name, optimizer in now.items()}
        states = {"": state} if set(now) == {""} else state
        sizes = {name: _group_sizes(states.get(name, {}).get("param_groups", ())) for name in now}
        expected = {name: _group_sizes(optimizer.param_groups) for name, optimizer in now.items()}
        # mmengine saves the groups as the optimizer was built, and our wrapper goes back to them.
        as_built = {
            name: _group_sizes(getattr(wrapper, "groups_as_built", wrapper.optimizer.param_groups))
            for name, wrapper in _wrappers(self.optim_wrapper).items()
        }
        problem = None
        if before is not None and before != kinds:
            problem = f"it has the state of {_text(before)}, but the config has {_text(kinds)}"
        elif any(size not in (expected[name], as_built[name]) for name, size in sizes.items()):
            problem = (
                f"the optimizer's groups of parameters have the sizes {_text(sizes)}, but those of the config have "
                f"{_text(expected)}"
            )
        if problem:
            raise CheckpointError(
                f"checkpoint {filename} cannot be resumed: {problem}. To start training from its weights, drop "
                f"--resume and use --cfg-options load_from={filename}"
            )

    def _adapt_to_epoch_length(self, filename: str, before: int | None) -> None:
        """Count the iterations anew if an epoch had another number of them in the run that is resumed.

        The run would otherwise leave out batches of an epoch, or the whole epoch.

        Args:
            filename: the checkpoint.
            before: the number of iterations per epoch of that run, or None if the checkpoint does not say.
        """
        loop: Any = self.train_loop
        now = len(self.train_dataloader)
        if not isinstance(loop, EpochBasedTrainLoop) or before in (None, now):
            return
        done = loop._iter - loop._epoch * before
        loop._iter = loop._epoch * now + done * now // before
        self.logger.warning(
            f"{filename} comes from a run with {before} iterations per epoch, but this run has {now}. It goes on after "
            f"{loop._epoch} epochs and {done * now // before} iterations. Schedules of the learning rate keep the "
            "lengths in iterations that they had"
        )

    def restore_random_state(self) -> None:
        """Set the random state that the resumed checkpoint holds, once. A new run has none, so nothing is done."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: dict | None = None) -> None:
        """Scale the learning rate by the images of an update, divided by ``auto_scale_lr['base_batch_size']``.

        An update has the batches of all processes and of all iterations whose gradients are accumulated.
        """
        if auto_scale_lr and auto_scale_lr.get("enable"):
            for wrapper in _wrappers(optim_wrapper).values():
                base = auto_scale_lr["base_batch_size"] / wrapper._accumulative_counts
                super().scale_lr(wrapper, {**auto_scale_lr, "base_batch_size": base})

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
                "iterations_per_epoch": len(self.train_dataloader),
                "optimizers": {
                    name: type(optimizer).__name__
                    for name, optimizer in _optimizers(self.optim_wrapper).items()
                },
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


def _wrappers(wrapper: Any) -> dict[str, Any]:
    """Return the wrappers of single optimizers by their names. A single one has the name ""."""
    return dict(wrapper.items()) if isinstance(wrapper, OptimWrapperDict) else {"": wrapper}


def _optimizers(wrapper: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of a wrapper by their names. A single optimizer has the name ""."""
    return {name: one.optimizer for name, one in _wrappers(wrapper).items()}


def _incomplete_parts(checkpoint: dict[str, Any]) -> list[str]:
    """Return what a checkpoint with all parts of a training state lacks in one of them."""
    hub = checkpoint["message_hub"]
    keys = ("log_scalars", "resumed_keys", "runtime_info")
    lacking = [f"message_hub[{key!r}]" for key in keys if not isinstance(hub.get(key), dict)]
    if not isinstance(checkpoint.get("param_schedulers", []), list | dict):
        lacking.append("list of param_schedulers")
    for key in ("epoch", "iter"):
        count = checkpoint["meta"].get(key)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            lacking.append(f"count in meta[{key!r}], but {count!r}")
    return lacking


def _ends(schedulers: Any) -> list[int]:
    """Return where schedules end, in epochs or iterations. The list is empty if they have not been built."""
    lists = schedulers.values() if isinstance(schedulers, dict) else [schedulers or []]
    return [
        schedule.end for schedules in lists for schedule in schedules if isinstance(schedule, _ParamScheduler)
    ]


def _group_sizes(groups: Sequence[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _text(by_name: dict[str, Any]) -> str:
    return ", ".join(f"{value} ({name})" if name else str(value) for name, value in by_name.items())


def _states(schedulers: list | dict) -> list | dict:
    """Return the states of schedulers, which are given as a list or as a dict of lists by the names of optimizers.

    A function, which a checkpoint cannot hold, is left out: OneCycleLR has one, which a new scheduler has, too.
    """
    if isinstance(schedulers, dict):
        return {name: _states(of_one_optimizer) for name, of_one_optimizer in schedulers.items()}
    return [
        {name: value for name, value in scheduler.state_dict().items() if not callable(value)}
        for scheduler in schedulers
    ]

"""The sections of a config: their types, and checks that concern several of them."""

from collections.abc import Sequence
from typing import Annotated, Any

from visdet.checks.arguments import Positive, Range, Seed, checked_value
from visdet.errors import ConfigError

_STAGES = ("train", "val", "test")
_Section = dict | None
_Hooks = dict[str, dict | None]
# The top-level keys and their types. Classes that are built from a section know what may stand in it.
SECTIONS: dict[str, Any] = {
    # The arguments of mmengine's Runner, which takes seconds to import.
    "model": dict,
    "work_dir": str | None,
    **dict.fromkeys((f"{stage}_dataloader" for stage in _STAGES), _Section),
    **dict.fromkeys((f"{stage}_cfg" for stage in _STAGES), _Section),
    "auto_scale_lr": _Section,
    "optim_wrapper": _Section,
    "param_scheduler": dict | list[dict] | None,
    **dict.fromkeys(("val_evaluator", "test_evaluator"), dict | list[dict] | None),
    "default_hooks": _Hooks | None,
    "custom_hooks": list[dict] | None,
    "data_preprocessor": _Section,
    "load_from": str | None,
    "resume": bool | str | None,
    "launcher": str | None,
    "env_cfg": dict[str, Any],
    "log_processor": _Section,
    "log_level": int | str,
    "visualizer": _Section,
    "default_scope": str | None,
    "randomness": dict,
    "experiment_name": str | None,
    # mmengine's Runner reads some of these from the config, and this package the others.
    "activation_checkpointing": str | list[str] | None,
    "allow_nonfinite_weights": bool | None,
    "compile": bool | dict | None,
    "custom_imports": _Section,
    "efficient_conv_bn_eval": str | list[str] | None,
    "find_unused_parameters": bool | None,
    "graph": bool | None,
    "model_wrapper_cfg": _Section,
    "runner_type": str | None,
    "strict_load": bool | None,
    "sync_bn": str | None,
    "trust_checkpoint": bool | None,
}

# The numbers of which mmengine or torch would complain only after the data have been read, or not at all.
_NUMBERS = {
    **{f"{stage}_dataloader.batch_size": Positive for stage in _STAGES},
    **{f"{stage}_dataloader.num_workers": Annotated[int, Range(0, 512)] for stage in _STAGES},
    "log_processor.window_size": Positive,
    "randomness.seed": Seed | None,
    "randomness.deterministic": bool,
}


def check_sections(cfg: Any) -> None:
    """Check the types of the sections of a config.

    Raises:
        InvalidInputError: one does not fit. The message names it, what is expected and what was given.
    """
    for key in SECTIONS.keys() & set(cfg):
        checked_value(key, cfg[key], SECTIONS[key])
    for path, kind in _NUMBERS.items():
        section, key = path.split(".")
        if isinstance(given := cfg.get(section), dict) and key in given:
            checked_value(path, given[key], kind)


def check_counting(cfg: Any) -> None:
    """Check that schedules and checkpoints do not count epochs where training counts iterations and has no epochs.

    Raises:
        ConfigError: one does, so that it would never act.
    """
    train_cfg = cfg.get("train_cfg")
    if (
        not train_cfg
        or not is_iteration_based(train_cfg)
        or train_cfg.get("type") not in (None, "IterBasedTrainLoop")
    ):
        return
    checkpoint = (cfg.get("default_hooks") or {}).get("checkpoint") or {"by_epoch": False}
    parts = [("default_hooks.checkpoint", checkpoint)]
    for schedule in given_schedules(cfg):
        # A plateau is looked for after each validation.
        if isinstance(schedule, dict) and "ReduceOnPlateau" not in str(schedule.get("type")):
            parts.append(("param_scheduler", schedule))
    for name, part in parts:
        kind = part.get("type")
        if kind and part.get("by_epoch", True) is True and not part.get("convert_to_iter_based"):
            raise ConfigError(
                f"{name} ({kind}) counts epochs, but train_cfg counts iterations, so that it would never "
                "act. Give it by_epoch=False and its numbers in iterations"
            )


def is_iteration_based(train_cfg: dict) -> bool:
    """Return whether a ``train_cfg`` counts iterations rather than epochs."""
    return "max_iters" in train_cfg or train_cfg.get("by_epoch") is False


def given_schedules(cfg: Any) -> Sequence[Any]:
    """Return what a config says of its schedules, which it gives as one or as a list: configs or objects."""
    given = cfg.get("param_scheduler") or []
    return given if isinstance(given, list | tuple) else [given]

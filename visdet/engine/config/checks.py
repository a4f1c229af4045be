"""The sections of a config: their types, and checks that concern several of them."""

from collections.abc import Sequence
from typing import Annotated, Any

from visdet.checks.arguments import Positive, Range, Seed, checked_value
from visdet.errors import ConfigError

_Section = dict | None
_Sections = dict | list[dict] | None
_Text = str | None
_Texts = str | list[str] | None
_Switch = bool | None
_Hooks = dict[str, _Section]
_Workers = Annotated[int, Range(0, 512)]
# The top-level keys and their types. Classes that are built from a section know what may stand in it.
SECTIONS: dict[str, Any] = {
    # The arguments of mmengine's Runner, which takes seconds to import.
    "model": dict,
    "work_dir": _Text,
    "train_dataloader": _Section,
    "val_dataloader": _Section,
    "test_dataloader": _Section,
    "train_cfg": _Section,
    "val_cfg": _Section,
    "test_cfg": _Section,
    "auto_scale_lr": _Section,
    "optim_wrapper": _Section,
    "param_scheduler": _Sections,
    "val_evaluator": _Sections,
    "test_evaluator": _Sections,
    "default_hooks": _Hooks | None,
    "custom_hooks": list[dict] | None,
    "data_preprocessor": _Section,
    "load_from": _Text,
    "resume": bool | str | None,
    "launcher": _Text,
    "env_cfg": dict[str, Any],
    "log_processor": _Section,
    "log_level": int | str,
    "visualizer": _Section,
    "default_scope": _Text,
    "randomness": dict,
    "experiment_name": _Text,
    # mmengine's Runner reads some of these from the config, and this package the others.
    "activation_checkpointing": _Texts,
    "allow_nonfinite_weights": _Switch,
    "compile": bool | dict | None,
    "custom_imports": _Section,
    "efficient_conv_bn_eval": _Texts,
    "find_unused_parameters": _Switch,
    "graph": _Switch,
    "model_wrapper_cfg": _Section,
    "runner_type": _Text,
    "strict_load": _Switch,
    "sync_bn": _Text,
    "trust_checkpoint": _Switch,
}

# The numbers of which mmengine or torch would complain only after the data have been read, or not at all.
_NUMBERS = {
    "train_dataloader.batch_size": Positive,
    "val_dataloader.batch_size": Positive,
    "test_dataloader.batch_size": Positive,
    "train_dataloader.num_workers": _Workers,
    "val_dataloader.num_workers": _Workers,
    "test_dataloader.num_workers": _Workers,
    "log_processor.window_size": Positive,
    "randomness.seed": Seed | None,
    "randomness.deterministic": bool,
}


def section_of(cfg: Any, name: str) -> Any:
    """Return a section of a config or of another dict, or an empty one if it is missing or None."""
    return cfg.get(name) or {}


def data_preprocessor_of(cfg: Any) -> Any:
    """Return the ``data_preprocessor`` of the model of a config, or else that of the config itself."""
    return section_of(section_of(cfg, "model"), "data_preprocessor") or section_of(cfg, "data_preprocessor")


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
    train_cfg = section_of(cfg, "train_cfg")
    if not is_iteration_based(train_cfg) or train_cfg.get("type") not in (None, "IterBasedTrainLoop"):
        return
    parts = [("default_hooks.checkpoint", section_of(cfg, "default_hooks").get("checkpoint"))]
    parts += [("param_scheduler", schedule) for schedule in several_of(cfg, "param_scheduler")]
    for name, part in parts:
        if not isinstance(part, dict):
            continue
        given = part.get
        kind = given("type")
        by_epoch = given("by_epoch", True) is True
        # A plateau is looked for after each validation.
        acts = not by_epoch or given("convert_to_iter_based") or "ReduceOnPlateau" in str(kind)
        if kind and not acts:
            raise ConfigError(
                f"{name} ({kind}) counts epochs, but train_cfg counts iterations, so that it would never "
                "act. Give it by_epoch=False and its numbers in iterations"
            )


def is_iteration_based(train_cfg: dict) -> bool:
    """Return whether a ``train_cfg`` counts iterations rather than epochs."""
    return "max_iters" in train_cfg or train_cfg.get("by_epoch") is False


def several_of(cfg: Any, name: str) -> Sequence[Any]:
    """Return the configs and objects of a section that has one of them or a list, such as ``param_scheduler``."""
    given = cfg.get(name) or []
    return given if isinstance(given, list | tuple) else [given]

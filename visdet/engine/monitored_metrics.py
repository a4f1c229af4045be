"""Checks of the metrics of a run: hooks and schedules wait for those that there are, and they stay apart."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from mmengine.hooks import CheckpointHook, EarlyStoppingHook

from visdet.errors import ConfigError

from .config.checks import several_of
from .errors import nearest_names


def check_monitored(runner: Any) -> None:
    """Check, before training, that validation returns the metrics that hooks and schedules of a run wait for.

    A metric says by ``metric_names`` what it returns, where ``*`` stands for any text. If one of the evaluator does not
    say so, there is no check.

    Raises:
        ConfigError: a metric is missing. The message names the place in the config and the metrics that there are.
    """
    known: list[str] = []
    for metric in getattr(runner.evaluators.get("val"), "metrics", []):
        names = getattr(metric, "metric_names", None)
        prefix = metric.prefix
        if names is None:
            return
        known += [f"{prefix}/{name}" if prefix else name for name in names]
    for place, wanted in _monitored(runner):
        if not any(fnmatchcase(wanted, name) for name in known):
            near = nearest_names(wanted, known, count=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
            raise ConfigError(f"{place}: validation returns no metric {wanted!r}; {hint}")


def _monitored(runner: Any) -> Iterator[tuple[str, str]]:
    """Yield the places in a config that name a metric of validation, and the names."""
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook):
            for name in getattr(hook, "key_indicators", ()):  # It has them with ``save_best``.
                if name != "auto":
                    yield "save_best of the checkpoint hook", name
        elif isinstance(hook, EarlyStoppingHook):
            yield "monitor of EarlyStoppingHook", hook.monitor
    for schedule in several_of(runner.cfg, "param_scheduler"):
        if isinstance(schedule, dict) and "ReduceOnPlateau" in str(schedule.get("type")):
            yield f"param_scheduler: monitor of {schedule['type']}", schedule.get("monitor", "loss")


def undefined_metrics(values: Mapping[str, Any], metrics: Sequence[Any]) -> set[str]:
    """Return the names of the values that are NaN, or the number by which a metric says ``undefined``."""
    of_metrics = [metric.undefined for metric in metrics if hasattr(metric, "undefined")]
    return {
        name
        for name, value in values.items()
        if isinstance(value, int | float) and (value in of_metrics or math.isnan(value))
    }


def check_metrics_are_apart(metrics: Sequence[Any], section: str) -> None:
    """Refuse metrics of an evaluator that write to one file, or whose values have the same names.

    Raises:
        ConfigError: two metrics have the same ``outfile_prefix`` or ``out_file``, or are of one class with the same
            ``prefix`` and ``metric_items``.
    """
    seen: set[tuple] = set()
    for metric in metrics:
        kind = type(metric).__name__
        paths = {key: getattr(metric, key, None) for key in ("outfile_prefix", "out_file")}
        claims: set[tuple] = {(key, os.path.abspath(path), "") for key, path in paths.items() if path}
        if not (getattr(metric, "format_only", False) or paths["out_file"]):
            items = getattr(metric, "metric_items", [""])
            claims |= {("prefix", metric.prefix, f"{kind} {item}") for item in items}
        if clash := seen & claims:
            key, value, _ = min(clash)
            raise ConfigError(
                f"{section}: two metrics, of which one is a {kind}, have {key}={value!r}, so that the results of one "
                f"would replace those of the other. Give each a {key} of its own"
            )
        seen |= claims

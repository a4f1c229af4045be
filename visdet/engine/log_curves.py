"""Curves of loss, learning rate and AP from the logs of runs."""

import json
import re
from collections import defaultdict
from pathlib import Path

from visdet.errors import UserError, listed
from visdet.files.writing import written_whole
from visdet.structures.fonts import legible

Curve = dict[int, float]
# The names of the curves in each panel. Those of single classes have two slashes.
_PANELS = {
    "loss": re.compile("loss(_.*)?"),
    "learning rate": re.compile("(base_)?lr"),
    "AP": re.compile("([^/]*/)?[^/]*mAP(_50|_75)?"),
}


def read_scalars(path: str | Path) -> dict[str, Curve]:
    """Return the curves of a run as {name: {step: value}}.

    Args:
        path: a JSON-lines file of scalars, or a folder. In a folder, every ``vis_data/scalars.json`` below it is read
            in the order of the paths, which contain the starting times. A resumed run thus continues the curves and
            replaces the steps that it trained again. A run that began anew replaces the curves.

    Raises:
        UserError: there is no such log, the folder has logs of several runs, or there is no number.
    """
    given = Path(path)
    files = [given] if given.is_file() else sorted(given.rglob("vis_data/scalars.json"))
    if not files:
        raise UserError(f"{path}: there is no log (no vis_data/scalars.json) in or below it")
    runs = {file.resolve().parents[2] for file in files}
    if len(runs) > 1:
        raise UserError(f"{path} has the logs of several runs; name the runs to draw: {listed(sorted(runs))}")
    curves: dict[str, Curve] = defaultdict(dict)
    for file in files:
        logs = [log.read_text(errors="replace") for log in file.parent.parent.glob("*.log")]
        if logs and not any("resumed from " in log for log in logs):  # A run that began anew.
            curves.clear()
        first_step_of_file: dict[str, int] = {}
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
            try:
                record = json.loads(line)
                step = int(record.pop("step"))
            except (ValueError, OverflowError, KeyError, TypeError, AttributeError):
                if number == 1:
                    raise UserError(f"{file}: line 1 is not a record of scalars: {line[:80]!r}") from None
                continue  # A run that was killed may leave an incomplete line.
            for name, value in record.items():
                if isinstance(value, int | float):
                    curve = curves[name]
                    if first_step_of_file.setdefault(name, step) == step:
                        curve = {s: v for s, v in curve.items() if s < step}
                    curves[name] = curve
                    curve[step] = value
    if not curves:
        raise UserError(f"{path}: the log holds no number yet")
    return dict(curves)


def draw_curves(runs: dict[str, dict[str, Curve]], out_file: str) -> None:
    """Draw the losses, the learning rates and the APs of runs into a PNG, in one panel each.

    A panel without a curve is left out.

    Args:
        runs: the curves of each run by the label of the run; see :func:`read_scalars`.
        out_file: the PNG file. Its folder is created if necessary.

    Raises:
        UserError: no panel has a curve, or matplotlib does not know the format of the file.
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    labels, file = legible(*runs)
    font = FontProperties(fname=None if all(map(str.isascii, labels)) else file, size=8)
    names = sorted(set().union(*runs.values()))
    panels = {}
    for title, pattern in _PANELS.items():
        if chosen := list(filter(pattern.fullmatch, names)):
            panels[title] = chosen
    count = len(panels)
    if not panels:
        raise UserError(f"{', '.join(labels)}: the log holds neither a loss nor a learning rate nor an AP")
    figure = Figure(figsize=(6 * count, 4), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if Path(out_file).suffix.lstrip(".").lower() not in formats:
        raise UserError(f"the file of the curves must end in one of .{', .'.join(formats)}, got {out_file}")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis, (title, chosen) in zip(axes, panels.items(), strict=True):
        for label, curves in zip(labels, runs.values(), strict=True):
            prefix = f"{label}: " if len(runs) > 1 else ""
            for name in filter(curves.get, chosen):
                steps, values = zip(*sorted(curves[name].items()), strict=True)
                short = name.rpartition("/")[2]
                marker = "o" if len(steps) < 20 else None
                axis.plot(steps, values, marker=marker, linewidth=1.2, label=prefix + short)
        axis.set(title=title, xlabel="iteration or epoch of validation" if title == "AP" else "iteration")
        axis.grid(alpha=0.3)
        axis.legend(prop=font)
        limits = axis.dataLim
        # A logarithmic axis would leave out negative losses.
        if title == "loss" and limits.y0 >= 0 < limits.y1:
            axis.set_yscale("log")
    with written_whole(out_file) as partial:
        figure.savefig(partial, dpi=110)

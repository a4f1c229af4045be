"""Say what a checkpoint or an exported folder is: its model, classes, thresholds, and the steps before it.

visdet inspect work_dirs/my_config/best.pth
visdet inspect exported
"""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("file", help="a checkpoint, or the folder that visdet export has written")
    parser.add_argument("--trust-checkpoint", action="store_true", help="read types that can run code, too")


def run(file: str, trust_checkpoint: bool) -> None:
    """Run the command."""
    import os

    from visdet.engine.checkpoints.checkpoint import read_checkpoint

    if os.path.isdir(file):
        rows = exported_rows(file)
    else:
        path = os.path.expanduser(file)
        rows = checkpoint_rows(read_checkpoint(path, trust=trust_checkpoint), path, trust_checkpoint)
    for name, value in rows.items():
        if value not in (None, ""):
            print(f"{name:<12} {value}")


def checkpoint_rows(content: dict[str, Any], path: str, trust: bool = False) -> dict[str, Any]:
    """Return what a checkpoint is, in rows."""
    from visdet.engine.checkpoints.checkpoint import weights_of
    from visdet.engine.checkpoints.class_names import lists_of_checkpoint
    from visdet.engine.checkpoints.held_config import config_of, meta_of
    from visdet.engine.checkpoints.score_thresholds import measured_thresholds, told_thresholds
    from visdet.engine.config.checks import data_preprocessor_of
    from visdet.engine.config.load import given_dataset
    from visdet.errors import UserError, listed

    meta = meta_of(content)
    weights = weights_of(content, path)
    numbers = sum(value.numel() for value in weights.values() if hasattr(value, "numel"))
    rows: dict[str, Any] = {"file": path, "weights": f"{len(weights)} tensors, {numbers:,} numbers"}
    held = meta.get
    if "iter" in meta:
        rows["trained"] = f"{meta['iter']} iterations, {held('epoch')} epochs"
    rows["resumable"] = "yes" if "optimizer" in content else "no, it holds no state of an optimizer"
    rows["written"] = held("time")
    for kind, names in lists_of_checkpoint(content).items():
        ids = held("category_ids") if kind == "classes" else None
        shown = [f"{name} ({number})" for name, number in zip(names, ids or (), strict=False)]
        rows[kind] = f"{len(names)}: {listed(shown or names, 20)}"
    thresholds, origin = measured_thresholds(content)
    rows["thresholds"] = told_thresholds(thresholds, thresholds.values(), origin).partition("of scores ")[2]
    try:
        cfg = config_of(content, path, trust)
    except UserError as error:
        return rows | {"config": error}
    rows["config"] = f"{cfg.filename}, model {cfg.model.get('type')}"
    for number, step in enumerate(given_dataset(cfg, "test").get("pipeline") or (), 1):
        rows[f"step {number}"] = _text(step)
    rows["then"] = _text(data_preprocessor_of(cfg))
    return rows


def exported_rows(folder: str) -> dict[str, Any]:
    """Return what an exported folder is, in rows: those of its model.json."""
    import fnmatch
    import json
    import os
    from pathlib import Path

    from visdet.errors import InvalidInputError, MissingFileError, listed

    file = Path(folder, "model.json")
    files = sorted(os.listdir(folder))
    if not file.is_file():
        checkpoints = fnmatch.filter(files, "*.pth")
        advice = f". Give one of its checkpoints: {listed(checkpoints)}" if checkpoints else ""
        raise MissingFileError(f"{folder} is no exported folder: it has no model.json{advice}")
    try:
        record = json.loads(file.read_text("utf-8"))
        rows = {name: _text(value) for name, value in record.items()}
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(f"{file} cannot be read: {error}") from error
    return {"folder": folder, "files": ", ".join(files), **rows}


def _text(value: Any) -> str:
    """Return a value in one line, in which a step begins with its type."""
    if isinstance(value, dict):
        others = ", ".join(f"{key}={item!r}" for key, item in value.items() if key != "type")
        return f"{value['type']}({others})" if "type" in value else others
    return str(value)

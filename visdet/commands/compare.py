"""Say at which step two runs part, and in which tensor first.

visdet compare work_dirs/first work_dirs/second
visdet compare work_dirs/first/iter_100.pth work_dirs/second/iter_100.pth

The numbers of the same steps in the logs are compared, but for times and memory, and then what a run goes on from in
the checkpoints of the same names, in order: weights, optimizer, random states. The exit status is 1 if the runs differ.
"""

import argparse
from pathlib import Path
from typing import Any

_OF_THE_MACHINE = {"time", "data_time", "memory"}
_OF_PROCESSES = ("random_states", "temporal_states", "accumulated_gradients")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs=2, metavar="RUN", type=Path, help="the folder of a run, or a checkpoint"
    )


def run(runs: list[Path]) -> int:
    """Run the command, and return its exit status."""
    from visdet.engine import read_checkpoint, read_scalars, say
    from visdet.errors import InvalidInputError, listed

    first, second = runs
    pairs = [(first, second)]
    found = None
    if first.is_dir() and second.is_dir():
        curves = read_scalars(first)
        others = read_scalars(second)
        numbers = _numbers(curves, others)
        found = parting(numbers, _numbers(others, curves))
        say(f"logs, {len(numbers)} numbers: {found or 'equal'}" if numbers else "logs: no step in common")
        names = _checkpoints(first)
        other_names = _checkpoints(second)
        in_order = sorted(sorted(names & other_names), key=len)  # iter_9.pth, iter_10.pth
        pairs = [(first / name, second / name) for name in in_order]
        if not pairs:
            raise InvalidInputError(
                f"no checkpoint has the same name in both runs: {first} has {listed(sorted(names)) or 'none'}, and "
                f"{second} has {listed(sorted(other_names)) or 'none'}"
            )
    for one, other in pairs:
        difference = parting(state_of(read_checkpoint(one)), state_of(read_checkpoint(other)))
        say(f"{one.name}: {difference or 'equal'}")
        if difference:
            return 1
    return int(found is not None)


def parting(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Return the first place at which two dicts of tensors and numbers differ, and how much, or None if they do not."""
    from torch.testing import assert_close

    for place in first | second:
        try:
            assert_close(second.get(place), first.get(place), rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            return f"first difference in {place}. {error}".replace("\n", " ")
    return None


def state_of(content: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors and numbers of a checkpoint that a run goes on from, by their places."""
    from torch import Tensor

    from visdet.engine.config.text import leaves

    described = content.get("meta", {})
    state = {part: value for part, value in content.items() if part not in ("meta", "message_hub")}
    found = leaves(state | {part: described.get(part) for part in _OF_PROCESSES})
    return {place: value for place, value in found if isinstance(value, Tensor | int | float)}


def _numbers(curves: dict[str, dict[int, float]], others: dict[str, dict[int, float]]) -> dict[str, float]:
    """Return the numbers in the curves of a log, step after step, of which the other one has the same step."""
    numbers: dict[tuple[int, str], float] = {}
    for name in (curves.keys() & others.keys()) - _OF_THE_MACHINE:
        numbers |= {(step, name): value for step, value in curves[name].items() if step in others[name]}
    return {f"{name} at step {step}": numbers[step, name] for step, name in sorted(numbers)}


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.pth") if not path.is_symlink()}

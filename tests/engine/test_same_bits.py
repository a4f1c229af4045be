"""Deterministic runs are equal to the bit, and runs that are not are told apart."""

import re

import pytest
import torch
from toy_detection import ToyDetector
from toy_run import train

from visdet.commands import main
from visdet.engine import UserError, read_checkpoint, write_checkpoint
from visdet.registry import MODELS

DETERMINISTIC = {"seed": None, "deterministic": True}


pytestmark = pytest.mark.usefixtures("deterministic_for_a_test")


def compare(*runs) -> int:
    """Return the exit status of ``visdet compare``."""
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, runs)])
        raise SystemExit(0)
    return ended.value.code


@pytest.mark.parametrize(
    "changed", [{}, {"train_dataloader__num_workers": 2}], ids=["the-same", "two-workers"]
)
def test_deterministic_runs_without_a_seed_are_equal(tmp_path, stdout, changed):
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, options in zip(runs, ({}, changed), strict=True):
        found = train(run, randomness=DETERMINISTIC, default_hooks__checkpoint__interval=10, **options)
        assert found.seed == 0 and torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    stdout()
    assert compare(*runs) == 0
    said = stdout()
    assert re.match(r"logs, \d\d numbers: equal\n", said)
    assert {"iter_10.pth: equal", "iter_20.pth: equal"} <= set(said.splitlines())


@pytest.mark.parametrize(
    "place", ["state_dict.norm.weight", "optimizer.state.3.exp_avg", "random_states.0.torch"]
)
def test_the_first_tensor_that_differs_is_named(tmp_path, stdout, place):
    train(tmp_path, train_cfg__max_iters=2)
    content = read_checkpoint(tmp_path / "iter_2.pth")
    part: dict = content if place.split(".")[0] in content else content["meta"]
    *keys, name = place.split(".") if "norm" not in place else ("state_dict", "norm.weight")
    for key in keys:
        part = part[int(key) if key.isdigit() else key]
    part[name].view(-1)[1] += 2
    write_checkpoint(content, tmp_path / "changed.pth")
    assert compare(tmp_path / "iter_2.pth", tmp_path / "changed.pth") == 1
    said = stdout()
    assert f"first difference in {place}." in said and "Greatest absolute difference: 2" in said


def test_the_step_at_which_runs_part_is_named(tmp_path, capsys):
    first, second = runs = [tmp_path / "first", tmp_path / "second"]
    for run, end in zip(runs, (7, 12), strict=True):
        schedule = {"type": "ConstantLR", "factor": 0.5, "end": end, "by_epoch": False}
        train(run, param_scheduler=[schedule], default_hooks__checkpoint__save_best=None)
    capsys.readouterr()
    assert compare(*runs) == 1
    said = capsys.readouterr().out
    assert " numbers: first difference in d0.loss_cls at step 10. Scalars are not equal!" in said
    assert re.search(r"^iter_\d+\.pth: first difference in state_dict\.", said, re.M)
    for path in second.glob("*.pth"):
        path.unlink()
    for log in second.glob("*/vis_data/scalars.json"):
        log.write_text('{"loss": 1.0, "step": 99}\n')
    assert compare(*runs) == 1
    said = capsys.readouterr()
    assert said.out == "logs: no step in common\n"
    assert re.search(r"no checkpoint has the same name .* has iter_10\.pth.*second has none", said.err)
    assert compare(first, first / "iter_10.pth") == 1
    assert "first is a folder; give one of its files: best.pth, iter_10.pth" in capsys.readouterr().err


@MODELS.register_module()
class Unordered(ToyDetector):
    """A detector that calls an operator which torch has in no deterministic form."""

    def forward(self, inputs, data_samples=None, mode="tensor"):
        first = torch.zeros(1, dtype=torch.long)
        return super().forward(inputs.put_(first, inputs.flatten()[:1]), data_samples, mode)


def test_an_operator_without_a_deterministic_form_ends_the_run_by_its_name(tmp_path):
    with pytest.raises(
        UserError, match="the run is deterministic, but put_ has no deterministic form on this"
    ):
        train(tmp_path, model={"type": "Unordered"}, randomness=DETERMINISTIC)

"""Updates of several iterations: where a run is interrupted between them."""

import pytest
import torch
from toy_run import (
    EPOCHS,
    check_rest,
    losses,
    toy_runner,
    train,
)

AT = 8  # Updates follow iterations 5, 10, 15 and so on, and an epoch has six iterations.
OPTIONS = {
    "optim_wrapper__accumulative_counts": 5,
    "default_hooks__checkpoint": {"by_epoch": False, "interval": AT, "max_keep_ckpts": 10},
}
EMA = [{"type": "EMAHook"}]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"train_cfg__max_iters": 24}, id="iterations"),
        pytest.param(EPOCHS, id="epochs"),
        pytest.param({"train_cfg__max_iters": 24, "optim_wrapper__type": "AmpOptimWrapper"}, id="bfloat16"),
        pytest.param({"train_cfg__max_iters": 24, "custom_hooks": EMA}, id="ema"),
    ],
)
def test_a_run_interrupted_between_two_updates_goes_on_as_if_it_had_not_been(tmp_path, options, stdout):
    whole = train(tmp_path / "whole", **OPTIONS, **options)
    stdout()
    rest = train(tmp_path / "rest", resume=str(tmp_path / "whole" / f"iter_{AT}.pth"), **OPTIONS, **options)
    assert " lost" not in stdout()
    check_rest(whole, rest, AT)


def test_gradients_are_saved_between_updates_only(tmp_path):
    options = {**OPTIONS, "default_hooks__checkpoint": {"by_epoch": False, "interval": 5}}
    train(tmp_path, train_cfg__max_iters=12, **options)  # The last iteration updates in any case.
    for step in (5, 10, 12):
        assert torch.load(tmp_path / f"iter_{step}.pth")["meta"]["accumulated_gradients"] is None
    longer = toy_runner(tmp_path, resume="auto", train_cfg__max_iters=14, **options)
    longer.train()
    assert list(losses(longer)) == [13, 14]


@pytest.mark.parametrize("counts", [1, 3])
def test_gradients_of_other_updates_are_reported_as_lost(tmp_path, counts, stdout):
    train(tmp_path, train_cfg__max_iters=AT + 1, **OPTIONS)
    options = {**OPTIONS, "optim_wrapper__accumulative_counts": counts, "train_cfg__max_iters": AT + 2}
    train(tmp_path / "rest", resume=str(tmp_path / f"iter_{AT}.pth"), **options)
    assert "between two updates" in stdout()

"""Losses and norms that go to the host while the GPU goes on. Here, the CPU does as if its numbers came late."""

import json

import pytest
import torch
from mmengine.hooks import Hook
from toy_run import toy_runner

from visdet.engine import NonFiniteLossError
from visdet.execution.host_copy import HostCopy


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(HostCopy, "is_there", property(lambda self: False))


class Written(Hook):
    """Keeps the number of losses and of norms that are in the message hub after each iteration."""

    priority = "VERY_LOW"

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        scalars = runner.message_hub.log_scalars
        counts = [
            len(scalars[f"train/{name}"].data[0])
            for name in ("loss_cls", "grad_norm")
            if f"train/{name}" in scalars
        ]
        self.counts.append((*counts, 0)[:2])


def run(folder, **options):
    """Return the lines of the log of a run, without times, and the numbers that were written."""
    options = {"default_hooks__checkpoint__interval": 7, "train_cfg__val_interval": 100, **options}
    runner = toy_runner(folder, train_cfg__max_iters=14, **options)
    written = Written()
    runner.register_hook(written)
    runner.train()
    lines = [json.loads(line) for line in next(folder.rglob("scalars.json")).read_text().splitlines()]
    kept = ("loss", "loss_cls", "loss_bbox", "grad_norm", "lr", "step")
    return [{name: line[name] for name in kept if name in line} for line in lines], written.counts


def test_the_log_has_every_number(tmp_path, request):
    expected, at_once = run(tmp_path / "at_once")
    request.getfixturevalue("late")
    found, counts = run(tmp_path / "late")
    assert found == expected and len(found) >= 2 and "grad_norm" in found[0]
    assert at_once == [(i, i) for i in range(1, 15)]
    # Lines are due after iterations 5 and 10, checkpoints after 7 and 14, and the data are through after 6. The first
    # numbers are written at once.
    due = {1, 5, 6, 7, 10, 14}
    assert counts == [(i, i) if i in due else (i - 1, i - 1) for i in range(1, 15)]


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("at", [8, 11, 12, 14])
def test_a_bad_loss_stops_before_it_is_saved(tmp_path, at):
    with pytest.raises(NonFiniteLossError, match=f"^iteration {at}: loss = nan, loss_cls = nan"):
        run(tmp_path, model__explode_at=at, default_hooks__checkpoint__interval=4)
    saved = sorted(int(path.stem.removeprefix("iter_")) for path in tmp_path.glob("iter_*.pth"))
    assert saved == [i for i in (4, 8, 12, 14) if i < at]


@pytest.mark.usefixtures("late")
def test_a_bad_loss_is_named_if_the_next_iteration_fails_for_it(tmp_path):
    runner = toy_runner(tmp_path, model__explode_at=3)

    def refuse(module, inputs):
        if not module.weight.isfinite().all():
            raise RuntimeError("the weights are no numbers")

    runner.model.conv.register_forward_pre_hook(refuse)
    with pytest.raises(NonFiniteLossError, match="iteration 3: loss = nan") as caught:
        runner.train()
    assert str(caught.value.__context__) == "the weights are no numbers"


def test_numbers_of_any_kind_keep_their_value():
    one = torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True)
    time = torch.tensor(1764410000.123, dtype=torch.float64)
    numbers = {"loss": one, "time": time, "big": torch.tensor(2**40), "count": 2**53 - 1, "small": 1e-300}
    copy = HostCopy(numbers)
    expected = {"loss": 2.5, "time": 1764410000.123, "big": 2**40, "count": 2**53 - 1, "small": 1e-300}
    assert copy.is_there and copy.read() == expected
    assert HostCopy({}).read() == {}


@pytest.mark.cuda
def test_a_copy_does_not_wait_for_the_gpu():
    x = torch.ones((), device="cuda")
    HostCopy(
        {"loss": x * 2, "given": 1.0}
    ).read()  # The first pinned memory is allocated, which waits for the GPU.
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    copy = HostCopy({"loss": x * 2, "given": 1.0})
    assert not torch.cuda.current_stream().query() and not copy.is_there
    x.zero_()
    assert copy.read() == {"loss": 2.0, "given": 1.0}


@pytest.mark.cuda
def test_a_run_on_a_gpu_logs_what_it_logs_if_it_waits(tmp_path, monkeypatch):
    found, counts = run(tmp_path / "late")
    monkeypatch.setattr(HostCopy, "is_there", property(lambda self: True))
    expected, at_once = run(tmp_path / "at_once")
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert counts != at_once and counts[-1] == at_once[-1]

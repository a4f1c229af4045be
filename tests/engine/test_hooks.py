"""Progress, reports, guards and pictures."""

import errno
import io
import itertools
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from disk import names_in
from PIL import Image
from programs import ROOT
from rich.console import Console
from toy_run import toy_runner, train, weights

from visdet.engine import ConfigError, NonFiniteLossError
from visdet.engine.errors import explain
from visdet.engine.hooks import progress_hook
from visdet.engine.hooks.check_invalid_loss_hook import CheckInvalidLossHook
from visdet.engine.process import console as console_module
from visdet.errors import MissingPackageError

TOY = Path(__file__).resolve().parent
DRAWING = {
    "visualizer__type": "DetLocalVisualizer",
    "default_hooks__visualization": {"type": "DetVisualizationHook", "num_val_pictures": 3},
}


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """A console that believes to be a terminal, and what it has written."""
    screen = io.StringIO()
    shared = Console(file=screen, force_terminal=True, width=120, highlight=False, color_system=None)
    for module in (console_module, progress_hook):
        monkeypatch.setattr(module, "console", shared)
    return screen


NUMBER = r"\d+\.\d+"
SAID = [
    r"model      ToyDetector, 0\.3 k parameters \(0\.3 k trained\)",
    r"train      24 images, batch 4 x 1 process, 20 iterations",
    r"val        13 images, every 10 iterations",
    r"optimizer  AdamW, learning rate 1\.0e-02, float32",
    r"start      from scratch",
    rf"iter 5/20  loss {NUMBER}  \(cls {NUMBER}  bbox {NUMBER}  other layers {NUMBER}\)  lr 1\.00e-02  "
    rf"{NUMBER} s/it  \(data {NUMBER}\)  eta 0:00:\d\d",
    rf"val  iter 10/20  toy/accuracy {NUMBER}  toy/images 13  \({NUMBER} s\)",
    r"  last checkpoint +.*/a run/iter_20\.pth",
    r"  tensorboard --logdir '.*/a run'",
]


def test_a_pipe_gets_the_summary_one_line_per_interval_and_the_report(tmp_path, stdout):
    runner = train(tmp_path / "a run")
    printed = stdout()
    for line in SAID:
        assert re.search(f"^{line}$", printed, re.M), line
    assert printed.count("\niter ") == 4 and printed.count("\n") < 30
    assert not re.search(r"\r|\x1b|System environment|mmengine - INFO", printed)
    log = Path(runner.logger.log_file).read_text()
    for text in (
        "System environment",
        "Hooks will be executed",
        "Config:",
        "Iter(train) [20/20]",
        "d0.loss_cls",
    ):
        assert text in log


def test_a_pipe_hears_after_ten_iterations_and_each_minute(tmp_path, stdout, monkeypatch):
    monkeypatch.setattr(progress_hook, "_LINE_SECONDS", 0.0)
    ema = [dict(type="EMAHook", momentum=0.05)]
    train(tmp_path, default_hooks__logger__interval=50, train_cfg__max_iters=4, custom_hooks=ema)
    printed = stdout()
    assert re.findall(r"^iter (\d+)/4 .* s/it", printed, re.M) == ["1", "2", "3", "4"]
    assert re.search(r"^EMA        ExponentialMovingAverage, momentum 0\.05$", printed, re.M)
    monkeypatch.setattr(progress_hook, "_LINE_SECONDS", 60.0)
    train(tmp_path, resume="auto", default_hooks__logger__interval=50, train_cfg__max_iters=20)
    assert re.findall(r"^iter (\d+)/20 ", stdout(), re.M) == ["14", "20"]


def test_a_clock_that_is_set_back_gives_no_negative_times(tmp_path, stdout, monkeypatch):
    hours = itertools.count(500_000, -1)
    monkeypatch.setattr(time, "time", lambda: next(hours) * 3600.0)
    runner = train(tmp_path)
    scalars = runner.message_hub.log_scalars
    for name in ("train/time", "train/data_time", "val/time", "val/data_time"):
        times = scalars[name].data[0]
        assert min(times) >= 0 and max(times) < 60
    assert 0 <= runner.message_hub.get_info("eta") < 600
    assert not re.search(r" -\d", stdout())


def test_a_full_disk_names_the_folder_of_the_run(tmp_path, monkeypatch):
    # The write to an open file fails in this way, without a name.
    error = OSError(errno.ENOSPC, "No space left on device")
    runner = toy_runner(tmp_path)
    monkeypatch.setattr(runner.visualizer, "add_scalars", Mock(side_effect=error))
    with pytest.raises(OSError) as caught:
        runner.train()
    assert explain(caught.value) == f"cannot use {tmp_path}: No space left on device"


def test_the_losses_of_tasks_are_told_apart():
    layers = {"det_loss_cls_0": 2.0, "det_loss_box_1": 3.0, "d0.loss_cls": 1.0, "map_loss_cls_0": 4.0}
    told = progress_hook._loss_parts({"loss_depth": 1.0, **layers})
    assert told == "depth 1.0000  det 5.0000  map 4.0000  other layers 1.0000"


@pytest.mark.parametrize(("batch_size", "is_said"), [(24, False), (25, True)])
def test_a_batch_larger_than_the_data_set_is_said(tmp_path, stdout, batch_size, is_said):
    train(tmp_path, train_dataloader__batch_size=batch_size, train_cfg__max_iters=1)
    assert ("A batch is larger than the data set" in stdout()) == is_said


def test_warnings_reach_the_terminal_and_remarks_of_mmengine_do_not(tmp_path, stdout):
    runner = toy_runner(tmp_path)
    runner.logger.warning("look [here]")
    runner.logger.warning('"FileClient" will be deprecated in future')
    runner.logger.info("only in the file")
    assert stdout() == "warning: look [here]\n"


def test_a_terminal_gets_a_live_bar(tmp_path, terminal, monkeypatch):
    monkeypatch.setattr(progress_hook, "_REFRESH_SECONDS", 0.0)
    train(tmp_path)
    screen = terminal.getvalue()
    assert re.search(r"train .*20/20 .*loss \d+\.\d+  lr \d\.\d\de-\d\d .* eta 0:00:00", screen)
    assert re.search(r"val .*3/3", screen)
    assert "iter 5/20" not in screen, "the bar replaces the plain lines"
    assert re.search(r"val  iter 20/20  toy/accuracy", screen), "results stay above the bar"
    assert screen.index("from scratch") < screen.index("\x1b[?25l"), "the summary comes before the bar"
    assert screen.endswith(f"visdet curves {tmp_path}\n"), "and the report after it"


def test_a_failing_run_gives_the_terminal_back(tmp_path, terminal):
    with pytest.raises(NonFiniteLossError):
        train(tmp_path, model__explode_at=4)
    screen = terminal.getvalue()
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l"), "the cursor is shown again"


@pytest.mark.slow
def test_a_real_terminal_in_a_process_of_its_own(tmp_path):
    """Workers are forked while the bar is up; their output and warnings must not stop the run."""
    command = [sys.executable, "tools/train.py", str(TOY / "toy_config.py"), "--work-dir", str(tmp_path)]
    command += ["--cfg-options", "train_dataloader.num_workers=1", "val_dataloader.num_workers=1"]
    controller, terminal_end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TOY}", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=terminal_end, stderr=terminal_end, stdin=subprocess.DEVNULL
    )
    os.close(terminal_end)
    screen = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        screen += part
    assert process.wait(timeout=120) == 0, screen.decode()
    text = screen.decode()
    assert "\x1b[?25l" in text and "\x1b[?25h" in text, "the cursor was hidden and shown again"
    assert re.search(r"val  iter 20/20  toy/accuracy", text)


def test_an_early_stop_says_when_and_why(tmp_path, stdout):
    hook = dict(type="EarlyStoppingHook", monitor="toy/accuracy", patience=1, min_delta=2.0, rule="greater")
    train(tmp_path, custom_hooks=[hook], train_cfg__val_interval=5)
    reason = "EarlyStoppingHook: toy/accuracy is .*, and 1 validations brought no more"
    found = re.search(rf"stopped after (5|10) of 20 iterations: {reason}", stdout())
    assert found and (tmp_path / f"iter_{found[1]}.pth").is_file()


def test_a_logger_whose_package_is_missing_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    drawing = dict(type="DetLocalVisualizer", vis_backends=[dict(type="WandbVisBackend")])
    with pytest.raises(MissingPackageError, match=r"visualizer\.vis_backends .*pip install wandb"):
        train(tmp_path, visualizer=drawing)


def test_a_loss_that_is_no_number_stops_before_it_is_saved(tmp_path):
    with pytest.raises(NonFiniteLossError) as caught:
        train(tmp_path, model__explode_at=12, default_hooks__checkpoint__interval=4)
    message = str(caught.value)
    assert message.startswith("iteration 12: loss = nan, loss_cls = nan, d0.loss_cls = nan. Training stopped")
    assert str(tmp_path / "iter_10.pth") in message, "saved again after validation, for the best score"
    assert not (tmp_path / "iter_12.pth").exists()


SKIP = {"default_hooks__invalid_loss": {"type": "CheckInvalidLossHook", "action": "skip"}}


def said_while_skipping(runner, iteration, stdout):
    """Run, see that the iteration leaves a weight alone and the next one does not, and return what was printed."""
    after = {}
    runner.register_hook(Snapshots(after))
    runner.train()
    before, skipped, following = (after[iteration + step] for step in (-1, 0, 1))
    assert torch.equal(skipped, before) and not torch.equal(following, skipped)
    return " ".join(stdout().split())


@pytest.mark.parametrize("explodes_gradients", [True, False])
def test_skipping_leaves_the_weights_alone(tmp_path, stdout, explodes_gradients):
    options = {"model__explode_at": 3, "model__explodes_gradients": explodes_gradients}
    runner = toy_runner(tmp_path, **options, train_cfg__max_iters=6, **SKIP)
    printed = said_while_skipping(runner, 3, stdout)
    assert all(torch.isfinite(value).all() for value in weights(runner).values())
    assert "iteration 3: loss = nan" in printed and "the update was skipped" in printed


def test_skipping_gives_up_in_the_end(tmp_path):
    with pytest.raises(NonFiniteLossError, match="iteration 3"):
        train(tmp_path, model__explode_at=3, **SKIP, default_hooks__invalid_loss__max_skips=1)
    with pytest.raises(ValueError, match="action must be 'stop' or 'skip', got 'ignore'"):
        CheckInvalidLossHook(action="ignore")


def test_a_bad_gradient_of_a_good_loss_is_skipped_and_said(tmp_path, stdout):
    runner = toy_runner(tmp_path, train_cfg__max_iters=4, **SKIP)
    steps = itertools.count(1)
    runner.model.conv.weight.register_hook(lambda gradient: gradient * (torch.nan if next(steps) == 2 else 1))
    printed = said_while_skipping(runner, 2, stdout)
    assert "iteration 2: a gradient is NaN or infinite; the update was skipped" in printed
    assert printed.count("the update was") == 1


def test_a_bad_number_that_is_no_loss_does_not_matter():
    hook = CheckInvalidLossHook()
    runner = SimpleNamespace(iter=0)
    hook.after_train_iter(runner, 0, outputs={"loss": torch.tensor(1.0), "accuracy": torch.tensor(torch.nan)})


def test_skipping_needs_a_wrapper_that_can(tmp_path):
    with pytest.raises(ConfigError, match=r"needs optim_wrapper.type.*got mmengine\..*OptimWrapper"):
        train(tmp_path, optim_wrapper__type="mmengine.OptimWrapper", **SKIP)


def test_every_validation_writes_a_sheet(tmp_path):
    images = {f"{part}_dataloader__dataset__image_dir": str(tmp_path / "images") for part in ("train", "val")}
    train(tmp_path / "run", **DRAWING, **images)
    sheets = sorted((tmp_path / "run" / "val_pictures").iterdir())
    assert [sheet.name for sheet in sheets] == ["iter_10.png", "iter_20.png"]
    with Image.open(sheets[0]) as sheet:
        assert sheet.width > 500 and sheet.height > 500
    assert list((tmp_path / "run").glob("*/vis_data/events.out.tfevents*")), "TensorBoard has them too"


def test_a_visualizer_without_sheets_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"visualizer is Visualizer.*num_val_pictures=0"):
        train(tmp_path, default_hooks__visualization=DRAWING["default_hooks__visualization"])


def test_pictures_of_a_test_go_where_they_are_asked_to(tmp_path):
    options = {
        **DRAWING,
        "default_hooks__visualization__test_out_dir": str(tmp_path / "pictures"),
        "test_dataloader__dataset__image_dir": str(tmp_path / "images"),
        "test_dataloader__dataset__count": 2,
    }
    toy_runner(tmp_path / "run", **options).test()
    assert names_in(tmp_path / "pictures") == ["000.png", "001.png"]
    toy_runner(tmp_path / "again", **options).test()
    assert len(names_in(tmp_path / "pictures")) == 2, "another test of the same images replaces them"


def test_a_default_hook_can_be_removed_and_changed(tmp_path, stdout):
    runner = train(
        tmp_path,
        default_hooks__report=None,
        default_hooks__progress={"type": "ProgressHook", "interval": 10},
        val_dataloader=None, val_cfg=None, val_evaluator=None,
    )  # fmt: skip
    printed = stdout().splitlines()
    assert [line.split()[1] for line in printed] == ["10/20", "20/20"]
    assert runner.iter == 20


class Snapshots(progress_hook.Hook):
    """Keeps a copy of a weight after every iteration."""

    def __init__(self, into: dict[int, torch.Tensor]) -> None:
        self.into = into

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.into[runner.iter + 1] = runner.model.conv.weight.detach().clone()

"""The tools from the command line, on the toy detector."""

import pytest
from json_files import read_json
from toolbox import TOY_CONFIG, fail, fail_here, run_here, succeed, succeed_here

from visdet.engine import read_checkpoint, read_scalars


def test_train_test_and_curves(tmp_path, monkeypatch, capsys):
    def tool(*arguments):
        return succeed_here(monkeypatch, capsys, *arguments)

    printed = tool("train", TOY_CONFIG, "--work-dir", tmp_path, "--amp", "--cfg-options", "randomness.seed=1")
    assert "bfloat16 autocast" in printed and "val  iter 20/20" in printed
    out = tmp_path / "found.json"
    printed = tool(
        "test", TOY_CONFIG, tmp_path / "iter_20.pth", "--work-dir", tmp_path / "test", "--out", out
    )
    assert f"predictions: {out}" in printed
    assert "test  toy/accuracy" in printed
    printed = tool("curves", tmp_path, "--out", tmp_path / "figures" / "curves.png")
    assert printed.startswith(f"{tmp_path}: ") and "loss 0." in printed
    assert (tmp_path / "figures" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    scalars = read_scalars(str(tmp_path))
    assert list(scalars["loss"]) == [5, 10, 15, 20] and list(scalars["toy/accuracy"]) == [10, 20]


@pytest.mark.slow
def test_two_processes_on_the_cpu(tmp_path):
    """Each trains on its own half, all end with the same weights, and metrics see every image once.

    No thread of the process group outlives the tool: one that does aborts the process now and then.
    """
    config = tmp_path / "record.py"
    config.write_text(
        "model_wrapper_cfg = dict(find_unused_parameters=True, broadcast_buffers=False)\n"
        f"_base_ = [{TOY_CONFIG!r}]\ncustom_hooks = [dict(type='RecordProcesses')]\n"
        "train_cfg = dict(max_iters=9, val_interval=3)\ndefault_hooks = dict(checkpoint=dict(interval=3))\n"
    )
    printed = succeed("train", config, "--work-dir", tmp_path, "--launcher", "pytorch", processes=2)
    assert "batch 4 x 2 processes, 9 iterations" in printed
    assert printed.count("iter 9/9") == 2, "one process prints: a training line and a validation line"
    assert "toy/images 13" in printed
    first, second = read_json(tmp_path / "processes.json")
    assert first["wrapped"] == second["wrapped"] == "MMDistributedDataParallel"
    assert first["weights"] == second["weights"]
    for begin in (0, 12, 24):
        epoch = first["images"][begin : begin + 12] + second["images"][begin : begin + 12]
        assert sorted(epoch) == list(range(24)), "an epoch is shared out"
    assert len(read_checkpoint(tmp_path / "iter_6.pth")["meta"]["random_states"]) == 2
    threads = "".join((tmp_path / f"threads{rank}.txt").read_text() for rank in (0, 1))
    assert "gloo" not in threads


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("train", [TOY_CONFIG.replace("config", "confg")], "toy_confg.py does not exist; did you mean"),
        (
            "train",
            [TOY_CONFIG, "--cfg-options", "trian_dataloader.batch_size=2"],
            "did you mean 'train_dataloader'",
        ),
        (
            "train",
            [TOY_CONFIG, "--cfg-options", "model.chanels=2"],
            "unexpected keyword argument 'chanels'",
        ),
        ("train", [TOY_CONFIG, "--work-dir", "/proc/nowhere"], "folder /proc/nowhere cannot be written"),
        ("train", [TOY_CONFIG, "--launcher", "pytorch"], "--launcher pytorch needs torchrun"),
        ("train", [TOY_CONFIG, "--resume", "iter_1.pth"], "iter_1.pth does not exist"),
        ("train", [TOY_CONFIG, "--auto-scale-lr"], "auto_scale_lr = dict(base_batch_size=...)"),
        ("test", [TOY_CONFIG, "iter_1.pth"], "iter_1.pth does not exist"),
        (
            "test",
            [TOY_CONFIG, "iter_1.pth", "--out", "found.pkl"],
            "--out must name a .json file, got 'found.pkl'",
        ),
        ("infer", [TOY_CONFIG, "iter_1.pth", "nothing"], "nothing does not exist"),
        ("infer", [TOY_CONFIG, "iter_1.pth", "."], "folder . has no image"),
        (
            "infer",
            [TOY_CONFIG, "iter_1.pth", TOY_CONFIG, "--out-dir", "/proc/nowhere"],
            "folder /proc/nowhere cannot be written: No such file or directory; choose another one with --out-dir",
        ),
        ("curves", ["."], "there is no log"),
        *(
            (
                tool,
                [TOY_CONFIG, *split, "--cfg-options", "test_dataloader=None"],
                "has no test_dataloader.dataset",
            )
            for tool, split in (("browse", ["--split", "test"]), ("visualize-driving", []))
        ),
        ("print-config", ["none.py"], "none.py does not exist"),
        (
            "test",
            [TOY_CONFIG, "iter_1.pth", "--out", "/proc/nowhere/found.json"],
            "folder /proc/nowhere cannot be written: No such file or directory; choose another one with --out",
        ),
        ("test", [TOY_CONFIG, "iter_1.pth", "--show-dir", "/proc/nowhere"], "another one with --show-dir"),
        ("browse", [TOY_CONFIG, "--output-dir", "/proc/nowhere"], "another one with --output-dir"),
        ("visualize-driving", [TOY_CONFIG, "--out-dir", "/proc/nowhere"], "another one with --out-dir"),
        (
            "browse",
            [TOY_CONFIG, "--cfg-options", "train_dataloader.dataset.count=0"],
            "train_dataloader.dataset (ToyBoxes) has no samples",
        ),
        ("visualize-driving", [TOY_CONFIG], "is a ToyBoxes, which has no scenes of several cameras"),
        ("make-anchors", [TOY_CONFIG], "the data set ToyBoxes has no frames of several cameras"),
        ("train", [TOY_CONFIG, "--cfg-options", "train_cfg=None"], "train_cfg"),
        ("make-shapes", ["shapes", "--num-train", "-1"], "num_train must be int of 1 or more, got -1"),
        ("make-shapes", ["/proc/nowhere"], "make_shapes: folder /proc/nowhere cannot be written"),
        ("make-shapes", [TOY_CONFIG], "toy_config.py is a file. Give a folder to draw into"),
        ("make-driving-scenes", ["/proc/nowhere"], "folder /proc/nowhere cannot be written"),
        (
            "make-driving-scenes",
            ["scenes", "--num-frames", "0"],
            "num_frames must be int of 1 or more, got 0",
        ),
    ],
)
def test_a_mistake_ends_in_one_message(tmp_path, monkeypatch, capsys, tool, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in fail_here(monkeypatch, capsys, tool, *arguments)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            (("print-config", TOY_CONFIG, "--cfg-options", option), ("argument --cfg-options: ", option))
            for option in ("foo", "=1", "a=[1,(2]")
        ),
        *(
            ((tool, TOY_CONFIG, option, number), (f"argument {option}: ", repr(number)))
            for tool, option in (("browse", "--number"), ("visualize-driving", "--max-frames"))
            for number in ("0", "-1", "two")
        ),
        *(
            (("browse", TOY_CONFIG, "--seed", seed), (f"from 0 to 4294967295, got {seed!r}",))
            for seed in ("-1", "4294967296", "1.5")
        ),
    ],
)
def test_a_value_that_an_option_does_not_take_is_one_message(monkeypatch, capsys, arguments, parts):
    status, _, message = run_here(monkeypatch, capsys, *arguments)
    assert status == 2 and all(part in message for part in parts)


def test_a_mistake_sets_the_exit_status():
    assert "nowhere.py does not exist" in fail("train", "nowhere.py")


def test_print_config(tmp_path, monkeypatch, capsys):
    printed = succeed_here(
        monkeypatch, capsys, "print-config", TOY_CONFIG, "--cfg-options", "train_cfg.max_iters=77"
    )
    (tmp_path / "printed.py").write_text(printed)
    again = succeed_here(monkeypatch, capsys, "print-config", tmp_path / "printed.py")
    assert "max_iters=77" in printed
    assert again.replace("work_dirs/printed", "work_dirs/toy_config") == printed
    options = ("visdet::deformable_detr/deformable-detr_shapes", "--summary", "--shape", 64, 96)
    summary = succeed_here(monkeypatch, capsys, "print-config", *options)
    assert "64 x 96 pixels" in summary

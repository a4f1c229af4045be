"""The program ``visdet`` and the configs of the package, which are found from any folder."""

import argparse
import re
import subprocess
import sys

import pytest
import torch
from disk import names_in
from mmengine.config import Config
from programs import run_python

import visdet
from visdet.command_line import sort_names
from visdet.commands import _MODULES
from visdet.engine import ConfigError, load_config
from visdet.engine.config.files import files_of_config, read_config
from visdet.engine.config.packaged import CONFIGS, find_config, packaged_configs
from visdet.registry import MODELS

SHAPES = "deformable_detr/deformable-detr_shapes"


def test_the_help_names_every_command_and_first_steps(program):
    status, out, _ = program("--help")
    assert status == 0 and program()[1] == out
    assert all(re.search(rf"^    {name}\b", out, re.M) for name in _MODULES)
    assert f"visdet train {SHAPES}" in out
    assert program("--version")[1] == f"visdet {visdet.__version__}\n"
    status, _, err = program("trian")
    assert status == 2 and "there is no command 'trian'; did you mean 'train'?" in err


@pytest.mark.parametrize(
    "command",
    [
        f"infer {SHAPES} a.pth a.jpg",
        f"infer {SHAPES} a.pth a.jpg --out-dir made/by",
        f"check-data {SHAPES} --out-dir made/by --cfg-options train_dataloader.dataset.type=Nope",
        f"browse {SHAPES} --output-dir made/by --cfg-options train_dataloader.dataset.type=Nope",
        "prepare-nuscenes here",
        "export a.pth --out made/by",
        "curves here --out made/by/a.png",
    ],
)
def test_a_command_that_fails_leaves_no_folder(program, tmp_path, command):
    (tmp_path / "a.pth").touch()
    (tmp_path / "a.jpg").touch()
    status, _, err = program(*command.split())
    assert status == 1 and "error: " in err
    assert names_in(tmp_path) == ["a.jpg", "a.pth"]


@pytest.mark.parametrize(
    "command", ["infer x y z", "make-anchors x", "prepare-nuscenes x", "visualize-driving x"]
)
def test_a_folder_without_a_name_is_refused(program, command):
    status, _, err = program(*command.split(), "--out-dir", "")
    assert status == 2 and "argument --out-dir: expected a folder, got ''" in err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("visdet tr", ["train "]),
        ("visdet print-config x --su", ["--summary "]),
        ("visdet configs c", ["copy "]),
    ],
)
def test_the_shell_completes_commands_and_options(tmp_path, typed, expected):
    pytest.importorskip("argcomplete")
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
        "_ARGCOMPLETE_IFS": "|",
    }
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"), "COMP_TYPE": "9"}
    code = "import sys; sys.argv[0] = 'visdet'; from visdet.commands import main; main()"
    _, said = run_python("-c", code, cwd=CONFIGS.parents[2], **variables)
    assert (tmp_path / "out").read_text().split("|") == expected, said


def test_a_config_is_named_by_its_path_without_a_clone(program, tmp_path):
    status, whole, _ = program("print-config", SHAPES)
    assert status == 0 and "ShapesDataset" in whole
    for name in (f"{SHAPES}.py", f"visdet::{SHAPES}", f"visdet::{SHAPES}.py"):
        assert program("print-config", name)[1] == whole
    (tmp_path / "deformable-detr_shapes.py").write_text(f'_base_ = "visdet::{SHAPES}.py"\n')
    assert program("print-config", "deformable-detr_shapes")[1] == whole
    (tmp_path / "runtime.py").write_text(
        '_base_ = ["visdet::_base_/default_runtime.py"]\nlog_level = "ERROR"\n'
    )
    values = read_config("runtime.py").to_dict()
    assert values == {**read_config("visdet::_base_/default_runtime").to_dict(), "log_level": "ERROR"}


def test_a_file_of_the_user_goes_before_a_config_of_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deformable_detr").mkdir()
    assert find_config(SHAPES) == str(CONFIGS / f"{SHAPES}.py")
    (tmp_path / f"{SHAPES}.py").write_text("")
    assert find_config(SHAPES) == f"{SHAPES}.py"
    assert find_config(f"visdet::{SHAPES}") == str(CONFIGS / f"{SHAPES}.py")


@pytest.mark.parametrize(
    "name",
    ["deformable-detr_shapes", "deformabel_detr/deformable-detr_shapes", "visdet::deformable-detr-shapes.py"],
)
def test_an_unknown_name_lists_near_ones(program, name, tmp_path):
    dumped = tmp_path / "work_dirs" / "deformable-detr_shapes" / "deformable-detr_shapes.py"
    if "/" in name:  # The package's config is nearer than the copy that a run has written.
        dumped.parent.mkdir(parents=True)
        dumped.write_text("")
    status, _, err = program("print-config", name)
    assert status == 1 and err.startswith(f"error: config {name} does not exist; did you mean {SHAPES}")
    assert program("train", "nonsense")[2].endswith("; `visdet configs` lists those of the package\n")
    assert "is a folder" in program("train", ".")[2]


def test_the_configs_are_listed_and_copied_with_their_bases(program, tmp_path):
    listed = program("configs")[1]
    assert [line.split()[0] for line in listed.splitlines()] == packaged_configs()
    assert all(len(line.split()) > 4 for line in listed.splitlines()), "each config says what it is"
    status, out, _ = program("configs", "copy", SHAPES, "mine")
    assert status == 0 and out.count("wrote mine/") == len(files_of_config(SHAPES)) == 4
    assert program("print-config", f"mine/{SHAPES}")[1] == program("print-config", SHAPES)[1]
    assert program("configs", "copy", SHAPES, "mine")[0] == 0, "equal files are no obstacle"
    (tmp_path / "mine" / f"{SHAPES}.py").write_text("a = 1\n")
    assert "exists and differs" in program("configs", "copy", SHAPES, "mine")[2]
    assert f"did you mean {SHAPES}" in program("configs", "copy", "deformable-detr_shapes", "other")[2]
    assert not (tmp_path / "other").exists()
    assert program("configs", "copy", f"visdet::{SHAPES}.py", "other")[0] == 0


def test_a_reader_of_the_output_that_ends_before_leaves_no_traceback(tmp_path):
    command = f'"{sys.executable}" -m visdet configs | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and not done.stderr


@pytest.mark.parametrize("name", packaged_configs())
def test_every_config_of_the_package_can_be_read(name):
    assert read_config(name).to_dict() == Config.fromfile(CONFIGS / f"{name}.py").to_dict()


def test_a_model_is_measured(program):
    status, out, _ = program("benchmark", SHAPES, "--runs", 2, "--batch-size", 2, "--device", "cpu")
    assert status == 0 and "batches of 2 images [3, 128, 128], float32" in out
    assert re.search(r"eager +p50 [\d.]+ ms, p99 [\d.]+ ms, [\d.]+ images/s, memory \d+ MiB", out)


def test_the_results_of_a_test_are_read_by_coco(monkeypatch, tmp_path):
    coco = pytest.importorskip("faster_coco_eval")
    monkeypatch.chdir(tmp_path)
    cfg = load_config(SHAPES)[0]
    for loader in ("val_dataloader", "test_dataloader"):
        cfg[loader].dataset.update(generator={"num_train": 1, "num_val": 2, "num_workers": 1})
    torch.save(MODELS.build(cfg.model).state_dict(), "random.pth")
    visdet.evaluate(cfg, "random.pth", out="found.bbox.json")
    truth = tmp_path / "data/shapes/annotations/instances_val.json"
    assert coco.COCO(str(truth)).loadRes(str(tmp_path / "found.bbox.json")).anns
    with pytest.raises(ConfigError, match="CocoMetric"):
        visdet.evaluate(cfg, "random.pth", test_evaluator=[], out="found.bbox.json")


@pytest.mark.parametrize("first", ["a_folder", "picture.jpg", "my_config.py"])
def test_a_name_that_is_no_checkpoint_is_named_where_one_is_missing(first):
    args = argparse.Namespace(command="infer", config=first, checkpoint="b.jpg", images=[])
    args.required_names = ("images",)
    assert f"required: images ({first} is no checkpoint" in sort_names(args, [])


def test_an_exported_folder_in_the_place_of_a_checkpoint_says_what_runs_it(tmp_path):
    (tmp_path / "model.json").touch()
    args = argparse.Namespace(command="infer", config=str(tmp_path), checkpoint="b.jpg", images=[])
    assert "is an exported folder; its README.md says" in sort_names(args, [])
    args.config = "a" * 300 + ".pth"  # The system refuses to look it up.
    assert sort_names(args, []) is None

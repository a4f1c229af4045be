"""The check of other repositories' sources, on imitations of their checkouts."""

import subprocess
import sys

import pytest
import torch
from check_upstream import COLUMNS
from toolbox import ENVIRONMENT, ROOT
from upstream.compare import differences, in_order_of
from upstream.float64 import float32_is_float64, in_float64
from upstream.recipes import RECIPES, recognise

MAIN = """
import argparse, torch

def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    return parser

class Criterion(torch.nn.Module):
    weight_dict = {"loss_ce": 2.0}

    def forward(self, outputs, targets):
        return {"loss_ce": outputs["boxes"].square().mean(), "unused": torch.tensor(1.0)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, images):
        means = torch.stack([image.mean((1, 2)) for image in images])MOVED
        return {"boxes": self.layer(means) * FACTOR}

def build_model(arguments):
    return Model(), Criterion(), {"bbox": lambda outputs, sizes: [{"boxes": row} for row in outputs["boxes"]]}
"""


def checkout(folder, main=MAIN, moved="", factor="1.0"):
    """Write an imitation of Deformable-DETR's checkout."""
    for path, text in (
        ("configs/r50_deformable_detr.sh", ""),
        ("models/__init__.py", ""),
        ("models/backbone.py", ""),
        ("main.py", main.replace("MOVED", moved).replace("FACTOR", factor)),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def run(*arguments):
    command = [sys.executable, "tools/check_upstream.py", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def check(tmp_path, *arguments, status=1):
    """Run the tool on the imitation, and return the cells of its row."""
    done = run(tmp_path / "it", "--work", tmp_path / "work", *arguments)
    assert done.returncode == status, done.stdout + done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("| Deformable"))
    return dict(
        zip(COLUMNS, (cell.strip() for cell in row.strip("|").split(" | ")), strict=True)
    ), done.stdout


def test_a_checkout_that_runs_has_no_obstacle(tmp_path):
    checkout(tmp_path / "it")
    cells, _ = check(tmp_path, status=0)
    assert (cells["device"], cells["imports"], cells["builds"], cells["gradients"]) == (
        "cpu",
        "yes",
        "0.0 M",
        "2",
    )
    assert len([float(loss) for loss in cells["loss"].split(",")]) == 2
    assert (cells["prediction"], cells["first obstacle"]) == ("16 numbers", "-")


def test_code_that_asks_for_cuda_is_answered_by_the_cpu_and_marked(tmp_path):
    checkout(tmp_path / "it", moved=".cuda() + torch.zeros(1, device='cuda')")
    cells, text = check(tmp_path, status=0)
    assert (cells["device"], cells["first obstacle"]) == ("cpu*", "-")
    assert "asks for CUDA by itself" in text


def test_the_first_obstacle_is_one_line_with_the_place_in_the_checkout(tmp_path):
    checkout(tmp_path / "it", main='\nraise ImportError("no operators here\\nreinstall them")\n')
    cells, _ = check(tmp_path)
    assert (cells["imports"], cells["builds"]) == ("-", "-")
    assert cells["first obstacle"] == "imports: ImportError: no operators here (main.py:2)"


def test_numbers_that_are_not_finite_are_an_obstacle(tmp_path):
    checkout(tmp_path / "it", factor="float('nan')")
    cells, _ = check(tmp_path)
    assert cells["first obstacle"].startswith("loss: FloatingPointError: the loss is nan")
    assert cells["prediction"] == "-"


@pytest.mark.parametrize(
    ("main", "limit", "expected"),
    [
        ("import time\ntime.sleep(60)", "3", "stopped after 3 s"),
        ("import os\nprint('out of luck', flush=True)\nos._exit(3)", "60", "exit status 3: out of luck"),
    ],
)
def test_a_process_that_hangs_or_dies_is_one_row(tmp_path, main, limit, expected):
    checkout(tmp_path / "it", main=main)
    cells, _ = check(tmp_path, "--limit", limit)
    assert cells["first obstacle"] == expected


def test_an_unknown_folder_is_named(tmp_path):
    done = run(tmp_path, "--work", tmp_path / "work")
    assert done.returncode == 1
    assert f"{tmp_path} is no checkout that this tool knows" in done.stderr


def test_a_fork_with_configs_of_sparsedrive_is_the_fork(tmp_path):
    names = {recipe.name: recipe for recipe in RECIPES}
    assert len(names) == len(RECIPES)
    for name in ("SparseDrive stage 1", "SparseDrive stage 2", "BridgeAD stage 2"):
        path = tmp_path / names[name].config
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        expected = [name] if name.startswith("BridgeAD") else [*names][: 1 if name.endswith("1") else 2]
        assert [recipe.name for recipe in recognise(tmp_path)] == expected


def test_boxes_and_lines_that_have_changed_places_are_compared_with_one_another():
    order = torch.tensor([2, 0, 1])
    found = {"boxes_3d": torch.randn(3, 9), "scores_3d": torch.rand(3), "vectors": torch.randn(2, 20, 2)}
    found["planning"] = torch.randn(6, 2)
    own = found | {"boxes_3d": found["boxes_3d"][order], "scores_3d": found["scores_3d"][order]}
    own["vectors"] = found["vectors"].flip(0)
    assert max(differences("prediction", found, own)) > 0.1
    assert max(differences("prediction", found, in_order_of(found, own))) == 0
    own["scores_3d"] = own["scores_3d"] + 0.5
    assert max(differences("prediction", found, in_order_of(found, own))) == pytest.approx(0.5, rel=1e-3)


def test_gradients_of_equal_norms_differ():
    assert differences("gradients", {"a": torch.tensor([1.0, 0])}, {"a": torch.tensor([0, 1.0])}) == [1.0]
    with pytest.raises(ValueError, match=r"only one model has gradients of \['b'\]"):
        differences("gradients", {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)})


def test_code_that_asks_for_float32_gets_float64():
    images = torch.ones(2)
    with float32_is_float64():
        data = in_float64({"img": images, "gt": [images, torch.ones(1, dtype=torch.int64)], "scene": "a"})
        asked = [images.float(), images.to(torch.float32), torch.zeros(1, dtype=torch.float), torch.zeros(1)]
        made = torch.nn.Linear(2, 3).weight
    assert {tensor.dtype for tensor in (*asked, made, data["img"], data["gt"][0])} == {torch.float64}
    assert data["gt"][1].dtype == torch.int64 and data["scene"] == "a"
    assert torch.zeros(1).dtype == torch.float32 == made.float().dtype

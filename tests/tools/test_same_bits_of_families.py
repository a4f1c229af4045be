"""Deterministic runs of each family, from files, are equal whatever the number of workers."""

import pytest
from small_driving import small_config
from toolbox import ROOT, succeed_here

from visdet.datasets import make_shapes

SHAPES = """
_base_ = [{base!r}]
images = dict(data_root={root!r}, generator={generator!r})
train_dataloader = dict(batch_size=2, dataset=images)
custom_hooks = []
"""
GENERATOR = {"num_train": 8, "num_val": 2, "image_size": 64}
NO_VALIDATION = (
    "val_dataloader=None",
    "val_cfg=None",
    "val_evaluator=None",
    "default_hooks.checkpoint.save_best=None",
)


def small_shapes(folder, base, **generator):
    root = f"{make_shapes(folder / 'shapes', **GENERATOR, **generator)}/"
    config = folder / "small_shapes.py"
    config.write_text(SHAPES.format(base=str(ROOT / f"configs/{base}.py"), root=root, generator=GENERATOR))
    return config


FAMILIES = {
    "deformable_detr": lambda folder: small_shapes(folder, "deformable_detr/deformable-detr_shapes"),
    "dino": lambda folder: small_shapes(folder, "dino/dino_shapes"),
    "rotated_dino": lambda folder: small_shapes(folder, "rotated_dino/rotated-dino_shapes", rotated=True),
    "sparsedrive-1": lambda folder: small_config(folder, 1),
    "sparsedrive-2": lambda folder: small_config(folder, 2, load_from=None),
}


pytestmark = pytest.mark.usefixtures("deterministic_for_a_test")


@pytest.mark.parametrize("iterations", [2, pytest.param(100, marks=pytest.mark.cuda)], ids=["short", "cuda"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.cuda] * (name == "rotated_dino")) for name in FAMILIES]
)
def test_two_runs_are_equal(family, iterations, tmp_path, monkeypatch, capsys):
    config = FAMILIES[family](tmp_path)
    options = (
        *NO_VALIDATION,
        f"default_hooks.checkpoint.interval={iterations}",
        "default_hooks.logger.interval=1",
    )
    runs = [tmp_path / "first", tmp_path / "second"]
    for run, workers in zip(runs, (0, 2), strict=True):
        length = ("--iters", iterations, "--workers", workers, "--deterministic")
        succeed_here(
            monkeypatch, capsys, "train", config, *length, "--work-dir", run, "--cfg-options", *options
        )
    said = succeed_here(monkeypatch, capsys, "compare", *runs)
    assert f"iter_{iterations}.pth: equal" in said

"""Weights meet the classes of a run by name."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from toy_run import detector_of, toy_runner, train

from visdet.engine import CheckpointError
from visdet.engine.checkpoints.class_names import (
    category_ids_of,
    lists_of_checkpoint,
    matched_by_name,
    rows_of_classes,
)
from visdet.engine.checkpoints.weights import config_that_fits, load_weights
from visdet.engine.config.build_errors import build_model
from visdet.engine.config.files import read_config

SMALL = "deformable_detr/deformable-detr_shapes"


class Head(nn.Module):
    """A head with rows of classes and others."""

    class_rows = {"classes": ["scores"]}

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scores, self.boxes = nn.Linear(2, num_classes), nn.Linear(2, 4)


class Model(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = Head(num_classes)


def matched(trained, wanted, strict=True, rows=None):
    """Return, for each class of a run, which row of the checkpoint it has, -1 for a row of the model, None for all."""
    model, weights = Model(len(wanted)), Model(len(trained)).state_dict()
    rows = len(trained) if rows is None else rows
    weights["head.scores.bias"] = torch.arange(float(rows))
    model.head.scores.bias.data.fill_(-1)
    lists = {"classes": trained}, {"classes": wanted}
    result = matched_by_name(model, weights, *lists, "x.pth", strict)
    assert torch.equal(result["head.boxes.weight"], weights["head.boxes.weight"])
    return result["head.scores.bias"].tolist() if "head.scores.bias" in result else None


@pytest.mark.parametrize(
    ("trained", "wanted", "strict", "expected"),
    [
        (("a", "b", "c"), ("a", "b", "c"), True, [0, 1, 2]),
        (("a", "b", "c"), ("c", "a", "b"), True, [2, 0, 1]),
        (("a", "b", "c"), ("c", "a"), True, [2, 0]),
        (("a", "b", "c"), ("c", "x", "a"), False, [2, -1, 0]),
        (("a", "b"), ("x", "b", "a", "y"), False, [-1, 1, 0, -1]),
        (("a", "b"), ("x", "y"), False, None),
    ],
)
def test_rows_are_taken_by_name(trained, wanted, strict, expected):
    assert matched(trained, wanted, strict) == expected


def test_a_class_that_a_checkpoint_does_not_know_is_refused_and_both_lists_are_shown():
    with pytest.raises(CheckpointError, match=r"x\.pth does not know d\. .* a, b; the run has a, d"):
        matched(("a", "b"), ("a", "d"))
    with pytest.raises(CheckpointError, match=r"Sequential does not declare the rows"):
        names = {"classes": ("a", "b")}, {"classes": ("b", "a")}
        matched_by_name(nn.Sequential(nn.Linear(2, 2)), {}, *names, "x.pth")


@pytest.mark.parametrize(
    ("config", "kinds", "without"),
    [
        (SMALL, {"classes": 6}, "bbox_head.cls_branches.3.weight"),
        ("deformable_detr/deformable-detr_r50_16xb2-50e_coco", {"classes": 12}, None),
        ("dino/dino_shapes", {"classes": 9}, None),
        ("sparsedrive/sparsedrive_toy_stage2", {"classes": 7, "map_classes": 6}, None),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_families_declare_their_rows(config, kinds, without):
    """A proposal of two-stage Deformable DETR has no class: its layer only tells objects from the background."""
    cfg = read_config(config)
    with torch.device("meta"):
        model = build_model(cfg, cfg.model)
    rows, state = rows_of_classes(model), model.state_dict()
    assert {kind: len(names) for kind, names in rows.items()} == kinds
    for names in rows.values():
        assert without not in names and len({len(state[name]) for name in names}) == 1


def test_the_numbers_of_several_files_are_known_where_all_are_equal():
    for others, expected in (([7, 9], [7, 9]), ([9, 7], None)):
        parts = [SimpleNamespace(category_ids=numbers) for numbers in ([7, 9], others)]
        repeated = SimpleNamespace(dataset=SimpleNamespace(datasets=parts))
        assert category_ids_of(repeated) == expected


def test_a_permuted_model_predicts_what_the_original_predicts():
    cfg = read_config("dino/dino_shapes")
    models = [build_model(cfg, cfg.model).eval() for _ in range(2)]
    models[0].init_weights()
    names = tuple("abcdef")
    turned = names[2:] + names[:2]
    state = matched_by_name(models[1], models[0].state_dict(), {"classes": names}, {"classes": turned}, "x")
    load_weights(models[1], state, "x")
    with torch.no_grad():
        first, second = (model.bbox_head.cls_branches[0](torch.ones(96)) for model in models)
    assert torch.allclose(first.roll(-2), second) and not torch.allclose(first, second)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(folder, train_cfg__max_iters=10)
    return folder / "iter_10.pth"


def _renamed(folder, names, **options):
    parts = {
        f"{split}_dataloader__dataset__metainfo": {"classes": names} for split in ("train", "val", "test")
    }
    return toy_runner(folder, **parts, **options)


def test_a_run_and_a_resumed_run_compare_their_classes(tmp_path, checkpoint):
    with pytest.raises(CheckpointError, match="ToyDetector does not declare"):
        _renamed(tmp_path / "test", ("bright", "dark"), load_from=str(checkpoint)).test()
    with pytest.raises(CheckpointError, match="does not know grey"):
        _renamed(tmp_path / "other", ("dark", "grey"), load_from=str(checkpoint)).test()
    with pytest.raises(CheckpointError, match=r"cannot be resumed: its classes are .*'dark', 'bright'"):
        _renamed(tmp_path / "resumed", ("bright", "dark"), resume=str(checkpoint)).train()


def test_weights_without_names_and_a_detector_with_other_names_say_it_once(tmp_path, checkpoint, stdout):
    content = torch.load(checkpoint, weights_only=False)
    assert lists_of_checkpoint(content) == {"classes": ("dark", "bright")}
    assert lists_of_checkpoint({"meta": {"CLASSES": ["a"]}}) == {"classes": ("a",)}
    assert lists_of_checkpoint({"state_dict": {}}) == lists_of_checkpoint({"meta": 3}) == {}
    model = Model(2)
    for _ in range(2):
        result = matched_by_name(model, model.state_dict(), {}, {"classes": ("a", "b")}, "bare.pth")
    assert_close(result, model.state_dict(), rtol=0, atol=0)
    assert "bare.pth names no classes" in stdout()
    named = {"test_dataloader__dataset__metainfo": {"classes": ("dark", "grey")}}
    assert detector_of(tmp_path, checkpoint, **named).dataset_meta["classes"] == ("dark", "bright")
    assert "the classes are those of the checkpoint, dark, bright" in stdout()


def test_weights_that_hardly_fit_name_the_config_that_fits_in_two_lines(stdout):
    large = read_config("dino/dino-4scale_r50_8xb2-12e_coco")
    small = read_config("dino/dino_shapes")
    with torch.device("meta"):
        assert config_that_fits({"x": torch.zeros(3)}) is None
        weights = build_model(large, large.model).state_dict()
    weights = {name: torch.zeros(value.shape) for name, value in weights.items()}
    load_weights(build_model(small, small.model), weights, "x.pth", strict=False)
    lines = stdout().strip().split("\n")
    assert len(lines) == 2 and max(map(len, lines)) < 200
    assert (
        "weights of DINO are those of x.pth" in lines[0] and "dino/dino-4scale_r50_8xb2-12e_coco" in lines[1]
    )

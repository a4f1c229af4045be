"""README's snippets run as they stand."""

import json
import re
from pathlib import Path

import pytest

from visdet.ops import _library

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_the_promised_snippets():
    assert len(SNIPPETS) == 4


@pytest.mark.parametrize("index", [0, 1])
def test_snippet_runs(index):
    exec(compile(SNIPPETS[index], f"README snippet {index}", "exec"), {})


def test_the_explanation_follows_the_operator_call(capsys):
    if not _library.is_loaded("cuda"):
        pytest.skip("the CUDA library, which makes the plans, is not built")
    names = {}
    for index in (0, 3):
        exec(compile(SNIPPETS[index], f"README snippet {index}", "exec"), names)
    assert "ms_deform_attn: path 'decoder'" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["configs", "."], ids=["in configs", "in the root"])
@pytest.mark.parametrize(
    "base", ["deformable-detr-refine-twostage_r50_16xb2-50e_coco", "deformable-detr_small_coco"]
)
def test_own_data_config_resolves(tmp_path, place, base):
    from mmengine import Config

    (tmp_path / "configs").mkdir()
    for folder in (ROOT / "configs").iterdir():
        (tmp_path / "configs" / folder.name).symlink_to(folder)
    text = SNIPPETS[2].replace("deformable-detr-refine-twostage_r50_16xb2-50e_coco", base)
    path = tmp_path / place / "my_config.py"
    path.write_text(
        text if place == "configs" else text.replace('"deformable_detr/', '"configs/deformable_detr/')
    )
    config = Config.fromfile(path)
    assert config.model.bbox_head.num_classes == 3
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        dataset = loader.dataset
        assert dataset.type == "CocoDataset" and dataset.metainfo.classes == ("bolt", "nut", "washer")
        assert "Resize" in str(dataset.pipeline)
    assert config.val_evaluator.ann_file == "data/mine/val.json"


def test_the_measured_ratios_are_the_committed_ones():
    figures = json.loads((ROOT / "docs" / "kernels" / "h200.json").read_text())
    number = r"([\d.]+)"
    rows = re.findall(
        rf"^\| \[`(\w+)`\].*\(`([\w-]+)`\) \| (\w+) \| {number} µs \| {number} µs \| (.*?) \| {number}x \| {number}x \|$",
        README,
        flags=re.MULTILINE,
    )
    assert len(rows) == README.count(" µs |") / 2 >= 8
    for op, case, dtype, forward, backward, peer, *ratios in rows:
        measured = next(
            row for row in figures[op]["times"]["rows"] if (row["case"], row["dtype"]) == (case, dtype)
        )
        slower = measured["slower"]["torchvision" if "torchvision" in peer else "torch"]
        times = [measured["passes"][name]["us"] for name in ("forward", "backward")]
        assert [float(forward), float(backward)] == pytest.approx(times, rel=1e-3)
        assert [float(ratio) for ratio in ratios] == [slower["forward"], slower["both"]]


def test_every_command_of_the_readme_exists():
    for script in set(re.findall(r"tools/\w+\.py", README)):
        assert (ROOT / script).exists(), script
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\w[\w-]*)", README)) - {"and"} <= targets

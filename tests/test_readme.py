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


RATIO_ROW = re.compile(
    r"^\| \[`(\w+)`\]\((.*?)\) \| .*\(`([\w-]+)`, (\w+)\) \| "
    r"([\d.]+) µs \| ([\d.]+) µs \| ([\w. ]+) \| ([\d.]+)x \| ([\d.]+)x \|$",
    flags=re.MULTILINE,
)


def test_the_measured_ratios_are_the_committed_ones():
    rows = RATIO_ROW.findall(README)
    assert len(rows) == README.count(" µs |") / 2 >= 8
    for op, page, case, dtype, forward, backward, peer, *ratios in rows:
        figures = (
            deformops_figures(page, case) if "deformops" in peer else h200_figures(op, case, dtype, peer)
        )
        assert list(map(float, (forward, backward, *ratios))) == pytest.approx(figures, rel=6e-3), (op, case)


def deformops_figures(page: str, case: str) -> list[float]:
    """Return visdet's times and how much longer the faster of deformops' two implementations takes in each pass."""
    [cells] = re.findall(
        rf"^\| {case} \| (.*) \|$", (ROOT / page).read_text().split("bfloat16")[0], re.MULTILINE
    )
    ours, *theirs = ([float(number) for number in cell.split(" / ")] for cell in cells.split(" | "))
    forward, backward, _ = map(min, *theirs)
    return [ours[0], ours[1], forward / ours[0], (forward + backward) / (ours[0] + ours[1])]


def h200_figures(op: str, case: str, dtype: str, peer: str) -> list[float]:
    rows = json.loads((ROOT / "docs" / "kernels" / "h200.json").read_text())[op]["times"]["rows"]
    [row] = [row for row in rows if (row["case"], row["dtype"]) == (case, dtype)]
    slower = row["slower"]["torchvision" if peer == "torchvision" else "torch"]
    return [
        row["passes"]["forward"]["us"],
        row["passes"]["backward"]["us"],
        slower["forward"],
        slower["both"],
    ]


def test_every_command_of_the_readme_exists():
    for script in set(re.findall(r"tools/\w+\.py", README)):
        assert (ROOT / script).exists(), script
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\w[\w-]*)", README)) - {"and"} <= targets

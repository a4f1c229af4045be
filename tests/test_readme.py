"""The snippets of README.md and of the pages for beginners run as they stand."""

import argparse
import importlib
import re
import shlex

import pytest
from json_files import read_json
from programs import ROOT

from visdet.command_line import sort_names
from visdet.commands import _MODULES
from visdet.ops import _library

README = (ROOT / "README.md").read_text()


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


CONFIG, CALL, LOOK_UP = snippets("README.md")


def test_the_readme_is_read_in_two_minutes():
    assert len(README.splitlines()) <= 130


def test_the_pages_show_the_same_snippets():
    assert snippets("docs/own_data.md") == [CONFIG]
    assert snippets("docs/operators.md")[0] == CALL


@pytest.mark.parametrize("snippet", [CALL, LOOK_UP], ids=["call", "look-up"])
def test_snippet_runs(snippet):
    exec(compile(snippet, "README snippet", "exec"), {})


def test_the_explanation_follows_the_operator_call(stdout):
    if not _library.is_loaded("cuda"):
        pytest.skip("the CUDA library, which makes the plans, is not built")
    names = {}
    for snippet in snippets("docs/operators.md"):
        exec(compile(snippet, "snippet of docs/operators.md", "exec"), names)
    assert "ms_deform_attn: path 'decoder'" in stdout()


@pytest.mark.parametrize(
    "base", ["deformable-detr-refine-twostage_r50_16xb2-50e_coco", "deformable-detr_small_coco"]
)
def test_own_data_config_resolves(tmp_path, base):
    from visdet.engine import load_config

    path = tmp_path / "my_config.py"
    path.write_text(CONFIG.replace("deformable-detr-refine-twostage_r50_16xb2-50e_coco", base))
    config, _ = load_config(str(path))
    assert config.model.bbox_head.num_classes == 3
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        dataset = loader.dataset
        assert dataset.type == "CocoDataset" and dataset.metainfo.classes == ("bolt", "nut", "washer")
        assert "Resize" in str(dataset.pipeline)
    assert config.val_evaluator.ann_file == "data/mine/val.json"


def test_the_lines_of_fine_tuning_are_appended_to_the_config_of_own_data(tmp_path):
    from visdet.engine import load_config

    path = tmp_path / "my_config.py"
    path.write_text(CONFIG + snippets("docs/fine_tuning.md")[0])
    config, _ = load_config(str(path))
    assert config.model.type == "DINO" and config.model.bbox_head.num_classes == 3
    assert config.model.backbone.type == "ResNet" and config.model.backbone.init_cfg is None
    assert config.train_dataloader.dataset.metainfo.classes == ("bolt", "nut", "washer")


RATIO_ROW = re.compile(
    r"^\| \[`(\w+)`\]\((.*?)\) \| .*\(`([\w-]+)`, (\w+)\) \| "
    r"([\d.]+) µs \| ([\d.]+) µs \| ([\w. ]+) \| ([\d.]+)x \| ([\d.]+)x \|$",
    flags=re.MULTILINE,
)


def test_the_measured_ratios_are_the_committed_ones():
    rows = RATIO_ROW.findall(README)
    assert len(rows) == README.count(" µs |") / 2 >= 6
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
    rows = read_json(ROOT / "docs" / "kernels" / "h200.json")[op]["times"]["rows"]
    [row] = [row for row in rows if (row["case"], row["dtype"]) == (case, dtype)]
    slower = row["slower"]["torchvision" if peer == "torchvision" else "torch"]
    return [
        row["passes"]["forward"]["us"],
        row["passes"]["backward"]["us"],
        slower["forward"],
        slower["both"],
    ]


def test_every_command_of_the_pages_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    targets |= set(re.findall(r'nox.session\(name="([\w-]+)"', (ROOT / "noxfile.py").read_text()))
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        for script in set(re.findall(r"(?<![\w/])tools/\w+\.py", text)):
            assert (ROOT / script).exists(), (path, script)
        for pair in re.findall(r"`make ([a-z][\w-]*)|^make ([a-z][\w-]*)", text, flags=re.MULTILINE):
            assert {*pair} - {""} <= targets, (path, pair)


@pytest.mark.parametrize("command", _MODULES)
def test_the_lines_of_the_pages_are_accepted_by_the_command(command):
    parser = argparse.ArgumentParser(f"visdet {command}")
    importlib.import_module(_MODULES[command]).add_arguments(parser)
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), flags=re.DOTALL):
            joined = block.replace("\\\n", " ")
            for line in re.findall(rf"^visdet {command} .*", joined, flags=re.MULTILINE):
                given = argparse.Namespace(command=command)
                options, others = parser.parse_known_args(shlex.split(line, comments=True)[2:], given)
                assert not sort_names(options, others), (path.name, line)

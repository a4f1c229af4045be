"""README's snippets run as they stand."""

import re
from pathlib import Path

import pytest

from visdet.ops import _library

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
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


def test_own_data_config_resolves(tmp_path):
    from mmengine import Config

    root = Path(__file__).resolve().parents[1]
    path = tmp_path / "my_config.py"
    path.write_text(SNIPPETS[2].replace('"configs/', f'"{root}/configs/'))
    config = Config.fromfile(path)
    assert config.model.bbox_head.num_classes == 3
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        assert loader.dataset.type == "CocoDataset" and loader.dataset.metainfo.classes == (
            "bolt",
            "nut",
            "washer",
        )
    assert config.train_dataloader.dataset.pipeline and config.val_evaluator.ann_file == "data/mine/val.json"


def test_every_command_of_the_readme_exists():
    root = Path(__file__).resolve().parents[1]
    for script in set(re.findall(r"tools/\w+\.py", README)):
        assert (root / script).exists(), script
    targets = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make (\w[\w-]*)", README)) - {"and"} <= targets

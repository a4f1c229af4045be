"""benchmarks.transformers_steps: a tiny family from end to end on the CPU, and the comparison that comes first."""

import contextlib
import importlib

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'visdet-ops[test]'")


from json_files import read_json

from benchmarks import transformers_steps as steps
from benchmarks.transformers_models import FAMILIES, LOCAL, Family

CPU = torch.device("cpu")


def tiny_config(package):
    backbone = package.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 12, 16, 24],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    sizes = dict(d_model=32, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_layers=1, decoder_layers=1)
    selection = dict(two_stage=True, with_box_refine=True, two_stage_num_proposals=12)
    return package.DeformableDetrConfig(
        num_labels=80, backbone_config=backbone, **sizes, **selection, **LOCAL
    )


TINY = Family("tiny", "DeformableDetrForObjectDetection", tiny_config, (64, 96))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_levels_to_attend_to(name):
    """LW-DETR's default configuration has none, so that its model fails."""
    config = FAMILIES[name].config(importlib.import_module("transformers"))
    assert getattr(config, "num_feature_levels", 1) >= 1


def test_a_family_from_end_to_end(tmp_path, monkeypatch, stdout):
    monkeypatch.setitem(FAMILIES, "tiny", TINY)
    options = ["--device", "cpu", "--families", "tiny", "--turns", "2"]
    assert steps.main([*options, "--out", str(tmp_path)]) == 0
    (result,) = read_json(tmp_path / "transformers.json")["results"]
    assert result["output_error"] < 1e-4
    assert [step["mode"] for step in result["steps"]] == ["predict"]
    for step in result["steps"]:
        for way in ("stock", "visdet"):
            assert step[way]["wall_ms"] > 0
    assert "| tiny | predict float32 |" in stdout()


def test_a_family_whose_outputs_differ_is_not_timed(tmp_path, monkeypatch, stdout):
    @contextlib.contextmanager
    def off_by_a_percent():
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out: 1.01 * out if isinstance(module, torch.nn.Linear) else None
        )
        yield
        hook.remove()

    monkeypatch.setitem(FAMILIES, "tiny", TINY)
    monkeypatch.setitem(steps.WAYS, "visdet", off_by_a_percent)
    options = ["--device", "cpu", "--families", "tiny", "--turns", "1"]
    assert steps.main([*options, "--out", str(tmp_path)]) == 1
    assert "not timed: the outputs differ" in stdout()

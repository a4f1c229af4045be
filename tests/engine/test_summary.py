"""Parameters and FLOPs of a model."""

import pytest

from visdet.engine import load_config
from visdet.engine.summary import model_summary
from visdet.errors import ConfigError


def test_parameters_and_flops_of_a_detector():
    cfg, _ = load_config("deformable_detr/deformable-detr_shapes", {"model.encoder.num_layers": 1})
    head, *rows, last = (line.split() for line in model_summary(cfg, (64, 96)).splitlines())
    assert head == ["part", "parameters", "trained", "FLOPs"] and "64 x 96 pixels" in " ".join(last)
    counts = {name: int(total.replace(",", "")) for name, total, *_ in rows}
    flops = {name: float(number) for name, _, _, number, _ in rows}
    level_embed = 3 * 96  # belongs to no part
    assert counts.pop("all") == sum(counts.values()) + level_embed
    assert flops.pop("all") == pytest.approx(sum(flops.values()), abs=0.01) and sum(flops.values()) > 0.1
    # A neck of 1x1 convolutions on maps of 8x12, 4x6 and 2x3, two operations for each weight and place.
    neck = 2 * 96 * (64 * 96 + 128 * 24 + 256 * 6) / 1e9
    assert flops["neck"] == pytest.approx(neck, abs=6e-4)


@pytest.mark.filterwarnings("ignore:.*no .* file")
def test_the_flops_of_a_driving_model_are_those_of_a_drawn_frame():
    size = {"test_dataloader.dataset.data_aug_conf.final_dim": (32, 64)}
    cfg, _ = load_config("sparsedrive/sparsedrive_toy_stage2", size)
    *rows, last = model_summary(cfg).splitlines()[1:]
    cells = map(str.split, rows)
    rows = {row[0]: row[1:] for row in cells if len(row) == 5}
    parts = {part: float(row[2]) for part, row in rows.items()}
    assert (
        parts.pop("all") == pytest.approx(sum(parts.values()), abs=0.01)
        and min(parts["head"], parts["img_backbone"]) > 0.01
    )
    assert "a frame of six images of 32 x 64 pixels" in last
    assert int(rows["img_backbone"][1]) == 0 < int(rows["head"][1].replace(",", "")), "perception is frozen"


@pytest.mark.filterwarnings("ignore:InstanceBank")
def test_a_model_without_a_sample_has_its_parameters(tmp_path):
    options = {"test_dataloader.dataset.data_root": str(tmp_path), "test_dataloader.dataset.num_cameras": 5}
    cfg, _ = load_config("sparsedrive/sparsedrive_toy_stage1", options)
    cfg.test_dataloader.dataset.pop("generator", None)
    cfg.test_dataloader.dataset.type = "NuScenes3DDetTrackDataset"
    text = model_summary(cfg)
    assert (
        "img_backbone" in text
        and "FLOPs are not counted without a sample" in text
        and "does not exist" in text
    )


def test_the_size_must_be_known():
    cfg, _ = load_config("deformable_detr/deformable-detr_shapes")
    cfg.test_dataloader.dataset.type = "CocoDataset"
    with pytest.raises(ConfigError, match="give the size by --shape HEIGHT WIDTH"):
        model_summary(cfg)

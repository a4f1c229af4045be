"""The real thing in a minute: the shapes config through the tools, trained, tested, and used on files."""

from pathlib import Path

import pytest
from disk import names_in
from json_files import read_json
from PIL import Image
from toolbox import ROOT, run_here, succeed_here

from visdet.datasets import make_shapes
from visdet.engine import read_checkpoint, read_scalars

GENERATOR = {"num_train": 160, "num_val": 32, "image_size": 64}
CONFIG = """
_base_ = [{base!r}]
generator = {generator!r}
data_root = {data_root!r}
train_dataloader = dict(dataset=dict(data_root=data_root, generator=generator))
val_dataloader = dict(dataset=dict(data_root=data_root, generator=generator))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + "annotations/instances_val.json")
test_evaluator = val_evaluator
train_cfg = dict(max_iters=80, val_begin=40, val_interval=40)
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=20))
log_processor = dict(window_size=10)
randomness = dict(seed=0)
"""


@pytest.mark.slow
def test_train_test_infer(tmp_path, monkeypatch, capsys):
    data_root = f"{make_shapes(tmp_path / 'shapes', **GENERATOR)}/"
    config = tmp_path / "small_shapes.py"
    base = str(ROOT / "configs/deformable_detr/deformable-detr_shapes.py")
    config.write_text(CONFIG.format(base=base, generator=GENERATOR, data_root=data_root))
    work_dir = tmp_path / "run"

    printed = succeed_here(monkeypatch, capsys, "train", config, "--work-dir", work_dir)
    assert "iter 80/80  loss" in printed and "triangle" in printed

    losses = read_scalars(str(work_dir))["loss"]
    assert set(losses) >= {10, 20, 30, 80}
    assert losses[80] < 0.6 * losses[10], losses
    assert names_in(work_dir / "val_pictures") == ["iter_40.png", "iter_80.png"]
    assert read_checkpoint(work_dir / "iter_80.pth")["meta"]["iter"] == 80

    found_file = tmp_path / "detections.json"
    options = ("--work-dir", tmp_path / "test", "--out", found_file)
    printed = succeed_here(monkeypatch, capsys, "test", config, work_dir / "iter_80.pth", *options)
    last_ap = list(read_scalars(str(work_dir))["coco/bbox_mAP"].values())[-1]
    assert f"coco/bbox_mAP {last_ap:.4f}" in printed, "testing a checkpoint gives what validation gave"
    found = read_json(found_file)
    assert len(found) == GENERATOR["num_val"]

    images = tmp_path / "images"
    (images / "more").mkdir(parents=True)
    for name in ("000000.jpg", "000001.jpg"):
        (images / name).write_bytes(Path(data_root, "val", name).read_bytes())
    Image.new("LA", (50, 90)).save(images / "more" / "grey.png")
    (images / "broken.jpg").write_bytes((images / "000000.jpg").read_bytes()[:900])
    out_dir = tmp_path / "inferred"
    options = ("--out-dir", out_dir, "--score-thr", "0.02")
    status, _, err = run_here(
        monkeypatch, capsys, "infer", config, work_dir / "iter_80.pth", images, *options
    )
    assert status == 1
    assert err.startswith("error: ") and f"{images}/broken.jpg" in err
    assert err.endswith("1 of 4 files could not be read\n"), "the other images are done"
    inferred = read_json(out_dir / "predictions.json")
    assert [Path(image["file"]).name for image in inferred] == ["000000.jpg", "000001.jpg", "grey.png"]
    assert (inferred[2]["height"], inferred[2]["width"]) == (90, 50)
    assert sorted(str(p.relative_to(out_dir / "pictures")) for p in out_dir.rglob("*.png")) == [
        "000000.png", "000001.png", "more/grey.png",
    ]  # fmt: skip
    tested = {Path(image["file"]).name: image["detections"] for image in found}
    for image in inferred[:2]:
        best, expected = image["detections"][0], tested[Path(image["file"]).name][0]
        assert best["class"] == expected["class"]
        assert best["score"] == pytest.approx(expected["score"], abs=1e-3)
        assert best["bbox_xyxy"] == pytest.approx(expected["bbox_xyxy"], abs=0.1)

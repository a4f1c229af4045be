"""A trained model on files, and the detections of a test as a file."""

import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from disk import names_in
from json_files import read_json
from mmengine.hooks import Hook
from PIL import Image
from torch import nn
from toy_run import PIPELINE, detections, detector_of, toy_config, toy_runner, train

import visdet
from visdet.commands import infer, main
from visdet.engine import CheckpointError, ConfigError, Detector, UserError, find_images
from visdet.engine.inference.detect_files import detect_files
from visdet.engine.inference.detections import Detections, detections_of
from visdet.engine.inference.sample_images import image_file_of

NO_SIZES = {"type": "PackDetInputs", "meta_keys": ["img_path"]}
WRAPPED = {
    "pipeline": None,
    "datasets": [{"dataset": {"type": "ToyBoxes", "pipeline": [*PIPELINE[:-1], NO_SIZES]}}],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> str:
    """A checkpoint of the toy detector."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, train_cfg__max_iters=10)
    return str(folder / "iter_10.pth")


@pytest.fixture
def image(tmp_path) -> str:
    pixels = np.full((32, 32, 3), 128, dtype=np.uint8)
    pixels[8:20, 6:22] = (230, 200, 180)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return str(tmp_path / "image.png")


@pytest.fixture
def copies(tmp_path, image) -> list[str]:
    """Three files of the image."""
    return [shutil.copy(image, f"{tmp_path}/{name}.png") for name in "abc"]


def test_a_detector_answers_as_the_model_does(tmp_path, trained, image):
    detector = detector_of(tmp_path, trained)
    sample = detector(image, score_threshold=0).sample
    assert not detector.model.training and detector.dataset_meta["classes"] == ("dark", "bright")
    pixels = torch.from_numpy(np.array(Image.open(image))).permute(2, 0, 1)[None].float() / 255
    logits, boxes = detector.model(pixels)
    assert torch.allclose(sample.pred_instances.bboxes, boxes * 32)
    assert torch.equal(sample.pred_instances.labels, logits.argmax(-1))
    assert sample.ori_shape == (32, 32) and sample.img_path == image
    assert not sample.pred_instances.bboxes.requires_grad
    assert np.array_equal(image_file_of(sample), np.asarray(Image.open(image)))


def test_what_a_detector_refuses(tmp_path, trained):
    with pytest.raises(ConfigError, match=r"test_dataloader\.dataset has no pipeline"):
        Detector(toy_config(tmp_path), trained)
    with pytest.raises(UserError, match="'nonsense'"):
        Detector(toy_config(tmp_path), trained, "nonsense")
    with pytest.raises(CheckpointError, match="of another shape"):
        Detector(toy_config(tmp_path, model__channels=4), trained)
    bare = tmp_path / "bare.pth"
    torch.save(toy_runner(tmp_path / "run").model.state_dict(), bare)
    assert detector_of(tmp_path, bare).dataset_meta["classes"] == ("dark", "bright")
    named = {"test_dataloader__dataset__metainfo": {"classes": ["x", "y"]}}
    assert detector_of(tmp_path, bare, **named).dataset_meta["classes"] == ("x", "y")
    driving = toy_config(tmp_path)
    driving.model = {"type": "SparseDrive"}
    with pytest.raises(
        ConfigError, match=r"SparseDrive does not take image files.*DrivingDataSample.*visdet test"
    ):
        Detector(driving, str(bare))


@pytest.mark.parametrize(
    ("dataset_meta", "message"),
    [
        (5, r"meta\['dataset_meta'\] must be a dict with the key 'classes', got 5"),
        ({"classes": "bolt"}, r"must be a tuple of distinct names, got 'bolt'; for one class write"),
        ({"classes": ("a",)}, "num_classes is 2, but .* names 1 classes"),
        ({"classes": ("a", "b"), "palette": [(1, 2), (3, 4)]}, "palette'\\] must be"),
    ],
)
def test_meta_information_of_a_checkpoint_that_fits_no_model(tmp_path, trained, dataset_meta, message):
    content = torch.load(trained, weights_only=False)
    content["meta"]["dataset_meta"] = dataset_meta
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(UserError, match=message):
        detector_of(tmp_path, tmp_path / "other.pth")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model must be dict"),
        ({"model": {"_delete_": True}}, "model"),
        ({"test_dataloader__dataset": None}, "has no test_dataloader.dataset"),
        ({"test_dataloader__dataset__pipeline": [{}]}, "test_dataloader cannot be built: .*type"),
        ({"test_dataloader__dataset__pipeline": [*PIPELINE[:-1], NO_SIZES]}, "a sample has no ori_shape"),
        ({"test_dataloader__dataset": WRAPPED}, "a sample has no ori_shape"),
        ({"graph": "x"}, "graph must be"),
    ],
)
def test_a_config_without_a_part_is_one_message(tmp_path, image, options, message):
    with pytest.raises(UserError, match=message):
        detector_of(tmp_path, **options)(image)


def test_each_run_of_infer_gets_a_folder_and_says_what_is_enlarged(
    tmp_path, monkeypatch, capsys, trained, image
):
    monkeypatch.chdir(tmp_path)
    toy_config(tmp_path, test_dataloader__dataset__pipeline=PIPELINE).dump("toy.py")
    for folder in ("detections", "detections_2"):
        main(["infer", "toy.py", trained, image, "--device", "cpu"])
        assert (tmp_path / "work_dirs" / folder / "pictures" / "image.png").is_file()
        shown = capsys.readouterr().out
        assert f"work_dirs/{folder}/predictions.json" in shown and "1 pictures of less than 480" in shown
    # Before the checkpoint is looked for.
    for nms, told in (("0.5", "nowhere.jpg does not exist"), ("7", "--nms must be")):
        with pytest.raises(SystemExit):
            main(["infer", "toy.py", "no.pth", "nowhere.jpg", "--nms", nms])
        assert told in capsys.readouterr().err
    assert sorted(os.listdir("work_dirs")) == ["detections", "detections_2"], "no empty folder stays"


def test_two_runs_of_infer_at_once_take_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with infer._new_folder() as first, infer._new_folder() as second:
        assert (first, second) == ("work_dirs/detections", "work_dirs/detections_2")
    assert not os.path.exists("work_dirs")


def test_cameras_and_streams_are_videos(tmp_path, trained):
    assert find_images(["77", "rtsp://127.0.0.1:9/x"])[0] == ["77", "rtsp://127.0.0.1:9/x"]
    detector = detector_of(tmp_path, trained)
    with pytest.raises(UserError, match="camera or stream 77 cannot be opened"):
        next(detector("77"))
    found, failures = detect_files(detector, ["77"], str(tmp_path / "out"), None)
    assert not found and "stream 77" in failures[0]


def test_detections_are_a_sequence(tmp_path):
    new = tmp_path / "new"
    rows = (1, 0.5, (0, 1, 2, 3)), (0, 0.75, (4, 5, 7, 9)), (1, 0.25, (1, 1, 2, 2))
    drawing = {"image": np.zeros((40, 50, 3), np.uint8), "draw": lambda image, sample: image}
    found = detections(*rows, **drawing, img_path="a.jpg")
    filtered = found.filter
    assert [one.class_name for one in found] == ["a", "b", "b"]
    assert found[0] == ("a", 0, 0.75, (4.0, 5.0, 7.0, 9.0)) and found[-1].score == 0.25
    for chosen in (found[1:], found[found.labels == 1], found[[1, 2]], filtered("b")):
        assert chosen.scores.tolist() == [0.5, 0.25] and len(chosen.draw().getbands()) == 3
    assert len(filtered(score_threshold=0.5)) == 2 and len(filtered(["a"], 0.8)) == 0
    with pytest.raises(UserError, match="classes must be among a, b, got 'c'"):
        filtered("c")
    record = {"image_id": 7, "category_id": 18, "bbox": [4.0, 5.0, 3.0, 4.0], "score": 0.75}
    assert found.to_coco(7, [18, 3])[0] == record and found.to_coco()[1]["category_id"] == 2
    with pytest.raises(UserError, match="category_ids must have 2 numbers"):
        found.to_coco(category_ids=[1])
    for numbers, expected in (([18, 3], [18, 3, 3]), ([18, None], [1, 2, 2]), ([18], [1, 2, 2])):
        numbered = Detections(found.sample, ("a", "b"), category_ids=numbers)
        assert [row["category_id"] for row in numbered[:].to_coco()] == expected
        kept = [row.get("category_id") for row in numbered.to_dict()["detections"]]
        assert kept == (expected if numbers == [18, 3] else [None] * 3)
    found.save(new / "a.json")
    found.save(new / "a.png")
    assert read_json(new / "a.json") == found.to_dict()
    assert found._repr_png_() == (new / "a.png").read_bytes()
    assert detections(*rows)._repr_png_() is None


def test_names_that_people_try_are_answered(tmp_path, trained, image):
    detector = detector_of(tmp_path, trained)
    with pytest.raises(TypeError, match="'conf'; write score_threshold="):
        detector(image, conf=0.5)
    with pytest.raises(UserError, match=r"batch: .*batch_size=\.\.\."):
        visdet.train("dino/dino_shapes", batch=3)
    assert visdet.ops.ms_deform_attn and not any("." in name for name in dir(visdet))


def test_detections_are_sorted_rounded_and_cut():
    rows = (1, 0.5, (0, 1, 2.004, 3)), (0, 0.900004, (4, 5, 6, 7.126)), (1, 0.1, (1, 1, 2, 2))
    sample = detections(*rows, img_path="a.jpg").sample
    best = {"class": "dark", "label": 0, "score": 0.9, "bbox_xyxy": [4.0, 5.0, 6.0, 7.13]}
    second = {"class": "bright", "label": 1, "score": 0.5, "bbox_xyxy": [0.0, 1.0, 2.0, 3.0]}
    expected = {"file": "a.jpg", "height": 40, "width": 50, "detections": [best, second]}
    for given in (sample, sample.to_dict()):
        assert detections_of(given, ("dark", "bright"), score_thr=0.5) == expected


def test_pictures_of_images_of_equal_names_do_not_overwrite_each_other(tmp_path, trained, image):
    folder = tmp_path / "images"
    for name in ("a.png", "a.bmp", "sub/a.png", "sub/a.bmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.open(image).save(folder / name)
    detector = detector_of(tmp_path, trained)
    _, failures = detect_files(detector, find_images([str(folder)], "out")[0], str(tmp_path / "out"), 0.0)
    pictures = tmp_path / "out" / "pictures"
    written = sorted(str(path.relative_to(pictures)) for path in pictures.rglob("*.png"))
    assert not failures and written == ["a.png", "a.png.png", "sub/a.png", "sub/a.png.png"]


def test_batches_and_predictions_without_pictures(tmp_path, trained, copies):
    detector = detector_of(tmp_path, trained)
    damaged = tmp_path / "d.png"
    damaged.write_bytes(b"none")
    files = [*copies, str(damaged)]
    detect_files(detector, files, str(tmp_path / "out"), 0.0)
    found, (failure,) = detect_files(detector, files, str(tmp_path / "json"), 0.0, batch_size=2, draws=False)
    assert [record["file"] for record in found] == copies and "d.png" in failure
    assert len(names_in(tmp_path / "out" / "pictures")) == 3
    assert names_in(tmp_path / "json") == ["predictions.json"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("cannot write b.png: the disk is full")])
def test_what_was_found_before_an_error_is_written(tmp_path, trained, copies, error, monkeypatch):
    detector = detector_of(tmp_path, trained)

    def fail_at_the_second(result, out_file):
        if out_file.name == "b.png":
            raise error

    monkeypatch.setattr(Detections, "draw", fail_at_the_second)
    with pytest.raises(type(error)):
        detect_files(detector, copies, str(tmp_path / "out"), 0.0)
    found = read_json(tmp_path / "out" / "predictions.json")
    assert [Path(entry["file"]).name for entry in found][:2] == ["a.png", "b.png"]


def test_a_bug_of_the_model_is_no_unreadable_image(tmp_path, trained, image, monkeypatch):
    detector = detector_of(tmp_path, trained)
    monkeypatch.setattr(detector.model, "test_step", Mock(side_effect=ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        detect_files(detector, [image], str(tmp_path / "out"), 0.0)


def test_an_evaluation_with_amp_computes_in_bfloat16(tmp_path, trained):
    seen = set()

    class SeesTypes(Hook):
        def before_test(self, runner):
            layers = [part for part in runner.model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
            layers[0].register_forward_hook(lambda layer, inputs, output: seen.add(output.dtype))

    cfg = toy_config(tmp_path, custom_hooks=[dict(type=SeesTypes)])
    visdet.evaluate(cfg, trained)
    visdet.evaluate(cfg, trained, amp=True)
    assert seen == {torch.float32, torch.bfloat16}

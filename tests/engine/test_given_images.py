"""The Python API of a detector: what it takes as images, what it returns, and what it refuses."""

import json
import os
import struct
import sys
from collections import UserDict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from disk import full_disk, names_in
from PIL import Image
from programs import run_python
from torch.testing import assert_close
from toy_run import PIPELINE, detector_of, toy_config

import visdet
from visdet.engine.inference import given_images, videos
from visdet.engine.inference.detect_files import detect_files
from visdet.engine.inference.mp4_times import set_frame_times
from visdet.errors import MissingPackageError, UserError

RGB = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


CHW = torch.from_numpy(RGB).permute(2, 0, 1)
DEEP = RGB.astype(np.uint16) * 257


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    torch.manual_seed(0)
    return detector_of(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def file(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a b.png")
    return tmp_path / "a b.png"


def boxes(found):
    return torch.cat([found.boxes, found.scores[:, None], found.labels[:, None]], dim=1)


class ArrayOfAnotherPackage:
    ndim = 3

    def __array__(self, dtype=None, copy=None):
        return RGB

    def __iter__(self):
        return iter(RGB)


FORMS = {
    "bgr": (RGB[..., ::-1], "bgr"),
    "rgb": (RGB, "rgb"),
    "fortran": (np.asfortranarray(RGB), "rgb"),
    "read-only": (np.frombuffer(RGB.tobytes(), np.uint8).reshape(RGB.shape), "rgb"),
    "strided": (np.repeat(RGB, 2, axis=1)[:, ::2], "rgb"),
    "rgba": (np.dstack([RGB, RGB[..., 0]]), "rgb"),
    "uint16": (DEEP, "rgb"),
    "uint16 of another byte order": (DEEP.astype(">u2"), "rgb"),
    "int64": (RGB.astype(np.int64), "rgb"),
    "float64": (RGB / 255, "rgb"),
    "float32 after resizing": (np.where(RGB == 255, 1.0000002, RGB / 255).astype(np.float32), "rgb"),
    "memory": (memoryview(RGB.copy()), "rgb"),
    "array of another package": (ArrayOfAnotherPackage(), "rgb"),
    "tensor": (CHW, "rgb"),
    "bgr tensor": (CHW.flip(0), "bgr"),
    "float tensor": (CHW / 255, "rgb"),
    "learning tensor": ((CHW / 255).requires_grad_(), "rgb"),
    "pillow": (Image.fromarray(RGB), "bgr"),
    "pillow rgba": (Image.fromarray(RGB).convert("RGBA"), "bgr"),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_in_memory_gives_what_its_file_gives(detector, file, form):
    given, order = FORMS[form]
    before = given.copy() if isinstance(given, np.ndarray) else None
    expected = detector(file, score_threshold=0)
    found = detector(given, score_threshold=0, channel_order=order)
    assert len(expected) and torch.equal(boxes(found), boxes(expected))
    assert np.array_equal(found.image, RGB) and found.path is None and found.shape == (30, 40)
    assert before is None or np.array_equal(given, before)


def test_grey_images_are_three_equal_channels(detector):
    grey = RGB[..., 0]
    expected = boxes(detector(np.dstack([grey] * 3), score_threshold=0))
    for given in (
        grey,
        grey[..., None],
        torch.from_numpy(grey),
        torch.from_numpy(grey)[None],
        Image.fromarray(grey),
    ):
        assert torch.equal(boxes(detector(given, score_threshold=0)), expected)


def test_one_image_gives_one_result_and_many_give_a_list_or_an_iterator(detector, file):
    for one in (file, str(file), RGB):
        assert isinstance(detector(one), visdet.Detections)
    for many, number in (
        (file.parent, 1),
        (str(file.parent / "*.png"), 1),
        ([file, RGB], 2),
        ((RGB,), 1),
        ([], 0),
        (np.stack([RGB, RGB]), 2),
        (torch.zeros(3, 3, 8, 9), 3),
    ):
        found = detector(many, batch_size=2)
        assert isinstance(found, list) and len(found) == number
    read = []
    results = detector((read.append(n) or RGB for n in range(9)), batch_size=2)
    assert not read and len(next(results).image) == 30 and read == [0, 1], "as many as a batch are read"
    assert len(list(results)) == 8 and list(detector(iter([]))) == []


def test_a_batch_gives_what_single_images_give(detector):
    images = [np.roll(RGB, n, axis=0) for n in range(5)]
    for one, of_batch in zip(images, detector(images, batch_size=3, score_threshold=0), strict=True):
        assert_close(boxes(of_batch), boxes(detector(one, score_threshold=0)))


def test_a_result_is_what_infer_writes(detector, file, tmp_path):
    (written,), _ = detect_files(detector, [str(file)], str(tmp_path / "out"), 0.0)
    result = detector(str(file), score_threshold=0.0)
    assert json.loads(result.to_json()) == result.to_dict() == written
    picture = result.draw(tmp_path / "drawn" / "a.png")
    with (
        Image.open(tmp_path / "drawn" / "a.png") as stored,
        Image.open(tmp_path / "out/pictures/a b.png") as other,
    ):
        assert np.array_equal(np.asarray(picture), np.asarray(stored))
        assert np.array_equal(np.asarray(picture), np.asarray(other))
    with pytest.raises(UserError, match=r"cannot write .*a\.nonsense"):
        result.draw(tmp_path / "a.nonsense")


def test_the_threshold(detector):
    scores = detector(RGB, score_threshold=0).scores
    least = float(scores[0])
    assert len(detector(RGB, np.int64(2), np.float32(least))) == int((scores >= scores[0]).sum())
    assert len(detector(RGB, score_threshold=1)) == 0 and "nothing in an image" in repr(detector(RGB, 1, 1))
    assert detector.score_thresholds == [0.3, 0.3]


def write_video(path, levels=(0, 100, 200)):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 7, (64, 48))
    for level in levels:
        writer.write(np.full((48, 64, 3), level, np.uint8))
    writer.release()
    return str(path)


@pytest.mark.parametrize(
    ("name", "share", "is_said"), [("a.avi", 0.5, 1), ("a.mkv", 0.4, 1), ("a.avi", 1, 0)]
)
def test_a_video_that_is_cut_says_how_many_frames_it_gives(detector, tmp_path, stdout, name, share, is_said):
    path = Path(write_video(tmp_path / name, range(0, 250, 5)))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    count = len(list(detector(path, batch_size=8)))
    assert 0 < count < 50 or not is_said
    said = f"video {path} is damaged or cut short: only {count} of its 50 frames can be read"
    assert stdout().replace("\n", " ").count(said) == is_said


class Announced:
    """A video whose container gives the duration alone: 3 frames from 5 s on, 0.2 s apart, at a rate of 30."""

    def __init__(self, path, missing):
        self.video, self.read_frames = cv2.VideoCapture(path), 0
        self.count = 150 + 18 + missing

    def read(self):
        self.read_frames += 1
        return self.video.read()

    def get(self, key):
        shown = 200.0 * min(self.read_frames - 1, 2)
        values = {cv2.CAP_PROP_FPS: 30.0, cv2.CAP_PROP_FRAME_COUNT: self.count, cv2.CAP_PROP_POS_MSEC: shown}
        return (values | {getattr(cv2, "CAP_PROP_PTS", -1): 150.0})[key]


@pytest.mark.parametrize(("missing", "is_said"), [(0, False), (60, True)])
def test_a_whole_video_of_uneven_times_is_not_called_cut(tmp_path, monkeypatch, stdout, missing, is_said):
    path = write_video(tmp_path / "a.mp4")
    monkeypatch.setattr(given_images, "_opened", lambda given: Announced(given, missing))
    times = [image.time for image in given_images.each_image(path)]
    assert times == pytest.approx([0.0, 0.2, 0.4])
    assert ("is damaged or cut short" in stdout().replace("\n", " ")) == is_said


def test_a_folder_of_images_and_videos_is_read_in_the_order_of_the_names(detector, tmp_path):
    Image.new("RGB", (64, 48)).save(tmp_path / "b.png")
    video, later = (write_video(tmp_path / name) for name in ("a ü.MP4", "c.avi"))
    found = detector(tmp_path, batch_size=2)
    assert [(result.path, result.frame) for result in found] == [
        *((video, number) for number in range(3)),
        (str(tmp_path / "b.png"), None),
        *((later, number) for number in range(3)),
    ]
    assert list(found[1].to_dict())[:2] == ["file", "frame"] and "frame" not in found[3].to_dict()
    assert "frame 1" in repr(found[1])


def test_infer_reads_videos_and_goes_on_after_one_that_is_damaged(detector, tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"no video")
    files = [str(tmp_path / "a.mp4"), write_video(tmp_path / "b.mp4", (0, 50)), str(tmp_path / "c.png")]
    Image.fromarray(RGB).save(files[2])
    found, (failure,) = detect_files(detector, files, str(tmp_path / "out"), None)
    assert [image["file"] for image in found] == [files[1], files[1], files[2]]
    assert failure.startswith(f"video {files[0]} cannot be read")
    assert names_in(tmp_path / "out" / "pictures") == ["b.mp4", "c.png"]


def test_paths_begin_with_the_home_folder(detector, file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    assert detector("~/a b.png").path == str(file)
    detector("~/a b.png").draw("~/drawn.png")
    detector([RGB], save_video="~/out.mp4")
    assert (file.parent / "drawn.png").is_file() and (file.parent / "out.mp4").is_file()
    assert detector("~/*b.png")[0].path == str(file)


def test_a_video_is_read_frame_by_frame_and_written_with_its_detections(detector, tmp_path):
    path = write_video(tmp_path / "in.mp4")
    with pytest.raises(UserError, match="must not name a video that is read"):
        list(detector(path, save_video=tmp_path / "sub" / ".." / "in.mp4"))
    results = detector(path, batch_size=2, save_video=tmp_path / "out.mp4")
    assert not isinstance(results, list)
    assert [round(float(result.image.mean()), -2) for result in results] == [0, 100, 200]
    video = cv2.VideoCapture(str(tmp_path / "out.mp4"))
    assert (video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)) == (3, 7)
    with pytest.raises(UserError, match=r"must name an \.mp4 file"):
        detector(path, save_video="out.gif")
    with pytest.raises(UserError, match="frames must be of one size"):
        detector(
            [np.zeros((600, 600, 3), np.uint8), np.zeros((700, 600, 3), np.uint8)],
            save_video=tmp_path / "b.mp4",
        )


UNEVEN = [0.2] * 3 + [0.02] * 4 + [1.5, 0.04, 0.04]


def times_of(path):
    """Return when the frames of a video are shown, in seconds, as OpenCV reads them."""
    video = cv2.VideoCapture(str(path))
    times = []
    while video.read()[0]:
        times.append(video.get(cv2.CAP_PROP_POS_MSEC) / 1000)
    return times


def test_the_written_video_plays_at_the_times_of_the_original(detector, tmp_path):
    path = write_video(tmp_path / "in.mp4", [25 * k for k in range(len(UNEVEN))])
    assert set_frame_times(path, UNEVEN)
    starts = [sum(UNEVEN[:k]) for k in range(len(UNEVEN))]
    expected = pytest.approx(starts, abs=1e-3)
    assert times_of(path) == expected
    results = list(detector(path, batch_size=3, save_video=tmp_path / "out.mp4"))
    assert [result.time for result in results] == expected
    assert results[0][:0].time == results[0].time and results[7].to_dict()["time"] == pytest.approx(0.68)
    assert times_of(tmp_path / "out.mp4") == expected
    found, _ = detect_files(detector, [path], str(tmp_path / "out"), 0.0)
    assert [record["time"] for record in found] == expected
    assert times_of(tmp_path / "out/pictures/in.mp4") == expected
    # The frames that were taken until then have their times, too.
    stopped = detector(path, save_video=tmp_path / "part.mp4")
    for _ in range(6):
        next(stopped)
    stopped.close()
    assert times_of(tmp_path / "part.mp4")[:5] == pytest.approx(starts[:5], abs=1e-3)


@pytest.mark.parametrize("change", ["index first", "cut", "too long"])
def test_times_that_cannot_be_set_are_said(detector, tmp_path, monkeypatch, stdout, change):
    path = Path(write_video(tmp_path / "in.mp4"))
    content = path.read_bytes()
    changed = {"index first": content + struct.pack(">I4s", 8, b"free"), "cut": content[:-500]}.get(
        change, content
    )
    path.write_bytes(changed)
    assert not set_frame_times(str(path), [1.0, 2.0, 10**5 if change == "too long" else 3.0])
    assert path.read_bytes() == changed
    path.write_bytes(content)
    assert set_frame_times(str(path), [0.1, 0.5, 0.1])
    monkeypatch.setattr(videos, "set_frame_times", lambda *arguments: False)
    list(detector(str(path), save_video=tmp_path / "out.mp4"))
    assert "uneven times" in stdout()


@pytest.mark.parametrize("given", ["list", "pattern", "folder", "second of a folder", "link"])
def test_a_video_that_is_read_is_not_overwritten(detector, tmp_path, given):
    path = Path(write_video(tmp_path / "in.mp4"))
    written = path.read_bytes()
    if given.startswith("second"):
        write_video(tmp_path / "first.mp4")
    if given == "link":
        os.link(path, tmp_path / "linked.mp4")
    images = {"list": [path], "pattern": str(tmp_path / "i*.mp4"), "link": path}.get(given, tmp_path)
    with pytest.raises(UserError, match="must not name a video that is read"):
        list(detector(images, save_video=tmp_path / "linked.mp4" if given == "link" else path))
    assert path.read_bytes() == written and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_video_that_the_disk_cannot_take_is_a_message(detector, tmp_path, limit):
    """The codec's header, or the index at the end, does not fit."""
    path = tmp_path / "out.mp4"
    path.write_text("old")
    noise = np.random.default_rng(0).integers(0, 256, (4, 480, 640, 3), dtype=np.uint8)
    message = r"out\.mp4 cannot be written: only 0 of its 4 frames.*disk full"
    with pytest.raises(UserError, match=message), full_disk(limit):
        detector(list(noise), save_video=path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "images must be .*got NoneType"),
        (3, "got int"),
        (UserDict(a="a.png"), "got UserDict"),
        ([("a.png", "b.png")], r"images\[0\] must be a path, .*got a tuple"),
        ([RGB, None], r"images\[1\] must be .*got NoneType"),
        ([RGB, np.full((4, 4), -1)], r"images\[1\]: values of int64 must be"),
        (np.full((2, 4, 4, 3), np.nan), r"images\[0\]: values of float64"),
        ("", "'' is no path"),
        ("a\0.png", r"'a\\x00.png' is no path"),
        ("nowhere.png", "nowhere.png does not exist"),
        ("/dev/null", "/dev/null is neither a file nor a folder"),
        ("http://a/b.png", "http://a/b.png does not exist"),
        ("nowhere.mp4", "nowhere.mp4 does not exist"),
        (RGB.transpose(2, 0, 1), r"an array must be .*\[H, W, 3\].*got \[3, 30, 40\]"),
        (torch.from_numpy(RGB), r"a tensor must be .*\[3, H, W\].*got \[30, 40, 3\]"),
        (np.zeros(5), r"an array must be .*got \[5\]"),
        (np.zeros((0, 4, 3), np.uint8), r"no pixels, its shape is \[0, 4, 3\]"),
        (Image.new("RGB", (0, 0)), "no pixels"),
        (torch.full((3, 4, 4), torch.nan), "float32 must be from 0 to 1, got nan to nan"),
        (np.full((4, 4, 3), np.inf), "from 0 to 1, got inf to inf"),
        (RGB.astype(np.float32), "from 0 to 1, got 0 to 255; .*divide floats by 255"),
        (np.full((4, 4), -1), "from 0 to 255, got -1 to -1"),
        (np.zeros((4, 4), bool), "whole numbers or floats, got bool"),
        (np.array([["a"]]), "got <U1"),
    ],
)
def test_what_is_no_image_is_one_message(detector, given, message):
    with pytest.raises(UserError, match=message):
        detector(given)


@pytest.mark.parametrize("name", ["bad.png", "bad.mp4"])
def test_a_damaged_file_is_named(detector, file, name):
    (file.parent / name).write_text("hello")
    with pytest.raises(UserError, match=name):
        list(detector([file, file.parent / name]))
    if name == "bad.png":
        with pytest.raises(UserError, match=name):
            detector(file.parent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be int of 1 or more, got 0"),
        ({"score_threshold": 30}, "score_threshold must be"),
        ({"amp": "yes"}, "amp must be"),
        ({"score_threshold": float("nan")}, "got nan"),
        ({"channel_order": "gbr"}, "channel_order must be 'bgr' or 'rgb', got 'gbr'"),
    ],
)
def test_wrong_arguments_are_one_message(detector, options, message):
    with pytest.raises(UserError, match=message):
        detector([RGB], **options)


def test_other_defaults_of_torch_change_nothing(tmp_path, detector):
    cfg = toy_config(tmp_path, test_dataloader__dataset__pipeline=PIPELINE, train_cfg__max_iters=1)
    expected = boxes(detector(RGB, score_threshold=0, batch_size=10**30))
    with torch.device("meta"), torch.inference_mode():
        assert torch.equal(boxes(detector(RGB, score_threshold=0)), expected)
        assert len(visdet.init_detector(cfg, device="cpu")(RGB, score_threshold=0))
        result = visdet.train(cfg)
        assert visdet.evaluate(cfg, result.last_checkpoint) == result.metrics


def test_thresholds_of_another_number_of_classes(detector, monkeypatch):
    for wrong, message in (
        ([0.5], "score_thresholds must have a number for each of the 2 classes"),
        (0.5, "score_thresholds must be"),
        ([0.5, float("nan")], "score_thresholds must be .*nan"),
        (["a", "b"], "score_thresholds must be .*'a'"),
    ):
        monkeypatch.setattr(detector, "score_thresholds", wrong)
        with pytest.raises(UserError, match=message):
            detector(RGB)


def test_what_init_detector_refuses():
    with pytest.raises(UserError, match="device 'meta' is not available"):
        visdet.Detector("deformable_detr/deformable-detr_shapes", device="meta")
    with pytest.raises(UserError, match="config must be"):
        visdet.init_detector(3)
    with pytest.raises(UserError, match="checkpoint must be"):
        visdet.init_detector("x.py", 3)
    with pytest.raises(UserError, match="config nothing does not exist"):
        visdet.init_detector("nothing")
    with pytest.raises(UserError, match=r"SparseDrive does not take image files.*visdet\.evaluate"):
        visdet.init_detector("sparsedrive/sparsedrive_toy_stage1", device="cpu")


def test_supervision(detector, monkeypatch):
    class Taken(dict):
        def __init__(self, **given):
            super().__init__(given)

    monkeypatch.setitem(sys.modules, "supervision", type("Stub", (), {"Detections": Taken}))
    result = detector(RGB, score_threshold=0)
    taken = result.to_supervision()
    assert taken["xyxy"].shape == (len(result), 4) and taken["class_id"].tolist() == result.labels.tolist()
    assert taken["data"]["class_name"].tolist() == result.class_names
    assert detector(RGB, score_threshold=1).to_supervision()["xyxy"].shape == (0, 4)
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(MissingPackageError, match="pip install supervision"):
        result.to_supervision()


def test_the_real_supervision_takes_the_detections(detector):
    supervision = pytest.importorskip("supervision")
    result = detector(RGB, score_threshold=0)
    taken = result.to_supervision()
    assert isinstance(taken, supervision.Detections) and len(taken) == len(result) > 0
    assert (
        np.array_equal(taken.xyxy, result.boxes.numpy()) and taken.class_id.tolist() == result.labels.tolist()
    )
    assert taken["class_name"].tolist() == result.class_names
    assert supervision.BoxAnnotator().annotate(RGB.copy(), taken).shape == RGB.shape
    assert len(detector(RGB, score_threshold=1).to_supervision()) == 0


def test_the_names_of_the_package_come_at_their_first_use():
    code = (
        "import sys, visdet\n"
        "assert not {'torch', 'mmengine', 'numpy'} & set(sys.modules)\n"
        "assert {'init_detector', 'train', 'evaluate', 'Detections'} <= set(visdet.__all__) & set(dir(visdet))\n"
        "assert visdet.train.__module__ == 'visdet.data_folder' and 'torch' not in sys.modules\n"
        "assert visdet.init_detector.__module__ == 'visdet.engine.inference.detector'\n"
    )
    run_python("-c", code)

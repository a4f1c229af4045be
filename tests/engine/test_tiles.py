"""Large pictures as tiles, suppression of repeated detections, and pictures that are bytes."""

import copy
import io
import itertools
import json

import cv2
import numpy as np
import pytest
import torch
from json_files import read_json
from mmengine.structures import InstanceData
from PIL import Image
from toy_run import PIPELINE, detections, toy_config, toy_runner

from visdet.engine import Detector, UserError
from visdet.engine.inference.detect_files import detect_files
from visdet.engine.inference.tiles import windows_of
from visdet.ops import box_iou_rotated
from visdet.structures.rotated_boxes import boxes_to_polygons, polygons_to_boxes

RESIZE = {"type": "Resize", "scale": (320, 320), "keep_ratio": True}
SEEN = 6  # pixels of what the model gets that an object must cover in both directions


@pytest.mark.parametrize(
    ("size", "side", "overlap", "expected"),
    [
        ((300, 400), 640, 0.2, [(0, 0, 400, 300)]),
        ((640, 640), 640, 0.2, [(0, 0, 640, 640)]),
        ((100, 1000), 640, 0.2, [(0, 0, 640, 100), (360, 0, 1000, 100), (0, 0, 1000, 100)]),
        ((2, 3), 2, 0.0, [(0, 0, 2, 2), (1, 0, 3, 2), (0, 0, 3, 2)]),
    ],
)
def test_windows_by_hand(size, side, overlap, expected):
    assert windows_of(*size, side, overlap) == expected


@pytest.mark.parametrize("side", [100, 333, 640])
@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5])
def test_windows_cover_the_picture_and_share_enough(side, overlap):
    windows = windows_of(701, 1003, side, overlap)[:-1]
    seen = np.zeros((701, 1003), bool)
    for x1, y1, x2, y2 in windows:
        seen[y1:y2, x1:x2] = True
        assert x2 - x1 == min(side, 1003) and y2 - y1 == min(side, 701)
    lefts = sorted({window[0] for window in windows})
    assert seen.all() and all(a + side - b >= overlap * side - 1 for a, b in itertools.pairwise(lefts))


def bright_pixels(item):
    return (item["inputs"].amax(0).numpy() > 128).astype(np.uint8)


def scale_of(sample):
    return torch.tensor(sample.get("scale_factor", (1.0, 1.0)))


def with_spots(sample, boxes):
    """Give a sample the boxes as what is found, of one class and score."""
    scores, labels = torch.full((len(boxes),), 0.9), torch.zeros(len(boxes), dtype=torch.int64)
    sample.pred_instances = InstanceData(bboxes=boxes, scores=scores, labels=labels)
    return sample


class BrightSpots(Detector):
    """Finds every bright spot that is large enough in what the model gets."""

    def _predict(self, items, amp, graph):
        found = []
        for item in items:
            sample = item["data_samples"].clone()
            image = bright_pixels(item)
            _, _, rows, _ = cv2.connectedComponentsWithStats(image)
            boxes = torch.tensor([(x, y, x + w, y + h) for x, y, w, h, _ in rows[1:] if min(w, h) >= SEEN])
            found.append(with_spots(sample, boxes.view(-1, 4) / scale_of(sample).repeat(2)))
        return found


class TurnedSpots(BrightSpots):
    """Finds the turned box of every bright spot."""

    def _predict(self, items, amp, graph):
        found = super()._predict(items, amp, graph)
        for item, sample in zip(items, found, strict=True):
            image = bright_pixels(item)
            outlines = cv2.findContours(image, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)[0]
            corners = [cv2.boxPoints(cv2.minAreaRect(outline)) + 0.5 for outline in outlines]
            polygons = torch.from_numpy(np.reshape(corners, (-1, 4, 2)).astype(np.float32))
            with_spots(sample, polygons_to_boxes(polygons / scale_of(sample)))
        return found


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiles")
    steps = [PIPELINE[0], RESIZE, *PIPELINE[1:]]
    checkpoint = folder / "a.pth"
    torch.save(toy_runner(folder).model.state_dict(), checkpoint)
    return BrightSpots(toy_config(folder, test_dataloader__dataset__pipeline=steps), checkpoint, "cpu")


def picture_of(size, boxes):
    pixels = np.zeros((size[0], size[1], 3), np.uint8)
    for x, y, w, h in boxes:
        pixels[y : y + h, x : x + w] = 255
    return pixels


def test_tiles_find_small_objects_once_in_a_large_picture(detector):
    """4000 x 3000 pixels and objects of 20: a model of 320 pixels sees 1.6 pixels of each, and 10 of a tile."""
    numbers = np.random.default_rng(0)
    places = [(50 + 100 * column, 40 + 100 * row) for column in range(39) for row in range(29)]
    chosen = numbers.choice(len(places), 200, replace=False)
    boxes = [(*places[index], 20, 20) for index in chosen]
    picture = picture_of((3000, 4000), [*boxes, (0, 2960, 4000, 40)])  # and an object across all tiles
    alone = detector(picture)
    tiled = detector(picture, tiles=640, overlap=0.2, batch_size=8)
    assert len(alone) <= 1 and tiled.shape == (3000, 4000)
    found = {tuple(round(edge / 5) for edge in one.box) for one in tiled}
    wanted = {tuple(round(edge / 5) for edge in (x, y, x + w, y + h)) for x, y, w, h in boxes}
    assert len(wanted & found) >= 0.95 * len(wanted) and len(found) == len(tiled)
    small = [one for one in tiled if one.box[2] - one.box[0] < 40]
    assert len(small) <= 1.02 * len(boxes), "an object that a tile cuts, or two tiles show, is found once"


def test_turned_boxes_are_joined_drawn_and_written(detector, tmp_path):
    rng = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(100, 1400, 150), np.arange(100, 900, 150)), -1).reshape(-1, 2)
    turns = rng.uniform(-1.5, 1.5, len(places))
    boxes = np.column_stack([places, np.full((len(places), 2), (60, 24)), turns]).astype(np.float32)
    polygons = boxes_to_polygons(torch.from_numpy(boxes)).numpy()
    picture = picture_of((1000, 1500), [])
    cv2.fillPoly(picture, list(polygons.round().astype(np.int32)), (255, 255, 255))
    Image.fromarray(picture).save(tmp_path / "a.png")
    turned = copy.copy(detector)
    turned.__class__ = TurnedSpots
    found = turned(tmp_path / "a.png", tiles=480)
    outlines = found.polygons
    count = len(boxes)
    assert len(found) == count and found.are_turned and outlines.shape == (count, 4, 2)
    overlaps = box_iou_rotated(found.boxes, torch.from_numpy(boxes))
    assert (overlaps.amax(1) > 0.85).all() and len(overlaps.argmax(1).unique()) == count
    record = json.loads(found.to_json())["detections"][0]
    assert record["bbox_cxcywha"] == pytest.approx(found.boxes[0].tolist(), abs=1e-4)
    assert np.allclose(record["polygon"], outlines[0], atol=0.01) and "bbox_xyxy" not in record
    row = found.to_coco()[0]
    assert np.allclose(row["segmentation"], outlines[0].flatten())
    x1, y1, x2, y2 = found.enclosing_boxes[0].tolist()
    assert row["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1])
    changed = np.asarray(found.draw()) != picture
    columns, rows = outlines.round().to(int).reshape(-1, 2).T.numpy()
    assert changed[rows, columns].any(1).mean() > 0.95


def test_a_picture_that_is_not_larger_than_a_tile_is_seen_as_without_tiles(detector):
    picture = picture_of((300, 400), [(10, 10, 50, 60), (200, 100, 30, 30)])
    assert torch.equal(detector(picture).boxes, detector(picture, tiles=640).boxes)


def test_suppression_leaves_the_best_of_each_class():
    box, near, far = (0, 0, 10, 10), (0, 0, 10, 9), (50, 50, 60, 60)
    found = detections((0, 0.9, box), (0, 0.8, near), (1, 0.7, near), (0, 0.6, far))
    assert [(one.label, round(one.score, 1)) for one in found.nms(0.7)] == [(0, 0.9), (1, 0.7), (0, 0.6)]
    assert len(found.nms(0.95)) == 4 and len(detections().nms(0.5)) == 0
    with pytest.raises(UserError, match="iou_threshold must be"):
        found.nms(2)


def test_files_are_cut_and_repeats_are_said(detector, tmp_path, stdout, monkeypatch):
    boxes = [(100, 100, 20, 20), (900, 500, 20, 20)]
    Image.fromarray(picture_of((700, 1200), boxes)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    files = [str(tmp_path / name) for name in ("a.png", "b.png")]
    found, failures = detect_files(detector, files, str(tmp_path / "out"), None, tiles=320, draws=False)
    assert len(found[0]["detections"]) == 2 and len(failures) == 1 and "b.png" in failures[0]
    assert read_json(tmp_path / "out/predictions.json") == found
    assert "--nms" not in stdout()
    twice = detections(*[(0, 0.9, (0, 0, 10, 10))] * 2)
    monkeypatch.setattr(detector, "_predict", lambda items, *_: [twice.sample] * len(items))
    for nms, count in ((None, 2), (0.7, 1)):
        found, _ = detect_files(detector, files[:1], str(tmp_path / "out"), None, draws=False, nms=nms)
        assert len(found[0]["detections"]) == count == len(detector(files[0], nms=nms))
        said = " ".join(stdout().split())
        assert ("--nms 0.7 would leave out 1 of the 2 detections" in said) == (nms is None)


def test_bytes_and_open_files_are_pictures(detector, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(picture_of((300, 400), [(10, 10, 50, 60)])).save(path)
    expected = detector(path).boxes
    assert len(expected) == 1
    content = path.read_bytes()
    with open(path, "rb") as file:
        for given in (content, bytearray(content), io.BytesIO(content), file):
            assert torch.equal(detector(given).boxes, expected)
    assert [len(one) for one in detector([content, path])] == [1, 1]
    for given, message in (
        (b"", "images must be the content of an image, got bytes"),
        ([b"abc"], r"images\[0\] must be the content of an image, got bytes"),
        (io.StringIO("x"), "must be opened for bytes"),
        ("https://a.b/c.jpg", "https://a.b/c.jpg does not exist as a file, and nothing is fetched"),
    ):
        with pytest.raises(UserError, match=message):
            detector(given)

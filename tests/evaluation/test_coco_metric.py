"""CocoMetric: APs by hand, both backends, every mistake in a file, several processes."""

from pathlib import Path

import pytest
import torch
from instances import predictions_of
from json_files import read_json, write_json
from mmengine.structures import InstanceData
from PIL import Image
from two_processes import in_two_processes

from visdet.datasets import CocoDataset
from visdet.evaluation import coco_metric
from visdet.registry import METRICS
from visdet.structures import DetDataSample

CLASSES = ("cat", "dog")
BACKENDS = ("faster_coco_eval", "pycocotools")


def truth(path, boxes, num_images=1):
    """Write ground truth of (image id, label, xywh, crowd) and return the path; category ids are 7, 8, ..."""
    annotations = [
        dict(
            id=i,
            image_id=image,
            category_id=7 + label,
            bbox=xywh,
            area=xywh[2] * xywh[3],
            iscrowd=crowd,
        )
        for i, (image, label, xywh, crowd) in enumerate(boxes)
    ]
    images = [dict(id=i, file_name=f"{i}.jpg", height=200, width=300) for i in range(num_images)]
    categories = [dict(id=7 + i, name=name) for i, name in enumerate(CLASSES)]
    write_json(path, dict(images=images, annotations=annotations, categories=categories))
    return str(path)


def sample(image_id, detections):
    """Return what the evaluator hands over for detections of (label, xyxy, score)."""
    data_sample = DetDataSample(metainfo=dict(img_id=image_id))
    data_sample.pred_instances = predictions_of(detections)
    return data_sample.to_dict()


def evaluate(ann_file, detections_of_image, classes=CLASSES, size=None, **arguments):
    metric = METRICS.build(dict(type="CocoMetric", ann_file=ann_file, **arguments))
    metric.dataset_meta = dict(classes=classes)
    for image_id, detections in detections_of_image.items():
        metric.process({}, [sample(image_id, detections)])
    metrics = metric.evaluate(size or len(detections_of_image))
    assert all(type(value) is float for value in metrics.values())
    # pycocotools adds the least float to its denominators, so its 1 is not quite 1.
    for row in [metrics, *metric.classwise_results]:
        row.update({key: round(value, 9) for key, value in row.items() if isinstance(value, float)})
    return metrics, metric


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


TINY, WIDE, CROWD = (0, 0, [10, 10, 20, 20], 0), (0, 0, [0, 0, 100, 50], 0), (0, 0, [100, 100, 100, 90], 1)
AREAS = [(0, 0, [0, 0, 32, 31], 0), (0, 0, [50, 0, 32, 33], 0), (0, 0, [100, 0, 96, 97], 0)]
HIT = (0, [0, 0, 100, 50], 0.9)
MISSES = [(0, [100, 100, 120, 120], 0.9 - 0.001 * i) for i in range(100)]
BY_HAND = {
    "perfect": (
        [TINY],
        {0: [(0, [10, 10, 30, 30], 0.9)]},
        {},
        dict(mAP=1, mAP_50=1, mAP_75=1, mAP_s=1, mAP_m=-1, mAP_l=-1),
    ),
    # IoU 0.62 counts at the thresholds 0.50, 0.55, 0.60 of ten.
    "IoU 0.62": ([WIDE], {0: [(0, [0, 0, 62, 50], 0.9)]}, {}, dict(mAP=0.3, mAP_50=1, mAP_75=0)),
    "one threshold": ([WIDE], {0: [(0, [0, 0, 62, 50], 0.9)]}, {"iou_thrs": 0.6}, dict(mAP=1, mAP_50=-1)),
    # A false alarm above the hit: precision 1/2 at every recall. Below the hit, it costs nothing.
    "alarm above": ([WIDE], {0: [(0, [100, 100, 150, 150], 0.95), HIT]}, {}, dict(mAP=0.5, mAP_50=0.5)),
    "alarm below": ([WIDE], {0: [(0, [100, 100, 150, 150], 0.5), HIT]}, {}, dict(mAP=1, mAP_75=1)),
    "twice": ([WIDE], {0: [(0, [0, 0, 100, 50], 0.5), HIT]}, {}, dict(mAP=1, mAP_50=1)),
    "wrong label": ([WIDE], {0: [(1, [0, 0, 100, 50], 0.9)]}, {}, dict(mAP=0, mAP_50=0)),
    "nothing found": ([WIDE], {0: []}, {}, dict(mAP=0, mAP_50=0)),
    "no boxes": ([], {0: [HIT]}, {}, dict(mAP=-1, mAP_50=-1, mAP_l=-1)),
    # Precision 1 at the recalls 0, 0.01 .. 0.50: 51 of 101 points.
    "half found": (
        [WIDE, (1, 0, [9, 9, 100, 50], 0)],
        {0: [HIT], 1: []},
        {"metric_items": ["mAP", "AR@100"]},
        {"mAP": 51 / 101, "AR@100": 0.5},
    ),
    "crowd": (
        [WIDE, CROWD],
        {0: [(0, [110, 110, 150, 150], 0.99), (0, [120, 120, 160, 160], 0.98), HIT]},
        {},
        dict(mAP=1),
    ),
    "small, medium and large": (
        AREAS,
        {0: [(0, [0, 0, 32, 31], 0.9), (0, [100, 0, 196, 97], 0.8)]},
        {},
        dict(mAP_s=1, mAP_m=0, mAP_l=1),
    ),
    "at most 100 count for AP": (
        [WIDE],
        {0: [*MISSES, (0, [0, 0, 100, 50], 0.1)]},
        {"proposal_nums": (100, 300), "metric_items": ["mAP", "AR@100", "AR@300", "AR_s@300", "AR_m@300"]},
        {"mAP": 0, "AR@100": 0, "AR@300": 1, "AR_s@300": -1, "AR_m@300": 1},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(tmp_path, backend, name):
    boxes, detections, arguments, expected = BY_HAND[name]
    ann_file = truth(tmp_path / "a.json", boxes, num_images=len(detections))
    metrics, metric = evaluate(ann_file, detections, backend=backend, **arguments)
    found = {key: metrics[f"coco/bbox_{key}"] for key in expected}
    assert found == pytest.approx(expected, abs=1e-6)
    num_boxes = [sum(label == k and not crowd for _, label, _, crowd in boxes) for k in range(2)]
    assert [row["num_boxes"] for row in metric.classwise_results] == num_boxes


def test_labels_follow_names_and_id_zero_counts(tmp_path, backend):
    """Classes in another order than the file's categories; annotation id 0 is a box like any other."""
    ann_file = truth(tmp_path / "a.json", [(0, 0, [0, 0, 50, 50], 0), (0, 1, [60, 60, 50, 50], 0)])
    detections = [(1, [0, 0, 50, 50], 0.9), (0, [60, 60, 110, 110], 0.9)]
    metrics, metric = evaluate(
        ann_file, {0: detections}, classes=("dog", "cat"), backend=backend, classwise=True
    )
    assert metrics["coco/bbox_mAP"] == 1.0
    assert metrics["coco/bbox_mAP/dog"] == metrics["coco/cat_precision"] == 1.0
    assert [row["name"] for row in metric.classwise_results] == ["dog", "cat"]


def test_ground_truth_from_the_samples():
    """Boxes of the samples are in pixels of the resized image, detections in pixels of the original."""
    metric = METRICS.build(dict(type="CocoMetric"))
    metric.dataset_meta = dict(classes=CLASSES)
    item = sample(5, [(1, [10, 10, 60, 60], 0.9), (0, [0, 0, 5, 5], 0.8)])
    item["scale_factor"] = (2.0, 0.5)
    item["gt_instances"] = dict(bboxes=torch.tensor([[20.0, 5, 120, 30]]), labels=torch.tensor([1]))
    item["ignored_instances"] = dict(bboxes=torch.tensor([[0.0, 0, 200, 50]]), labels=torch.tensor([0]))
    metric.process({}, [item])
    assert metric.evaluate(1)["coco/bbox_mAP"] == 1.0
    assert [row["num_boxes"] for row in metric.classwise_results] == [0, 1]
    with pytest.raises(ValueError, match="without an ann_file the data samples must hold gt_instances"):
        metric.process({}, [sample(6, [])])


_ONE = dict(image_id=1, category_id=1, area=900, iscrowd=0, bbox=[10, 10, 30, 30])


@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(iscrowd=1), 1.0),
        (dict(ignore=1), 1.0),
        (dict(ignore=True, iscrowd=None, area=None), 1.0),
        # The detection [60, 10, 100, 40] covers all that the image shows of a box that overhangs.
        (dict(bbox=[60, 10, 60, 30], area=1800), 0.4 + 0.6 * 51 / 101),  # IoU 2/3: 4 of 10 thresholds
        (dict(bbox=[60.0, 10, 40.5, 30], area=None), 1.0),
        (dict(bbox=[60, 10, 40, 30], area=1023.99), 1.0),  # small, although its box is not
        (dict(bbox=[200, 10, 40, 30]), 51 / 101),
        (dict(bbox=[60, 10, 0, 0], area=0), 51 / 101),
        (dict(bbox=[60, 10, -5, 30], area=None), 1.0),  # COCO ignores areas below 0
        (dict(category_id=2), 1.0),
        (dict(category_id=2.0, id=7.0), 1.0),
        (dict(image_id=99), 1.0),
        (dict(segmentation=[[60, 10, 90, 10, 60, 40]], bbox=[60, 10, 40, 30], area=450), 1.0),
    ],
    ids=str,
)
def test_file_and_samples_give_one_value(tmp_path, backend, change, expected, resized):
    """Both ways agree in all values, those of COCO's own code but for boxes with ignore."""
    annotations = [dict(_ONE, id=1), dict(_ONE, **{"id": 2, "bbox": [60, 10, 30, 30]} | change)]
    image = dict(id=1, file_name="0.jpg", width=100, height=80)
    content = dict(images=[image], categories=[dict(id=1, name="cat"), dict(id=2, name="cow")])
    ann_file = tmp_path / "a.json"
    write_json(ann_file, content | {"annotations": annotations})
    Image.new("RGB", (100, 80)).save(tmp_path / "0.jpg")
    steps = ["LoadImageFromFile", *["Resize"] * resized, "LoadAnnotations", "PackDetInputs"]
    pipeline = [{"type": step, **({"scale": (50, 40)} if step == "Resize" else {})} for step in steps]
    data = dict(
        ann_file="a.json", data_root=str(tmp_path), metainfo=dict(classes=("cat",)), pipeline=pipeline
    )
    packed = CocoDataset(**data, test_mode=True)[0]["data_samples"]
    hits = [annotations[0]["bbox"], annotations[1]["bbox"]]
    boxes = [[x, y, min(x + max(w, 1), 100), y + max(h, 1)] for x, y, w, h in hits]
    packed.pred_instances = InstanceData(
        bboxes=torch.tensor(boxes).clamp(max=100).float(),
        scores=torch.tensor([0.8, 0.7]),
        labels=torch.zeros(2),
    )
    values = []
    for given in (str(ann_file), None):
        metric = METRICS.build(
            dict(
                type="CocoMetric",
                ann_file=given,
                backend=backend,
                metric_items=["mAP", "mAP_s", "mAP_m", "AR@100"],
            )
        )
        metric.dataset_meta = dict(classes=("cat",))
        metric.process({}, [packed.to_dict()])
        values.append(metric.evaluate(1))
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert values[0]["coco/bbox_mAP"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "ids", [("image 0", "image 1"), (7, "b7"), (1, "1"), (2**70, -5), (2.0, 2**63)], ids=repr
)
def test_ids_of_images(tmp_path, backend, ids):
    """Ids are numbers of any size and texts, also in one file. The results are written with the same ids."""
    ann_file = Path(
        truth(tmp_path / "a.json", [(0, 1, [10, 20, 30, 5], 0), (1, 1, [10, 20, 30, 5], 0)], num_images=2)
    )
    content = read_json(ann_file)
    for image in content["images"]:
        image["id"] = ids[image["id"]]
    for annotation in content["annotations"]:
        annotation["image_id"] = ids[annotation["image_id"]]
    write_json(ann_file, content)
    box = (1, [10, 20, 40, 25], 0.75)
    prefix = f"{tmp_path}/run"
    metrics, _ = evaluate(str(ann_file), {ids[0]: [box], ids[1]: []}, backend=backend, outfile_prefix=prefix)
    assert metrics["coco/bbox_mAP"] == pytest.approx(51 / 101, abs=1e-6)
    assert [row["image_id"] for row in read_json(f"{prefix}.bbox.json")] == [ids[0]]


def test_an_id_of_another_type(tmp_path):
    ann_file = truth(tmp_path / "a.json", [])
    with pytest.raises(
        ValueError, match=r"ids '0'\. .*; an image is '0' \(a text\), but the id is 0 \(a number\)"
    ):
        evaluate(ann_file, {"0": []})


@pytest.mark.parametrize(
    ("field", "value"),
    [("bboxes", float("nan")), ("scores", float("inf")), ("scores", torch.tensor(7e4).half())],
)
def test_detections_that_are_not_finite(field, value):
    """float16 ends at 65504."""
    item = sample(0, [(0, [0, 0, 9, 9], 0.5)] * 300)
    item["pred_instances"][field][123] = value
    with pytest.raises(ValueError, match=rf"image 0: predicted {field} must be finite, .* first at \[123"):
        METRICS.build(dict(type="CocoMetric")).process({}, [item])


def test_no_samples_at_all(tmp_path, backend):
    for ann_file in (truth(tmp_path / "a.json", [(0, 0, [0, 0, 9, 9], 0)]), None):
        assert set(evaluate(ann_file, {}, backend=backend)[0].values()) == {-1.0}


def concatenated(*items, **arguments):
    """Evaluate images of several data sets, which are (id, path, label of the true box)."""
    metric = METRICS.build(dict(type="CocoMetric", **arguments))
    metric.dataset_meta = dict(classes=CLASSES, category_ids=[7, None, 9])
    for image_id, path, label in items:
        item = sample(image_id, [(1, [10, 10, 60, 60], 0.9)]) | ({"img_path": path} if path else {})
        item["gt_instances"] = dict(bboxes=torch.tensor([[10.0, 10, 60, 60]]), labels=torch.tensor([label]))
        metric.process({}, [item])
    return metric.evaluate(len(items))["coco/bbox_mAP_50"]


def test_images_of_several_data_sets_that_share_ids(tmp_path):
    ann_file = truth(tmp_path / "a.json", [(0, 1, [10, 10, 50, 50], 0)])
    repeated = [(0, "a/0.jpg", 1), (0, "a/0.jpg", 1)]
    assert concatenated(*repeated, ann_file=ann_file) == pytest.approx(1)
    message = "images a/0.jpg and b/0.jpg have the same id 0"
    for arguments in (dict(ann_file=ann_file), dict(outfile_prefix=f"{tmp_path}/run")):
        with pytest.raises(ValueError, match=message):
            concatenated((0, "a/0.jpg", 1), (0, "b/0.jpg", 1), **arguments)
    concatenated(repeated[0], outfile_prefix=f"{tmp_path}/run")
    assert read_json(f"{tmp_path}/run.bbox.json") == [], "the data have no number for the class"
    # Without a file, each data set may count its images from 0 on. A sampler repeats the last image.
    several = [
        (i, f"{folder}/{i}.jpg", label) for folder, label in (("wrong", 0), ("right", 1)) for i in (0, 1, 1)
    ]
    assert concatenated(*several) == pytest.approx(0.25, abs=0.01)
    # One image with the true boxes of two files, and images without paths, cannot be told apart.
    for path in ("a/0.jpg", None):
        with pytest.raises(ValueError, match="have the same id 0 and differ in their paths or true boxes"):
            concatenated((0, path, 1), (0, path, 0))


def test_writing_detections(tmp_path):
    ann_file = truth(tmp_path / "a.json", [])
    detections = {0: [(1, [10, 20, 40, 25], 0.75)]}
    metrics, _ = evaluate(ann_file, detections, format_only=True, outfile_prefix=f"{tmp_path}/out/run")
    assert metrics == {}
    assert read_json(tmp_path / "out" / "run.bbox.json") == [
        dict(image_id=0, category_id=8, bbox=[10.0, 20.0, 30.0, 5.0], score=0.75)
    ]


def test_images_that_do_not_fit_the_file(tmp_path, logged):
    messages = logged(coco_metric)
    ann_file = truth(tmp_path / "a.json", [(0, 0, [0, 0, 9, 9], 0), (1, 0, [0, 0, 9, 9], 0)], num_images=3)
    metrics, _ = evaluate(ann_file, {0: [(0, [0, 0, 9, 9], 0.9)]})
    assert metrics["coco/bbox_mAP"] == 1.0  # of the one image that was evaluated
    assert len(messages) == 1 and "2 of the 3 images" in messages[0] and "a.json" in messages[0]
    concatenated((0, "0.png", 0), (1, "a/7.jpg", 0), (2, None, 0), ann_file=ann_file)
    assert len(messages) == 2 and "image 1 of " in messages[1] and "is 1.jpg, but that of the" in messages[1]
    with pytest.raises(ValueError, match=r"a\.json does not have 2 of the 3 evaluated images: ids 8, 9"):
        evaluate(ann_file, {0: [], 9: [], 8: []})


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(metric="segm"), ValueError, "metric must be 'bbox' .*got 'segm'"),
        (dict(format_only=True), ValueError, "needs an outfile_prefix"),
        (dict(metric_items=["mAP", "AP90"]), ValueError, r"metric_items must be of .* got \['AP90'\]"),
        (dict(metric_items=["AR@7"]), ValueError, r"got \['AR@7'\]"),
        (dict(backend="detectron"), ValueError, "backend must be .* got 'detectron'"),
        (dict(ann_file="nowhere.json"), FileNotFoundError, "annotation file nowhere.json does not exist"),
        *((dict(iou_thrs=given), ValueError, "iou_thrs must be") for given in ([2], [-1], [0.5, 0])),
        *((dict(proposal_nums=given), ValueError, "proposal_nums must be") for given in ((0,), (-1, 5))),
    ],
)
def test_rejections(arguments, error, message):
    with pytest.raises(error, match=message):
        METRICS.build(dict(type="CocoMetric", **arguments))


def test_a_file_that_does_not_fit_shows_before_the_first_batch(tmp_path):
    metric = METRICS.build(dict(type="CocoMetric", ann_file=truth(tmp_path / "a.json", [])))
    with pytest.raises(ValueError, match=r"a\.json: none of its 2 categories"):
        metric.dataset_meta = dict(classes=("lion",))
    (tmp_path / "b.json").write_text('{"images": []}')
    with pytest.raises(ValueError, match="needs a list under the key 'annotations'"):
        METRICS.build(dict(type="CocoMetric", ann_file=f"{tmp_path}/b.json"))


def test_two_processes_give_the_numbers_of_one(tmp_path):
    boxes = [(image, image % 2, [10, 10, 40, 50], 0) for image in range(5)]
    detections = {image: [(image % 2, [10, 10, 50, 60 + 6 * image], 0.9 - 0.1 * image)] for image in range(5)}
    ann_file = truth(tmp_path / "a.json", boxes, num_images=5)
    expected, _ = evaluate(ann_file, detections)

    def share(images):
        metrics, metric = evaluate(ann_file, {image: detections[image] for image in images}, size=5)
        return metrics, len(metric.classwise_results)

    # A sampler repeats an image, so that both processes have as many. Planned batches have it anywhere.
    found = in_two_processes(share, ([0, 2, 4], [0, 1, 3]), tmp_path / "store", "fork")
    assert 0 < expected["coco/bbox_mAP"] < 1
    assert found == [(expected, 2), (expected, 0)]

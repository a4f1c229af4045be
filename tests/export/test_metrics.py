"""What was exported, beside the model on data."""

import pytest
import torch
from coco_files import annotation, write_coco

from visdet import init_detector
from visdet.engine import CheckpointError
from visdet.export import ExportError
from visdet.export.formats import pt2
from visdet.export.from_config import export_config

SIZES = ((320, 240), (200, 320), (320, 160))  # (width, height)
# Neither the sizes of the images nor their number fill batches of these.
FIXED = {"shape": (320, 320), "batch": 2}


@pytest.fixture(scope="module")
def data(trained, tmp_path_factory):
    """Return the root of three images whose objects are what the model finds on them."""
    root, detector, objects = tmp_path_factory.mktemp("data"), init_detector(*trained), []
    names = trained[0].test_dataloader.dataset.metainfo.classes
    write_coco(root, [], SIZES, names)
    for image in (1, 2, 3):
        found = detector(str(root / "images" / f"{image}.png"), score_threshold=0.0)[:2]
        for (x1, y1, x2, y2), label in zip(found.boxes.tolist(), found.labels.tolist(), strict=True):
            box = [x1, y1, x2 - x1, y2 - y1]
            objects.append(annotation(len(objects) + 1, image, box, 10 * (label + 1)))
    write_coco(root, objects, SIZES, names)
    return root


def test_metrics_and_outputs_are_compared(trained, data, tmp_path):
    metrics = export_config(*trained, tmp_path, data=str(data))["data"]["metrics"]
    assert metrics["model"]["coco/bbox_mAP"] > 0.9 and metrics["exported"]["coco/bbox_mAP"] > 0.999
    report = export_config(*trained, tmp_path, data=str(data / "images"), **FIXED)
    assert report["data"]["differences"]["inputs"] == 3


def test_a_loss_of_accuracy_is_an_error(trained, data, tmp_path, monkeypatch):
    """The labels on narrow images are wrong, which random inputs do not show."""
    load = pt2.load

    def wrong(folder):
        run = load(folder)
        return lambda given: {
            name: (value + (given["image_sizes"][:, 1:] < 320)) % 6 if name == "labels" else value
            for name, value in run(given).items()
        }

    monkeypatch.setattr(pt2, "load", wrong)
    with pytest.raises(ExportError, match="bbox_mAP of the exported model is"):
        export_config(*trained, tmp_path, data=str(data), **FIXED)


def test_a_checkpoint_of_other_classes_is_refused(trained, tmp_path):
    content = torch.load(trained[1])
    content["meta"]["dataset_meta"]["classes"].pop()
    torch.save(content, tmp_path / "five.pth")
    with pytest.raises(CheckpointError, match="does not know cross"):
        export_config(trained[0], tmp_path / "five.pth", tmp_path)

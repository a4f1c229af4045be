"""Two trainings of another package's detector under its bridge have equal weights."""

import warnings

import pytest
import tiny_transformers
import torch
from peers import peer
from torch.testing import assert_close

from visdet import compat
from visdet.execution.tensor_tree import map_tensors

CLASSES, SIZE = 5, 96


def of_transformers(family):
    model, inputs, labels = tiny_transformers.build(family)
    return model, inputs | labels, lambda batch: model(**batch).loss


def ultralytics_rt_detr():
    from ultralytics.nn.tasks import RTDETRDetectionModel
    from ultralytics.utils import ROOT, YAML

    config = YAML.load(ROOT / "cfg/models/rt-detr/rtdetr-resnet50.yaml")
    for row in config["backbone"]:
        row[3][4] = 1  # block of each stage
    config["head"][-1][3] = [CLASSES, 32, 12, 2, 2, 2]  # width, queries, points, heads, layers
    model = RTDETRDetectionModel(config, nc=CLASSES, verbose=False)
    model.nc = CLASSES  # as its trainer does
    images, boxes, labels = images_and_truth()
    batch = {
        "img": images,
        "bboxes": boxes,
        "cls": labels[:, None],
        "batch_idx": torch.arange(len(boxes)) % 2,
    }
    return model, batch, lambda batch: model.loss(batch)[0]


def rf_detr():
    from rfdetr.config import RFDETRSmallConfig, TrainConfig
    from rfdetr.models import build_criterion_from_config, build_model_from_config

    sizes = dict(
        resolution=SIZE, dec_layers=2, num_queries=12, num_select=12, group_detr=2, num_classes=CLASSES
    )
    configs = RFDETRSmallConfig(device="cpu", **sizes), TrainConfig(dataset_dir=".", output_dir=".")
    model = build_model_from_config(*configs)
    criterion = build_criterion_from_config(*configs)[0].train()
    images, boxes, labels = images_and_truth()
    batch = {"images": images, "targets": [{"boxes": boxes, "labels": labels}] * len(images)}

    def loss_of(batch):
        targets = batch["targets"]
        losses = criterion(model(batch["images"], targets), targets)
        return sum(weight * losses[key] for key, weight in criterion.weight_dict.items() if key in losses)

    return model, batch, loss_of


def images_and_truth():
    boxes = torch.rand(6, 4) * 0.3 + 0.2
    return torch.randn(2, 3, SIZE, SIZE), boxes, torch.arange(6) % CLASSES


FAMILIES = ["deformable_detr", "rt_detr", "rt_detr_v2", "grounding_dino"]
DETECTORS = [pytest.param("transformers", of_transformers, (family,), id=family) for family in FAMILIES] + [
    pytest.param("ultralytics", ultralytics_rt_detr, (), id="ultralytics"),
    pytest.param("rfdetr", rf_detr, (), id="rfdetr"),
]


def train(build, arguments, device):
    torch.manual_seed(0)
    model, batch, loss_of = build(*arguments)
    model.to(device).train()
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(50 if device == "cuda" else 5):
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().reshape(()))
    return torch.stack(losses), model.state_dict()


@pytest.mark.parametrize(("name", "build", "arguments"), DETECTORS)
def test_two_trainings_have_equal_weights(name, build, arguments, device, deterministic_for_a_test):
    peer(name, name, "check-packages")
    if name == "rfdetr" and device == "cuda":
        peer("torch_linear_assignment", "torch-linear-assignment", "check-packages")
    bridge = compat.find(name)
    with bridge.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="(?s).*determinis")
        torch.use_deterministic_algorithms(True)
        (losses, weights), (again, weights_again) = (train(build, arguments, device) for _ in range(2))
        assert bridge.reached
    assert (
        torch.isfinite(losses).all() and torch.equal(losses, again) and not torch.equal(losses[0], losses[-1])
    )
    assert_close(weights_again, weights, rtol=0, atol=0)

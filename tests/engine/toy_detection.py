"""A detector, a data set and a metric small enough to train in a second; for the tests of engine and tools.

Configs import it by ``custom_imports = dict(imports=["toy_detection"])`` with this folder on the path.
"""

import atexit
import contextlib
import json
import time
from pathlib import Path

import numpy as np
import torch
from mmengine.dataset import BaseDataset
from mmengine.dist import all_gather_object, get_rank
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.structures import InstanceData
from PIL import Image
from torch import nn

from visdet.registry import DATASETS, HOOKS, METRICS, MODELS
from visdet.structures import DetDataSample

CLASSES = ("dark", "bright")


class Stack(BaseDataPreprocessor):
    """Stacks images and scales them to 0..1."""

    def forward(self, data: dict, training: bool = False) -> dict:
        data = self.cast_data(data)
        return {"inputs": torch.stack(data["inputs"]).float() / 255, "data_samples": data["data_samples"]}


class ToyHead(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.box = nn.Linear(channels, 4)
        self.cls = nn.Linear(channels, num_classes)


@MODELS.register_module()
class ToyDetector(BaseModel):
    """One box and class per image, from the mean of a convolution; dropout draws from the generator.

    Args:
        explode_at: the training step, counted from 1, whose loss is NaN.
        explodes_gradients: whether the gradients of that loss are NaN, too.
    """

    def __init__(
        self,
        channels: int = 8,
        num_classes: int = 2,
        explode_at: int = -1,
        explodes_gradients: bool = True,
    ) -> None:
        super().__init__(data_preprocessor=Stack())
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(0.1)
        self.bbox_head = ToyHead(channels, num_classes)
        self.explode_at = explode_at
        self.explodes_gradients = explodes_gradients
        self.calls = 0

    def forward(self, inputs, data_samples=None, mode="tensor"):
        features = self.dropout(self.norm(self.conv(inputs)).relu()).mean(dim=(2, 3))
        boxes, logits = self.bbox_head.box(features).sigmoid(), self.bbox_head.cls(features)
        if mode == "tensor":
            return logits, boxes
        size = inputs.shape[-1]
        if mode == "loss":
            self.calls += 1
            target = torch.stack([sample.gt_instances.bboxes[0] for sample in data_samples]) / size
            labels = torch.stack([sample.gt_instances.labels[0] for sample in data_samples])
            loss_cls = nn.functional.cross_entropy(logits.float(), labels)
            if self.calls == self.explode_at:
                loss_cls = loss_cls * torch.nan if self.explodes_gradients else loss_cls + torch.nan
            return {
                "loss_cls": loss_cls,
                "loss_bbox": nn.functional.l1_loss(boxes.float(), target),
                "d0.loss_cls": 0.1 * loss_cls,
            }
        scores, labels = logits.float().softmax(-1).max(-1)
        for i, sample in enumerate(data_samples):
            sample.pred_instances = InstanceData(
                bboxes=boxes[i : i + 1].float() * size, scores=scores[i : i + 1], labels=labels[i : i + 1]
            )
        return data_samples


@DATASETS.register_module()
class ToyBoxes(BaseDataset):
    """Grey images with one rectangle; a brightness jitter in training draws from torch's and numpy's generators."""

    METAINFO = {"classes": CLASSES, "palette": [(0, 0, 255), (255, 160, 0)]}

    def __init__(self, count: int = 24, jitter: bool = True, image_dir: str | None = None, **base) -> None:
        self.count, self.jitter, self.image_dir = count, jitter, image_dir
        super().__init__(ann_file="", **base)

    def load_data_list(self) -> list[dict]:
        return [{"index": i, "height": 32, "width": 32} for i in range(self.count)]

    def prepare_data(self, idx: int) -> dict:
        rng = np.random.default_rng([7, idx])
        label = int(rng.integers(2))
        x, y = rng.uniform(2, 12, 2)
        box = torch.tensor([[x, y, x + 16, y + 14]], dtype=torch.float32)
        image = torch.full((3, 32, 32), 128, dtype=torch.uint8)
        x1, y1, x2, y2 = box[0].int().tolist()
        image[:, y1:y2, x1:x2] = 230 if label else 30
        path = ""
        if self.image_dir:
            path = str(Path(self.image_dir) / f"{idx:03}.png")
            if not Path(path).exists():
                Path(self.image_dir).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        if self.jitter:
            gain = 0.8 + 0.2 * torch.rand(1).item() + 0.1 * np.random.rand()  # noqa: NPY002
            image = (image * gain).clamp(0, 255).to(torch.uint8)
        sample = DetDataSample(
            metainfo={"img_id": idx, "img_path": path, "ori_shape": (32, 32), "img_shape": (32, 32)}
        )
        sample.gt_instances = InstanceData(bboxes=box, labels=torch.tensor([label]))
        return {"inputs": image, "data_samples": sample}


@METRICS.register_module()
class ToyAccuracy(BaseMetric):
    """The share of images whose class is right, and how many images were seen."""

    default_prefix = "toy"

    def process(self, data_batch, data_samples) -> None:
        for sample in data_samples:
            right = sample["pred_instances"]["labels"] == sample["gt_instances"]["labels"]
            self.results.append((sample["img_id"], bool(right[0])))

    def compute_metrics(self, results: list) -> dict:
        return {
            "accuracy": float(np.mean([right for _, right in results])),
            "images": len({i for i, _ in results}),
        }


def write_threads(path: Path) -> None:
    """Write the names of this process's threads, which Linux tells.

    Linux may list a thread for a moment after it has been joined, so those of gloo get some seconds to go.
    """
    for _ in range(100):
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # It ended meanwhile.
                names.append((task / "comm").read_text().strip())
        if not any("gloo" in name for name in names):
            break
        time.sleep(0.05)
    path.write_text("\n".join(names))


@HOOKS.register_module()
class RecordProcesses(Hook):
    """Writes the images that every process trained on, a sum of its weights, and the threads it ends with."""

    def __init__(self) -> None:
        self.images: list[int] = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.images += [sample.img_id for sample in data_batch["data_samples"]]

    def after_train(self, runner) -> None:
        atexit.register(write_threads, Path(runner.work_dir, f"threads{get_rank()}.txt"))
        weights = sum(float(p.detach().double().abs().sum()) for p in runner.model.parameters())
        record = {"images": self.images, "weights": weights, "wrapped": type(runner.model).__name__}
        records = all_gather_object(record)
        if get_rank() == 0:
            Path(runner.work_dir, "processes.json").write_text(json.dumps(records))

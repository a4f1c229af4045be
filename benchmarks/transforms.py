"""Measure the images per second that one core loads and augments, by transform.

The command is ``python -m benchmarks.transforms``. The pipeline is that of a config. The images are drawn, and have
the size and the bytes of photographs of COCO. Each transform gets the result of the one before it, which is copied
outside the timed call. This needs the extra ``train``.
"""

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose

from visdet.registry import TRANSFORMS

from .environment import describe
from .report import options_of, parser_of, table, write_table

SIZE = (480, 640)  # height and width of most images of COCO
BOXES = 7  # number of boxes in an image, as in COCO
CONFIG = "configs/deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"
Sample = dict[str, Any]


def draw_photographs(folder: Path, sizes: Sequence[tuple[int, int]]) -> list[Sample]:
    """Write JPEGs of each (height, width), of 0.4 bytes a pixel, and return their records with random boxes."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    for index, (height, width) in enumerate(sizes):
        coarse = random.integers(0, 256, (height // 32, width // 32, 3)).astype(np.float32)
        picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        picture += random.normal(0, 12, (height, width, 1)).astype(np.float32)
        path = str(folder / f"{index:06}.jpg")
        cv2.imwrite(path, picture.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])
        corners = np.sort(random.uniform(0, (width, height), (BOXES, 2, 2)), axis=1).reshape(BOXES, 4)
        instances = [dict(bbox=box, bbox_label=0, ignore_flag=0) for box in corners.tolist()]
        samples.append(dict(img_path=path, img_id=index, height=height, width=width, instances=instances))
    return samples


def measure(transform: Callable[[Sample], Any], samples: Sequence[Sample]) -> tuple[float, list[Sample]]:
    """Return the number of samples per second that a transform processes, and its results.

    Samples for which the transform returns ``None`` are left out of the results.
    """
    seconds, results = 0.0, []
    for sample in samples:
        given = copy.deepcopy(sample)
        start = time.perf_counter()
        result = transform(given)
        seconds += time.perf_counter() - start
        results.append(result)
    return len(samples) / seconds, [result for result in results if result is not None]


def _steps(pipeline: Sequence[Sample]) -> list[Sample]:
    """Return the transforms of a pipeline. A random choice is replaced by its longest branch without repetitions."""
    steps: list[Sample] = []
    for settings in pipeline:
        if settings["type"] == "RandomChoice":
            steps += [step for step in max(settings["transforms"], key=len) if step not in steps]
        else:
            steps.append(settings)
    return steps


def race(pipeline: Sequence[Sample], samples: list[Sample]) -> list[dict[str, Any]]:
    """Return the images per second of each transform and of the whole pipeline.

    Returns:
        dicts with "transform" and "pace".
    """
    rows = []
    current = samples
    for settings in _steps(pipeline):
        pace, current = measure(TRANSFORMS.build(dict(settings)), current)
        rows.append({"transform": settings["type"], "pace": pace})
    every = Compose([TRANSFORMS.build(dict(settings)) for settings in pipeline])
    return [*rows, {"transform": "the whole pipeline", "pace": measure(every, samples)[0]}]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of("transforms", __doc__, has_device=False)
    parser.add_argument(
        "config", nargs="?", default=CONFIG, help="config with the training pipeline (default: %(default)s)"
    )
    parser.add_argument("--images", type=int, default=200, help="number of images (default: %(default)s)")
    options = options_of(parser, arguments)
    pipeline = Config.fromfile(options.config).train_pipeline
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        rows = race(pipeline, draw_photographs(Path(folder), [SIZE] * options.images))
    report = {
        "environment": describe(torch.device("cpu")),
        "command": options.command,
        "results": rows,
    }
    cells = [[row["transform"], f"{row['pace']:.0f}"] for row in rows]
    lines = table(["transform", "images a second and core"], cells)
    write_table(report, lines, options.out / "transforms.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

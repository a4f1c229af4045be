"""Drawing of the synthetic shapes data set, which is stored in COCO format."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image

from visdet.checks.arguments import Positive, Range, Seed, checked

from .drawn_folder import draw_in_processes, draw_once, is_orphan
from .shapes_images import SHAPE_CLASSES, draw_shapes

_GENERATOR_VERSION = 1
_STAMP = "shapes.json"
_SPLITS = ("train", "val")


@checked
def make_shapes(
    folder: str | Path,
    num_train: Positive = 4000,
    num_val: Positive = 400,
    image_size: Annotated[int, Range(32)] = 128,
    seed: Seed = 0,
    num_workers: int | None = None,
) -> Path:
    """Write the shapes data set into ``folder``, unless it is there already, and return the folder.

    It holds ``train/*.jpg``, ``val/*.jpg``, ``annotations/instances_{train,val}.json`` and the stamp ``shapes.json``
    with the generator's version and the arguments. Image i of a split is drawn from
    ``numpy.random.default_rng([seed, split, i])``, so that the files do not depend on ``num_workers``.

    The folder appears only when it is complete, because everything is written beside it and renamed. Processes that
    start at the same time wait for the first one. A folder with another stamp is replaced. A folder without a stamp is
    replaced only if it is empty.

    Args:
        folder: the folder to write.
        num_train: number of images in the train split.
        num_val: number of images in the val split.
        image_size: height and width of an image in pixels.
        seed: seed of the random numbers.
        num_workers: number of processes that draw. The default is one per core.

    Raises:
        FileExistsError: the folder is not empty and was not written by this function.
        ValueError: a number is not positive.
        RuntimeError: a drawing process failed.
    """
    stamp = {
        "generator_version": _GENERATOR_VERSION,
        "num_train": num_train,
        "num_val": num_val,
        "image_size": image_size,
        "seed": seed,
    }
    return draw_once(
        folder,
        _STAMP,
        stamp,
        maker="make_shapes",
        what=f"{num_train + num_val} shapes images",
        draw=lambda partial: _write(partial, stamp, num_workers),
    )


def _write(partial: Path, stamp: dict, num_workers: int | None) -> None:
    counts = {"train": stamp["num_train"], "val": stamp["num_val"]}
    for split in counts:
        (partial / split).mkdir()
    # Each worker draws every num_workers-th image.
    draw_in_processes(_draw_share, (partial, counts, stamp), num_workers, "make_shapes")
    (partial / "annotations").mkdir()
    for split, count in counts.items():
        annotations = partial / "annotations" / f"instances_{split}.json"
        annotations.write_text(json.dumps(_merge(partial, split, count, stamp["image_size"])))
    for part in partial.glob("*.part.json"):
        part.unlink()


def _draw_share(partial: Path, counts: dict, stamp: dict, worker: int, num_workers: int, parent: int) -> None:
    for split_number, split in enumerate(_SPLITS):
        objects_of_image = {}
        for index in range(worker, counts[split], num_workers):
            if is_orphan(parent):
                return
            rng = np.random.default_rng([stamp["seed"], split_number, index])
            pixels, objects = draw_shapes(rng, stamp["image_size"])
            Image.fromarray(pixels).save(partial / split / _file_name(index), quality=92, subsampling=0)
            objects_of_image[index] = [(item.label, item.bbox, item.area) for item in objects]
        (partial / f"{split}-{worker}.part.json").write_text(json.dumps(objects_of_image))


def _merge(partial: Path, split: str, count: int, image_size: int) -> dict:
    """Return the COCO JSON of a split from the files of the workers."""
    objects_of_image = {}
    for part in partial.glob(f"{split}-*.part.json"):
        objects_of_image.update(json.loads(part.read_text()))
    images: list[dict] = []
    annotations: list[dict] = []
    for index in range(count):
        image_id = index + 1
        images.append(
            {"id": image_id, "file_name": _file_name(index), "height": image_size, "width": image_size}
        )
        for label, (x1, y1, x2, y2), area in objects_of_image[str(index)]:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": 0,
                }
            )
    return {
        "info": {"description": f"visdet shapes, {split}", "version": str(_GENERATOR_VERSION)},
        "categories": [{"id": label + 1, "name": name} for label, name in enumerate(SHAPE_CLASSES)],
        "images": images,
        "annotations": annotations,
    }


def _file_name(index: int) -> str:
    return f"{index:06d}.jpg"

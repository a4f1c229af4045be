"""Small COCO data sets, written for a test."""

import numpy as np
from json_files import write_json
from PIL import ExifTags, Image

from visdet.datasets import coco

NAMES = ("cat", "dog", "bird")


def annotation(id, image_id, bbox, category_id=10, **others):
    w, h = bbox[2:] if len(bbox) == 4 else (1, 1)
    return dict(id=id, image_id=image_id, category_id=category_id, bbox=bbox, area=w * h, iscrowd=0) | others


def turned(orientation=6):
    """Return the EXIF data of a picture that viewers turn, by default to the right."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def write_content(folder, content):
    """Write ``ann.json``."""
    write_json(folder / "ann.json", content)


def write_coco(folder, annotations, sizes=((40, 30), (24, 36)), names=NAMES, write_images=True):
    """Write ``ann.json`` and ``images/<id>.png``; image ids count from 1, category ids are 10, 20, ...

    ``sizes`` are (width, height).
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images = []
    for i, (width, height) in enumerate(sizes, start=1):
        images.append(dict(id=i, file_name=f"{i}.png", width=width, height=height))
        if write_images:
            pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
    categories = [dict(id=10 * (i + 1), name=name) for i, name in enumerate(names)]
    content = dict(images=images, annotations=annotations, categories=categories)
    write_content(folder, content)
    return content


def build(folder, **changes):
    """Return a CocoDataset over what ``write_coco`` wrote."""
    arguments = dict(
        ann_file="ann.json",
        data_root=str(folder),
        data_prefix=dict(img="images/"),
        metainfo=dict(classes=NAMES),
    )
    return coco.CocoDataset(**(arguments | changes))

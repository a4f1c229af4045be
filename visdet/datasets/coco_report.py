"""What is remarkable in a COCO file, in a few lines."""

import os
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import combinations

from visdet.checks.similar_names import look_alike
from visdet.errors import listed
from visdet.structures.coco_json import class_of_id, corners_of, uncrossed

from .coco import clip_box

_STEPS_PER_PX = 10  # Boxes are the same if their edges are equal on a grid of tenths of a pixel.


def coco_report(content: dict, folder: str, classes: Collection[str] | None = None) -> list[str]:
    """Return what a COCO file holds and what may be a mistake in it, in lines.

    Args:
        content: the file, as ``load_coco_json`` returns it.
        folder: the folder that its images are relative to.
        classes: the classes to train on. By default, they are all categories of the file.
    """
    names = class_of_id(content)
    named = names.values()
    annotations = content["annotations"]
    images = {image["id"]: image for image in content["images"]}
    boxes = Counter(names.get(row["category_id"], "no category") for row in annotations)
    counts = listed([f"{name} {count}" for name, count in boxes.most_common()], 20)
    lines = [f"{len(images)} images, {len(annotations)} boxes" + (f": {counts}" if counts else "")]

    def say(what: str, found: Collection, limit: int = 3) -> None:
        if found:
            lines.append(f"{what}: {len(found)} ({listed(found, limit)})")

    with_boxes = {row["image_id"] for row in annotations}
    empty = [image["file_name"] for key, image in images.items() if key not in with_boxes]
    files = Counter(image["file_name"] for image in images.values())
    say("images without a box", empty)
    say("missing images", sorted(file for file in files if not os.path.isfile(os.path.join(folder, file))))
    say("file names that several images have", sorted(file for file, times in files.items() if times > 1))
    for problem, found in _box_problems(annotations, images).items():
        say(f"boxes {problem}", found)
    wanted = list(classes or named)
    say("classes without a box", [name for name in wanted if not boxes[name]], 20)
    say("categories that are not trained on", [name for name in named if name not in wanted], 20)
    pairs = combinations(dict.fromkeys([*wanted, *named]), 2)
    say("names that look alike", [hint for one, other in pairs if (hint := look_alike(one, [other]))])
    zero = [key for key in names if key == 0]
    say("category ids that are 0, which other programs may take for the background", zero)
    return lines


def _box_problems(annotations: list[dict], images: dict) -> dict[str, list[str]]:
    """Return the boxes that may be mistakes, by what is wrong with them."""
    problems: defaultdict[str, list[str]] = defaultdict(list)
    seen = set()
    for row in annotations:
        image = images.get(row["image_id"])
        if image is None:
            problems["of an image that is not in the file"].append(f"id {row['id']}")
            continue
        name = f"id {row['id']} in {image['file_name']}"
        corners = corners_of(row)
        if corners and uncrossed(corners) != corners:
            problems["whose outlines cross themselves and are read with their corners in order"].append(name)
        problem = clip_box(row, image["width"], image["height"])[1]
        if problem:
            problems["that go beyond their image" if problem == "clipped" else problem].append(name)
        edges = [round(edge * _STEPS_PER_PX) for edge in row["bbox"]]
        box = (row["image_id"], row["category_id"], *edges)
        if box in seen:
            problems["that stand twice, of which a detector finds one and misses the other"].append(name)
        seen.add(box)
    return problems

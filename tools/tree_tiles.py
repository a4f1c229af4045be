"""Cut the aerial photographs in the wheel of deepforest (MIT licence) into tiles with COCO annotations of their trees.

pip download --no-deps deepforest && unzip -q deepforest-*.whl 'deepforest/data/*'
python tools/tree_tiles.py deepforest/data data/trees
"""

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

SIDE = 400


def main(source: str, out: str) -> None:
    """Write ``images/``, ``train.json`` and ``val.json``. Every fourth tile is for validation."""
    parts: dict = {
        name: {"images": [], "annotations": [], "categories": [{"id": 1, "name": "tree"}]}
        for name in ("train", "val")
    }
    Path(out, "images").mkdir(parents=True, exist_ok=True)
    tile = box_id = 0
    for xml in sorted(Path(source).glob("*.xml")):
        image = Image.open(xml.with_suffix(".png")).convert("RGB")
        boxes = np.array([[int(edge.text) for edge in box] for box in ElementTree.parse(xml).iter("bndbox")])
        for y in sorted({*range(0, image.height - SIDE + 1, SIDE), image.height - SIDE}):
            for x in sorted({*range(0, image.width - SIDE + 1, SIDE), image.width - SIDE}):
                cut = np.clip(boxes - [x, y, x, y], 0, SIDE)
                sizes, whole = cut[:, 2:] - cut[:, :2], boxes[:, 2:] - boxes[:, :2]
                is_inside = sizes.prod(1) > 0.4 * whole.prod(1)
                if not is_inside.any():
                    continue
                tile += 1
                part, name = parts["val" if tile % 4 == 0 else "train"], f"{tile:03}.png"
                image.crop((x, y, x + SIDE, y + SIDE)).save(Path(out, "images", name))
                part["images"].append({"id": tile, "file_name": name, "width": SIDE, "height": SIDE})
                for corner, size in zip(cut[is_inside, :2].tolist(), sizes[is_inside].tolist(), strict=True):
                    box_id += 1
                    annotation = {"id": box_id, "image_id": tile, "category_id": 1, "bbox": [*corner, *size]}
                    part["annotations"].append({**annotation, "area": size[0] * size[1], "iscrowd": 0})
    for name, part in parts.items():
        Path(out, f"{name}.json").write_text(json.dumps(part))
        print(f"{name}: {len(part['images'])} tiles, {len(part['annotations'])} trees")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the folder deepforest/data of the wheel")
    parser.add_argument("out", help="folder to write")
    main(**vars(parser.parse_args()))

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
    tile = 0
    for xml in sorted(Path(source).glob("*.xml")):
        image = Image.open(xml.with_suffix(".png")).convert("RGB")
        boxes = np.array([[int(edge.text) for edge in box] for box in ElementTree.parse(xml).iter("bndbox")])
        # The last tile of a row or column ends at the edge of the photograph.
        for y in sorted({*range(0, image.height - SIDE, SIDE), image.height - SIDE}):
            for x in sorted({*range(0, image.width - SIDE, SIDE), image.width - SIDE}):
                cut = np.clip(boxes - [x, y, x, y], 0, SIDE)
                areas = (cut[:, 2:] - cut[:, :2]).prod(1)
                cut = cut[areas > 0.4 * (boxes[:, 2:] - boxes[:, :2]).prod(1)]
                if not len(cut):
                    continue
                tile += 1
                part, name = parts["val" if tile % 4 == 0 else "train"], f"{tile:03}.jpg"
                image.crop((x, y, x + SIDE, y + SIDE)).save(Path(out, "images", name), quality=95)
                part["images"].append({"id": tile, "file_name": name, "width": SIDE, "height": SIDE})
                for left, top, right, bottom in cut.tolist():
                    width, height = right - left, bottom - top
                    box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                    box |= {"id": len(part["annotations"]) + 1, "image_id": tile, "category_id": 1}
                    part["annotations"].append(box)
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

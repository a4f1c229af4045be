"""Write COCO files of a data set in another format, and report what may be wrong in it.

The folder holds YOLO's data.yaml or classes.txt, Pascal VOC's XML files, CSV tables (image, xmin, ymin, xmax, ymax,
label), COCO files, Label Studio's JSON or DOTA's text files, as labelling tools export them. Outlines of four points
stay, for turned boxes. Images stay where they are. The last line counts what is left out.

visdet convert FOLDER
visdet convert FOLDER --out-dir data/mine --format voc --val-share 0.1
"""

import argparse

from visdet.command_line import add_options, folder_name

_FORMATS = ("yolo", "voc", "csv", "coco", "dota", "label-studio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("folder", help="the folder of the data set")
    add("--out-dir", type=folder_name, help="folder of the COCO files (default: FOLDER)")
    add("--format", choices=_FORMATS, help="by default, it is found")
    add_options(
        parser,
        val_share=(0.2, "share of the training images for validation, if the data set has no such split"),
        left_out_share=(0.1, "the greatest share of the pictures, and of the boxes, that may be left out"),
    )


def run(
    folder: str, out_dir: str | None, format: str | None, val_share: float, left_out_share: float
) -> None:
    """Run the command."""
    from pathlib import Path

    from visdet.datasets.coco_report import coco_report
    from visdet.datasets.conversion import convert
    from visdet.structures.coco_json import class_of_id, load_coco_json

    root = Path(folder)
    out = Path(out_dir or folder)
    files, skipped = convert(root, out, format, val_share, left_out_share)
    for file in files:
        content = load_coco_json(file)
        print(f"{file}: " + "\n  ".join(coco_report(content, folder)))
    classes = tuple(class_of_id(content).values())
    images = "" if out.samefile(root) else f"{root.resolve()}/"
    print(
        f"for the config (docs/own_data.md):\ndata_root = {f'{out.resolve()}/'!r}\nclasses = {classes!r}\n"
        "model = dict(bbox_head=dict(num_classes=len(classes)))\n"
        f"images = dict(data_root=data_root, data_prefix=dict(img={images!r}), metainfo=dict(classes=classes))"
    )
    if (out / "train.json") not in files:
        print("the data set has no split to train on")
    if skipped:
        print("\n".join(skipped))

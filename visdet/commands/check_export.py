"""Compare an ONNX graph of any program with the model that it was made of, on pictures, and name the first wrong node.

visdet check-export model.onnx --model hf:FOLDER --images data/shapes/annotations/instances_val.json
"""

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("graph", metavar="GRAPH.onnx", help="the graph")
    add(
        "--model",
        nargs="+",
        required=True,
        help="hf:FOLDER of transformers; CONFIG CHECKPOINT of visdet; or MODULE:FUNCTION or FILE.py:FUNCTION, which "
        "returns a module of torch or a visdet.export.Reference",
    )
    add(
        "--images",
        required=True,
        help="a folder of pictures, or an annotation file of COCO, on which mAP is compared, too",
    )
    add(
        "--runtime",
        default="onnxruntime",
        help="onnxruntime, openvino or openvino-f32 (default: onnxruntime)",
    )
    add(
        "--limit",
        type=float,
        default=1e-4,
        help="the greatest difference of an output relative to its largest number (default: 1e-4)",
    )


def run(graph: str, model: list[str], images: str, runtime: str, limit: float) -> None:
    """Run the command."""
    from visdet.engine import say
    from visdet.export.check_graph import check_graph

    annotations = images if images.endswith(".json") else None
    pictures = _annotated(Path(images)) if annotations else _of_folder(images)
    report = check_graph(graph, model, pictures, annotations, runtime, limit)
    for name, found in report["differences"]["outputs"].items():
        say(f"{name}: largest difference {found['largest']:.2g}, mean {found['mean']:.2g}")
    for name, found in report.get("metrics", {}).items():
        say(f"mAP of the {name}: {found['coco/bbox_mAP']:.4f}")
    say(f"{graph} gives what the model gives")


def _of_folder(folder: str) -> dict[Any, Any]:
    from visdet.engine import find_images
    from visdet.engine.inference.image_files import is_video

    found, _ = find_images(folder)
    return {number: file for number, file in enumerate(found) if not is_video(file)}


def _annotated(file: Path) -> dict[Any, Any]:
    from visdet.datasets.conversion.source import Source
    from visdet.structures.coco_json import load_coco_json

    source = Source(file.parent.parent)
    split = source.table_split(file)
    rows = load_coco_json(file)["images"]
    return {row["id"]: source.picture(row["file_name"], file, split) for row in rows}

"""Write a trained model for another runtime, run what was written there, and compare it with the model.

visdet export work_dirs/deformable-detr_shapes/best.pth --format onnx \\
    --check data/shapes/annotations/instances_val.json --out exported
python exported/infer.py PICTURE ...
"""

import argparse
from typing import Any

from visdet.command_line import add_config_arguments, folder_name, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_config_arguments(parser, "checkpoint")
    add("--format", default="pt2", help="pt2, aoti, onnx or openvino (default: pt2)")
    add(
        "--out",
        type=folder_name,
        default="exported",
        metavar="FOLDER",
        help="folder to write (default: exported)",
    )
    add(
        "--precision",
        default="float32",
        help="float32, float16, bfloat16 or int8, of the backbone and the neck; what follows is float32, with "
        "bfloat16 but for linear layers (default: float32)",
    )
    add(
        "--custom-op",
        metavar="RUNTIME",
        help="openvino: nodes of visdet's CPU kernels in that format. tensorrt: NVIDIA's plugin in the format onnx",
    )
    _add_sizes(parser)
    _add_checks(parser)
    add(
        "--trust-checkpoint",
        action="store_true",
        help="read every type in the checkpoint, which can run code from the file",
    )
    add("--device", default="cpu", help="device of the model, such as 'cuda' (default: cpu)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add what the graph takes."""
    add = parser.add_argument
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--shape",
        type=positive_int,
        nargs=2,
        metavar=("H", "W"),
        help="size of the images, to which they are padded, or that a picture is resized to fit into",
    )
    sizes.add_argument(
        "--dynamic", action="store_true", help="accept images of any size (the default where the model can)"
    )
    add(
        "--batch",
        type=positive_int,
        metavar="N",
        help="accept N images at once, as tensors (default: one picture, or any number with --no-embed)",
    )
    add(
        "--embed",
        action=argparse.BooleanOptionalAction,
        help="let the graph take a picture as it is decoded, of any size: it resizes, normalises and pads (default: "
        "True for detectors of images without --batch, if the pipeline or --shape limits the size)",
    )


def _add_checks(parser: argparse.ArgumentParser) -> None:
    """Add how what was written is compared and measured."""
    checks = parser.add_mutually_exclusive_group()
    checks.add_argument(
        "--check",
        dest="data",
        metavar="DATA",
        help="compare metrics, too: on an annotation file of the kind of the config's test data, or on a folder that "
        "replaces its data_root; on a folder of images, outputs are compared",
    )
    checks.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not run what was written; the report says so",
    )
    parser.add_argument(
        "--bench", action="store_true", help="measure latencies of the exported model and of the model"
    )


def run(
    config: str,
    checkpoint: str,
    cfg_options: dict[str, Any] | None,
    out: str,
    trust_checkpoint: bool,
    dynamic: bool,
    **others: Any,
) -> None:
    """Run the command."""
    from visdet.engine import say
    from visdet.export.from_config import export_config

    options = dict(cfg_options or {})
    if trust_checkpoint:
        options["trust_checkpoint"] = True
    report = export_config(config, checkpoint, options=options, out=out, **others)
    say(f"{out}: {'checked' if report['checked'] else 'NOT CHECKED'}, see {out}/report.md")

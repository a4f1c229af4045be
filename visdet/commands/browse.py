"""Show the samples of a config's data set after all transforms, as the model gets them.

A sample is an image with its boxes, or a frame of several cameras.

visdet browse CONFIG --output-dir work_dirs/browse --not-show
"""

import argparse
import os
from pathlib import Path
from typing import Any

from visdet.command_line import add_config_arguments, add_options, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_config_arguments(parser)
    add(
        "--out-dir",
        "--output-dir",
        dest="output_dir",
        help="write the pictures to this folder, and sheet.png with the first twelve",
    )
    add("--not-show", action="store_true", help="do not open a window")
    add(
        "--split",
        choices=("train", "val", "test"),
        default="train",
        help="data set to show (default: %(default)s)",
    )
    add("--number", type=positive_int, default=24, help="number of samples to show (default: %(default)s)")
    add_options(
        parser,
        show_interval=(0.0, "seconds for which each picture is shown; 0 waits for a key"),
        seed=(0, "seed of the augmentations"),
    )


def run(
    config: str,
    cfg_options: dict[str, Any] | None = None,
    output_dir: str | None = None,
    not_show: bool = True,
    split: str = "train",
    number: int = 24,
    show_interval: float = 0.0,
    seed: int = 0,
) -> None:
    """Run the command."""
    import torch

    from visdet.engine import check_work_dir, load_config, say
    from visdet.engine.config.load import build_dataset
    from visdet.engine.data.loaders import check_there_are_samples
    from visdet.engine.inference.sample_images import image_of_inputs, is_bgr
    from visdet.models.data_preprocessor import check_packed
    from visdet.registry import VISUALIZERS

    cfg, _ = load_config(config, cfg_options)
    variable = os.environ.get
    has_screen = bool(variable("DISPLAY") or variable("WAYLAND_DISPLAY"))
    show = has_screen and not not_show
    folder = output_dir or (None if show else f"work_dirs/browse/{Path(config).stem}")
    if folder:
        check_work_dir(folder, "--output-dir")
    torch.manual_seed(seed)
    dataset = build_dataset(cfg, split)
    check_there_are_samples(dataset, f"{split}_dataloader")
    drawing = cfg.get("visualizer") or {"type": "visdet.DetLocalVisualizer"}
    visualizer = VISUALIZERS.build({**drawing, "vis_backends": None, "name": "browse_dataset"})
    visualizer.dataset_meta = dataset.metainfo
    drawn: list[tuple[Any, Any]] = []
    for index in range(min(number, len(dataset))):
        item = dataset[index]
        check_packed(item)
        image = image_of_inputs(item["inputs"], is_bgr(cfg))
        sample = item["data_samples"]
        name = f"{index:05d}_{Path(sample.get('img_path') or sample.get('token') or 'image').stem}"
        # Without a window there is a folder.
        out_file = Path(folder, f"{name}.png") if folder else None
        visualizer.add_datasample(name, image, sample, show=show, wait_time=show_interval, out_file=out_file)
        if len(drawn) < 12:
            drawn.append((image, sample))
    if folder:
        file = Path(folder, "sheet.png")
        columns = 2 * visualizer.sheet_columns
        images, samples = zip(*drawn, strict=True)
        visualizer.add_contact_sheet("sheet", images, samples, columns, out_file=file)
        say(f"wrote the pictures to {folder} and an overview to {file}")

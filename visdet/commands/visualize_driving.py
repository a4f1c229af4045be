"""Draw the frames of driving scenes as pictures with the camera views and a top view, and make a GIF of each scene.

visdet visualize-driving CONFIG CHECKPOINT --out-dir work_dirs/pictures --scenes 0 1
visdet visualize-driving CONFIG --out-dir work_dirs/pictures

Without a checkpoint, the pictures show the ground truth. The scenes are those of the config's test data set. The model
predicts the frames of a scene one after another.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visdet.command_line import add_config_arguments, add_options, positive_int

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import torch
    from mmengine import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add_config_arguments(parser, "--score-thr")
    add(
        "checkpoint",
        nargs="?",
        help="a checkpoint file or its http(s) address (default: draw the ground truth)",
    )
    add_options(
        parser,
        out_dir=("work_dirs/driving_pictures", "folder to write"),
        reach=(32.0, "distance in metres that the top view shows in every direction"),
    )
    add(
        "--scenes",
        type=int,
        nargs="+",
        default=[0],
        help="numbers of the scenes to draw, from 0 (default: 0)",
    )
    add(
        "--max-frames",
        type=positive_int,
        default=1000,
        help="maximum number of frames to draw per scene (default: %(default)s)",
    )
    add(
        "--map-score-thr",
        type=float,
        help="leave out map lines with a lower score (default: as for boxes, or 0.4)",
    )


def run(
    config: str,
    checkpoint: str | None,
    cfg_options: dict[str, Any] | None,
    score_thr: float | None,
    map_score_thr: float | None,
    out_dir: str,
    reach: float,
    scenes: list[int],
    max_frames: int,
) -> None:
    """Run the command."""
    from itertools import pairwise

    from visdet.engine import UserError, check_work_dir, load_config
    from visdet.engine.config.load import build_dataset
    from visdet.engine.inference.sample_images import is_bgr
    from visdet.registry import VISUALIZERS

    cfg, _ = load_config(config, cfg_options)
    check_work_dir(out_dir, "--out-dir")
    dataset = build_dataset(cfg, "test")
    if not hasattr(dataset, "scene_starts"):
        raise UserError(
            f"{config}: test_dataloader.dataset is a {type(dataset).__name__}, which has no scenes of several "
            "cameras. visdet browse draws the samples of any data set"
        )
    metainfo = dataset.metainfo
    model = None
    thresholds: dict[str, float] = {}
    if checkpoint:
        model, measured = load_model(cfg, checkpoint, metainfo)
        thresholds = chosen_thresholds(*measured, metainfo, score_thr, map_score_thr)
    visualizer = VISUALIZERS.build(
        {"type": "DrivingVisualizer", "name": "visualize_driving", "reach_m": reach}
    )
    visualizer.dataset_meta = metainfo
    all_scenes = list(pairwise([*dataset.scene_starts, len(dataset)]))
    count = len(all_scenes)
    for scene in scenes:
        if not 0 <= scene < count:
            raise UserError(
                f"--scenes must be numbers from 0 to {count - 1}, as the data set has {count} scenes, got {scene}"
            )
        frames = (dataset[index] for index in range(*all_scenes[scene])[:max_frames])
        drawn = draw_frames(frames, model, visualizer, thresholds, is_bgr(cfg))
        write_scene(drawn, Path(out_dir, f"scene_{scene:03d}"))


def chosen_thresholds(
    thresholds: dict[str, float],
    origin: str,
    metainfo: dict,
    score_thr: float | None,
    map_score_thr: float | None,
) -> dict[str, float]:
    """Return the thresholds of a model with those of the options in their place, and say what they are."""
    from visdet.engine import say
    from visdet.engine.checkpoints.score_thresholds import told_thresholds

    for option, value, names in (
        ("--score-thr", score_thr, "classes"),
        ("--map-score-thr", map_score_thr, "map_classes"),
    ):
        if value is not None:
            thresholds |= dict.fromkeys(metainfo.get(names, ()), value)
            origin += f" and {option}"
    say(told_thresholds(thresholds, thresholds.values(), origin))
    return thresholds


def draw_frames(
    frames: "Iterable[dict]",
    model: "torch.nn.Module | None",
    visualizer: Any,
    thresholds: dict[str, float],
    bgr: bool,
) -> "Iterator[np.ndarray]":
    """Yield the picture of each frame of a scene, with the predictions of the model if there is one."""
    import torch
    from mmengine.dataset import pseudo_collate

    from visdet.engine.inference.sample_images import image_of_inputs
    from visdet.engine.stages import StagedModel

    frames_of_scene = StagedModel(model) if model else None
    for item in frames:
        sample = item["data_samples"]
        if frames_of_scene:
            with torch.no_grad():
                (sample,) = frames_of_scene.test_step(pseudo_collate([item]))
        image = image_of_inputs(item["inputs"], bgr)
        yield visualizer.draw_sample(image, sample, pred_score_thr=thresholds)[0]


def load_model(
    cfg: "Config", checkpoint: str, metainfo: dict
) -> "tuple[torch.nn.Module, tuple[dict[str, float], str]]":
    """Return the model in evaluation mode with the weights of the checkpoint, and the thresholds with their origin.

    Its rows of classes are in the order of the data set's meta information.
    """
    import torch

    from visdet.engine.checkpoints.checkpoint import read_checkpoint
    from visdet.engine.checkpoints.class_names import class_lists, lists_of_checkpoint, matched_by_name
    from visdet.engine.checkpoints.score_thresholds import measured_thresholds
    from visdet.engine.checkpoints.weights import load_weights, own_names, weights_of
    from visdet.engine.config.build_errors import build_model

    model = build_model(cfg, cfg.model)
    content = read_checkpoint(checkpoint, trust=cfg.get("trust_checkpoint", False))
    weights = own_names(weights_of(content, checkpoint), model)
    weights = matched_by_name(model, weights, lists_of_checkpoint(content), class_lists(metainfo), checkpoint)
    load_weights(model, weights, checkpoint, allow_nonfinite=cfg.get("allow_nonfinite_weights", False))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), measured_thresholds(content)


def write_scene(pictures: "Iterable[np.ndarray]", name: Path) -> None:
    """Write the pictures [H, W, 3] uint8 of a scene to ``name_NNN.png`` and to ``name.gif``."""
    from visdet.visualization.drawing import write_picture
    from visdet.visualization.driving_views import write_gif

    written = []
    for number, picture in enumerate(pictures):
        write_picture(f"{name}_{number:03d}.png", picture)
        written.append(picture)
    write_gif(f"{name}.gif", written)
    print(f"wrote {len(written)} pictures to {name}_*.png and a GIF to {name}.gif")

"""Drive through frames of several cameras with an exported model, and draw boxes, map, motion and plan.

    python examples/drive.py frames sparsedrive/sparsedrive_toy_stage2 20 drive    # writes drive/000.pt, ...
    python examples/drive.py run exported found drive/*.pt                         # exported is of `visdet export`
    python examples/drive.py draw exported found drive/*.pt                        # writes found/000.png, ...

The second step writes the outputs of each frame, as the C++ program of examples/aoti/drive.cpp does with the arguments
exported, found and drive/*.pt.

A frame is a dict of tensors: ``images`` as the model wants them, ``projection_mat``, ``image_wh`` and, for a planner,
``gt_ego_fut_cmd``, as model.json describes them; ``pose`` float64 [B, 4, 4], from the vehicle to the world, ``time``
float64 [B] in seconds, and ``scene`` int64 [B], the number of the scene.
"""

import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visdet.engine.config.load import load_config
from visdet.engine.prepare import build_runner
from visdet.models.sparsedrive.boxes.box3d_decoder import results_of
from visdet.models.sparsedrive.sample_batch import batch_of
from visdet.models.sparsedrive.temporal.frame_clock import FrameClock
from visdet.structures import DrivingDataSample
from visdet.visualization.driving_views import draw_frame, scene_of_prediction

Tensors = dict[str, torch.Tensor]


def drive(
    run: Callable[[Tensors], Tensors], description: dict[str, Any], frames: Iterable[Tensors]
) -> Iterator[Tensors]:
    """Yield the outputs of each frame.

    Args:
        run: what ``load`` of a module in ``visdet.export.formats`` returns. description: what model.json says.
        frames: in the order of time, of any intervals, also from one scene to the next.
    """
    inputs, states = description["inputs"], description["states"]
    state: Tensors = {}
    previous: Tensors = {}
    for frame in frames:
        batch = len(frame["time"])
        for name in states if not state else ():  # It is zeros before the first frame.
            shape = [batch if size == "batch" else size for size in inputs[name]["shape"]]
            state[name] = torch.zeros(shape, dtype=getattr(torch, inputs[name]["type"]))
        before = previous or {**frame, "scene": frame["scene"] - 1}
        given = {**frame, **state}
        given["previous_to_current"] = (frame["pose"].inverse() @ before["pose"]).float()
        given["seconds"] = (frame["time"] - before["time"]).float()
        given["same_scene"] = frame["scene"] == before["scene"]
        outputs = run({name: given[name] for name in inputs})
        state = {name: outputs[output] for name, output in states.items()}
        previous = frame
        yield outputs


def frame_of(images: torch.Tensor, samples: Sequence[Any], scenes: list[Any]) -> Tensors:
    """Return the frame of a batch of visdet's data. ``scenes`` are those so far, to which new ones are added."""
    data = batch_of(samples, evaluates=True)
    clock = FrameClock.of(data)
    scenes += [scene for scene in dict.fromkeys(clock.scene) if scene not in scenes]
    frame = {name: value.float() for name, value in data.items() if isinstance(value, torch.Tensor)}
    numbers = torch.tensor([scenes.index(scene) for scene in clock.scene])
    times = torch.tensor(clock.timestamp, dtype=torch.float64)
    return {**frame, "images": images, "pose": clock.to_world, "time": times, "scene": numbers}


def write_frames(config: str, count: int, folder: Path) -> None:
    """Write the first frames of a config's test data."""
    cfg, _ = load_config(config, {"default_hooks.report": None, "work_dir": str(folder), "load_from": None})
    runner, scenes = build_runner(cfg), []
    for index, data in enumerate(itertools.islice(runner.test_dataloader, count)):
        batch = runner.model.data_preprocessor(data)
        frame = frame_of(batch["inputs"], batch["data_samples"], scenes)
        torch.save(frame, folder / f"{index:03}.pt")


def picture(outputs: Tensors, frame: Tensors, classes: list[str]) -> Any:
    """Return a picture of the first sample, from the cameras and from above."""
    results: dict[str, Tensors] = {}
    for name, value in outputs.items():
        place, _, part = name.rpartition(".")
        if name.startswith("results."):
            results.setdefault(place, {})[part] = value
    sample = DrivingDataSample()
    sample.set_predictions(results_of(results)[0])
    images = frame["images"][0].permute(0, 2, 3, 1)
    low, high = images.amin(), images.amax()
    views = (255 * (images - low) / (high - low)).byte().numpy()
    names = [f"camera {index}" for index in range(len(views))]
    return draw_frame(views, frame["projection_mat"][0].numpy(), names, classes, scene_of_prediction(sample))


def main() -> None:
    """Run the command line."""
    step, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if step == "frames":
        return write_frames(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    description = json.loads((model / "model.json").read_text())
    out.mkdir(exist_ok=True, parents=True)
    paths = list(map(Path, sys.argv[4:]))
    frames = (torch.load(path, weights_only=True) for path in paths)
    if step == "run":
        run = importlib.import_module(f"visdet.export.formats.{description['format']}").load(model)
        for path, outputs in zip(paths, drive(run, description, frames), strict=True):
            torch.save({name: value.cpu() for name, value in outputs.items()}, out / path.name)
    else:
        for path, frame in zip(paths, frames, strict=True):
            drawn = picture(dict(torch.load(out / path.name)), frame, description["classes"])
            Image.fromarray(drawn).save(out / f"{path.stem}.png")


if __name__ == "__main__":
    main()

"""Time whole runs from files: the published configs as they are shipped, on the machine at hand.

The command is ``python -m benchmarks.runs``. JPEG files are drawn into a temporary folder: photographs whose sizes are
distributed as those of COCO, or other sizes (``--sizes``), scenes of six cameras of 900 x 1600 pixels, and a video.
``visdet train`` and ``visdet test`` run in processes of their own, on several GPUs (``--gpus``) under torchrun.

A row has the time of an iteration in the second half of a run, and the part of it that waits for data, both medians of
the lines of the log, since a line in which a shape is captured says nothing of the others. Beside it are the median
time for which the main thread computes, and the time for which the GPU is busy and the number of its kernels, both in
one iteration that is profiled. The largest of these bound the run. A row also has the memory that torch reserves on the
GPU, in the first quarter of the run and at its end: once the sizes are captured, it should not grow. Without a GPU,
small configs take the place of the published ones, so that everything runs but the figures mean nothing.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.hooks import Hook

from visdet.datasets import make_driving_scenes
from visdet.engine import Detector, load_config
from visdet.engine.checkpoints.checkpoint import write_checkpoint
from visdet.registry import HOOKS, MODELS

from .environment import ROOT, describe
from .model_inputs import random_anchors
from .models import covered, spans_of
from .report import options_of, parser_of, table, write_report, write_table
from .transforms import draw_photographs

# (height, width) and how many of a thousand images have it. The rest has 640 pixels on one side and 300 to 640 on the
# other. Those of "coco" are the frequent sizes of train2017.
SIZES: dict[str, dict[tuple[int, int], int]] = {
    "coco": {
        (480, 640): 330,
        (640, 480): 110,
        (427, 640): 190,
        (640, 427): 60,
        (425, 640): 50,
        (375, 500): 39,
        (500, 375): 12,
        (640, 640): 27,
    },
    "portrait": {(640, 360): 400, (1280, 720): 300, (1920, 1080): 200, (640, 480): 100},
    "panorama": {(512, 2048): 500, (400, 1600): 300, (600, 3000): 200},
    "aerial": {(3000, 4000): 500, (3648, 5472): 500},
    "one": {(480, 640): 1000},
}
CLASSES = 80
COLUMNS = (
    "run",
    "sizes",
    "dtype",
    "batch, workers, GPUs",
    "ms an iteration",
    "waiting for data",
    "main thread",
    "GPU busy, kernels",
    "bound by",
    "reserved MiB, end",
)
MOST_IMAGES = 4000  # A longer run has several epochs of them.


# The config, the small one that takes its place without a GPU, batch size and data workers.
_DETR = "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"
_SMALL = "deformable_detr/deformable-detr_small_coco.py"
_STAGE_1 = "sparsedrive/sparsedrive_r50_stage1_8xb8_nuscenes.py"
RUNS = {
    "deformable_detr": (_DETR, _SMALL, 2, 6),
    "dino": ("dino/dino-4scale_r50_8xb2-12e_coco.py", _SMALL, 2, 6),
    "sparsedrive": (_STAGE_1, "sparsedrive/sparsedrive_toy_stage1.py", 4, 8),
    "test": (_DETR, _SMALL, 1, 8),
    "video": (_DETR, _SMALL, 1, 0),
}
_TIMES = ("time", "data_time", "host_s", "busy_s", "kernels", "reserved_MiB")


@HOOKS.register_module(force=True)  # The module is also run as the main one.
class RunMeter(Hook):
    """Logs for how long the main thread computes and the GPU is busy, and the memory that torch reserves on the GPU.

    Reserved memory holds that of the graphs, too. The iteration after the first quarter of the run is profiled.
    """

    priority = "LOWEST"

    def __init__(self) -> None:
        self.thread_s = time.thread_time()
        self.profile: Any = None

    def before_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        if runner.iter == runner.max_iters // 4 and torch.cuda.is_available():
            torch.cuda.synchronize()
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        write, now = runner.message_hub.update_scalar, time.thread_time()
        if self.profile is not None:
            torch.cuda.synchronize()
            self.profile.stop()
            kernels = spans_of(self.profile)
            write("train/kernels", len(kernels))
            write("train/busy_s", covered(kernels) / 1e6)
            self.profile, now = None, time.thread_time()
        else:
            write("train/host_s", now - self.thread_s)
        self.thread_s = now
        write("train/reserved_MiB", (torch.cuda.memory_reserved() if torch.cuda.is_available() else 0) >> 20)


def bound_of(result: dict[str, Any]) -> str:
    """Return what bound a run: what takes the largest part of an iteration, or "–" if that is not known."""
    parts = {
        "data": result.get("waiting_ms"),
        "main thread": result.get("host_ms"),
        "GPU": result.get("busy_ms"),
    }
    known = {name: ms for name, ms in parts.items() if ms}
    return max(known, key=lambda name: known[name]) if known else "–"


def draw_coco(folder: Path, count: int, kind: str) -> None:
    """Write photographs, and ``a.json`` in COCO's format with their random boxes."""
    random = np.random.default_rng(0)
    known, shares = list(SIZES[kind]), np.array([*SIZES[kind].values()]) / 1000
    others = [(int(side), 640)[:: 1 if side % 2 else -1] for side in random.integers(300, 640, count)]
    chosen = random.choice(len(known) + 1, count, p=[*shares, 1 - shares.sum()])
    sizes = [known[index] if index < len(known) else others[n] for n, index in enumerate(chosen)]
    records = draw_photographs(folder, sizes)
    images = [
        {
            "id": n,
            "file_name": Path(record["img_path"]).name,
            "height": record["height"],
            "width": record["width"],
        }
        for n, record in enumerate(records)
    ]
    boxes = [(n, *instance["bbox"]) for n, record in enumerate(records) for instance in record["instances"]]
    annotations = [
        {
            "id": m,
            "image_id": n,
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1),
            "iscrowd": 0,
        }
        | {"category_id": m % CLASSES + 1}
        for m, (n, x1, y1, x2, y2) in enumerate(boxes, 1)
    ]
    categories = [{"id": n, "name": f"class {n}"} for n in range(1, CLASSES + 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "a.json").write_text(json.dumps(content))


def settings_of(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Draw the files of a run, and return what its config changes: the files, the length and the log."""
    root, is_small = f"{folder}/", options.device == "cpu"
    published, small, batch_size, workers = RUNS[name]
    workers = (0 if is_small else workers) if options.workers is None else options.workers
    loader: dict[str, Any] = {"batch_size": options.batch_size or batch_size, "num_workers": workers}
    samples = options.iterations * loader["batch_size"] * options.gpus
    interval = max(1, min(10, options.iterations // 4))
    settings: dict[str, Any] = {
        "_base_": [str(ROOT / "configs" / (small if is_small else published))],
        "train_cfg": {"_delete_": True, "type": "IterBasedTrainLoop", "max_iters": options.iterations},
        "param_scheduler": [],
        "custom_imports": {"imports": ["benchmarks.runs"]},
        "custom_hooks": [{"type": "RunMeter"}],
        "default_hooks": {"logger": {"interval": interval}},
        "log_processor": {"window_size": interval},
        **dict.fromkeys(("val_dataloader", "val_evaluator", "val_cfg")),
    }
    if name == "sparsedrive":
        scenes = max(8, loader["batch_size"] * options.gpus)
        drawn = {
            "num_train": scenes,
            "num_val": 1,
            "num_test": 1,
            "num_frames": min(20, 1 + samples // scenes),
        }
        drawn["image_size"] = (96, 256) if is_small else (900, 1600)
        make_driving_scenes(folder / "scenes", **drawn)
        heads = {}
        for task, anchors in random_anchors(*((128, 30) if is_small else (900, 100))).items():
            np.save(f"{root}{task}.npy", anchors)
            heads[f"{task}_head"] = {"instance_bank": {"anchor": f"{root}{task}.npy"}}
        data = {"data_root": f"{root}scenes/", "ann_file": f"{root}scenes/driving_infos_train.npz"}
        data |= {"generator": drawn} if is_small else {}  # The small config would draw its own.
        settings |= dict.fromkeys(("test_dataloader", "test_evaluator", "test_cfg"))
        settings["model"] = {"head": heads, "img_backbone": {"init_cfg": None}}
    else:
        draw_coco(folder, min(samples, MOST_IMAGES), options.sizes)
        classes = tuple(f"class {n}" for n in range(1, CLASSES + 1))
        data = {
            "data_root": root,
            "ann_file": "a.json",
            "data_prefix": {"img": ""},
            "metainfo": {"classes": classes},
        }
        settings |= {
            "test_dataloader": loader | {"dataset": data},
            "test_evaluator": {"ann_file": f"{root}a.json"},
        }
        settings["model"] = {"backbone": {"init_cfg": None}}
    return settings | {"train_dataloader": loader | {"dataset": data}}


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run."""
    settings = settings_of(name, folder, options)
    config, checkpoint, loader = folder / "config.py", folder / "random.pth", settings["train_dataloader"]
    config.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    result = {key: getattr(options, key) for key in ("sizes", "dtype", "gpus")}
    result |= {"run": name, "batch_size": loader["batch_size"], "num_workers": loader["num_workers"]}
    amp = options.dtype == "bfloat16"
    if name in ("test", "video"):
        cfg, _ = load_config(config)
        write_checkpoint({"state_dict": MODELS.build(cfg.model).state_dict()}, checkpoint)
    if name == "video":
        detector = Detector(cfg, checkpoint, options.device)
        video = draw_video(folder)
        # A frame of random weights would have a hundred boxes to draw: ten are left.
        least = float(detector(next(folder.glob("*.jpg")), score_threshold=0.0, amp=amp).scores[9])
        found = detector(video, loader["batch_size"], least, amp=amp, save_video=folder / "found.mp4")
        seconds = np.diff([time.perf_counter() for _ in found])
        return result | {"ms": 1e3 * float(seconds[len(seconds) // 2 :].mean())}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}", "-m"]
    command = [sys.executable, "-m", *(torchrun if options.gpus > 1 else []), "visdet"]
    command += ["test", str(config), str(checkpoint)] if name == "test" else ["train", str(config)]
    command += [f"--work-dir={folder}/work", *(["--amp"] if amp else [])]
    # The points that stand for those of a lidar have three numbers.
    three = "train_dataloader.dataset.pipeline.1.load_dim=3"
    changes = [*options.cfg_options, *([three] if name == "sparsedrive" and options.device != "cpu" else [])]
    command += ["--cfg-options", *changes] if changes else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = rows_of("".join(path.read_text() for path in folder.glob("work/*/*.log")))
    if done.returncode or not len(rows):
        raise SystemExit(f"{shlex.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    late = rows[len(rows) // 2 :]
    means = dict(zip(_TIMES, late.mean(0).tolist(), strict=True))
    medians = dict(zip(_TIMES, np.median(late, axis=0).tolist(), strict=True))
    reserved = [float(rows[: len(rows) // 4 + 1, -1].max()), float(rows[:, -1].max())]
    return result | {
        "ms": 1e3 * medians["time"],
        "waiting_ms": 1e3 * medians["data_time"],
        "host_ms": 1e3 * medians["host_s"],
        "busy_ms": 1e3 * means["busy_s"],
        "kernels": round(means["kernels"]),
        "reserved_MiB": reserved,
        "command": shlex.join(command),
    }


def rows_of(log: str) -> np.ndarray:
    """Return the numbers of each line of a log that has times, in the order of ``_TIMES``. What it lacks is zero."""
    rows = []
    for line in log.splitlines():
        found = dict(re.findall(r"(\w+): ([\d.]+)", line))
        if "time" in found and "data_time" in found:
            rows.append([float(found.get(name, 0)) for name in _TIMES])
    return np.array(rows)


def draw_video(folder: Path) -> Path:
    """Write a video of the photographs in a folder, all in the size of the first one."""
    files = sorted(folder.glob("*.jpg"))
    height, width = cv2.imread(str(files[0])).shape[:2]
    writer = cv2.VideoWriter(str(folder / "video.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 30, (width, height))
    for file in files:
        writer.write(cv2.resize(cv2.imread(str(file)), (width, height)))
    writer.release()
    return folder / "video.mp4"


def cells_of(result: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    cells = [result["run"], result["sizes"], result["dtype"]]
    cells += [f"{result['batch_size']}, {result['num_workers']}, {result['gpus']}", f"{result['ms']:.1f}"]
    cells += [f"{result['waiting_ms']:.1f}" if "waiting_ms" in result else "–"]
    cells += [f"{result['host_ms']:.1f}" if result.get("host_ms") else "–"]
    cells += [f"{result['busy_ms']:.1f}, {result['kernels']}" if result.get("kernels") else "–"]
    cells += [bound_of(result)]
    return [*cells, ", ".join(f"{mib:.0f}" for mib in result.get("reserved_MiB", [])) or "–"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = parser_of("runs", __doc__, has_device=False)
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), help="runs to time (default: all)"
    )
    parser.add_argument(
        "--sizes", choices=SIZES, default="coco", help="sizes of the photographs (default: coco)"
    )
    parser.add_argument(
        "--iterations", type=int, default=400, help="number of iterations (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, help="images or frames on a GPU (default: 2, of driving 4)")
    parser.add_argument(
        "--workers", type=int, help="data workers of a process (default: 6, of driving and test 8)"
    )
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs and of processes (default: 1)")
    parser.add_argument(
        "--cfg-options", nargs="+", default=[], metavar="KEY=VALUE", help="as of visdet train"
    )
    options = options_of(parser, arguments)
    options.device, options.dtype = ("cuda", "bfloat16") if has_gpu else ("cpu", "float32")
    cv2.setNumThreads(0)  # The scenes are drawn by processes that are forked from this one.
    path = options.out / "runs.json"
    environment = describe(torch.device(options.device))
    report: dict[str, Any] = {"environment": environment, "command": options.command, "results": []}
    for name in options.runs:
        with tempfile.TemporaryDirectory() as folder:
            report["results"].append(measure(name, Path(folder), options))
        print(report["results"][-1], flush=True)
        write_report(report, path)
    write_table(report, table(COLUMNS, [cells_of(result) for result in report["results"]]), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

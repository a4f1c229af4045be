"""Measure how long a model of a config takes for images, eager and by CUDA graphs, and how much memory it needs.

visdet benchmark deformable_detr/deformable-detr_shapes
visdet benchmark work_dirs/my_config/best.pth --batch-size 8 --amp --shape 800 1333
"""

import argparse
import resource
import time
from typing import Any

from visdet.command_line import add_config_arguments, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_arguments(parser, "--batch-size", "--amp", "--shape", "--device")
    parser.add_argument("checkpoint", nargs="?", help="a checkpoint file (default: random weights)")
    parser.add_argument("--runs", type=positive_int, default=50, help="measured batches (default: 50)")


def run(
    config: str,
    cfg_options: dict[str, Any] | None,
    checkpoint: str | None,
    batch_size: int,
    amp: bool,
    shape: list[int] | None,
    device: str | None,
    runs: int,
) -> None:
    """Run the command."""
    import numpy as np
    import torch

    from visdet.engine import Detector, load_config, say
    from visdet.engine.inference.given_images import GivenImage
    from visdet.engine.summary import resized_to

    cfg, _ = load_config(config, cfg_options)
    detector = Detector(cfg, checkpoint, device)
    place = detector.device
    cuda = torch.cuda
    clock = time.perf_counter
    height, width = shape or resized_to(cfg)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = GivenImage(pixels=pixels)
    item = detector.item_of(image)
    images = [(image, item)] * batch_size
    is_cuda = place.type == "cuda"
    name = cuda.get_device_name(place) if is_cuda else "CPU"
    sides = list(item["inputs"].shape)
    say(f"{name}, batches of {batch_size} images {sides}, {'bfloat16' if amp else 'float32'}")
    for graph in (False, True) if is_cuda else (False,):

        def predict(graph: bool = graph) -> Any:
            return list(detector.detect_items(iter(images), batch_size, amp=amp, graph=graph))

        for _ in range(3):  # Memory is allocated, and graphs are captured.
            predict()
        if is_cuda:
            cuda.reset_peak_memory_stats(place)
        seconds = []
        for _ in range(runs):  # The detections come to the CPU, so that a run ends when it returns.
            begin = clock()
            predict()
            seconds.append(clock() - begin)
        median, slow = np.percentile(seconds, [50, 99]) * 1e3
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        memory = cuda.max_memory_reserved(place) if is_cuda else process
        say(
            f"{'graphs' if graph else 'eager':<7} p50 {median:.2f} ms, p99 {slow:.2f} ms, "
            f"{batch_size * len(seconds) / sum(seconds):.1f} images/s, "
            f"memory {memory / 2**20:.0f} MiB{'' if is_cuda else ' of the process'}"
        )

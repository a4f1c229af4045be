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


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    import numpy as np
    import torch

    from visdet.engine import Detector, load_config, say
    from visdet.engine.inference.given_images import GivenImage
    from visdet.engine.summary import resized_to

    cfg, _ = load_config(args.config, args.cfg_options)
    detector = Detector(cfg, args.checkpoint, args.device)
    height, width = args.shape or resized_to(cfg)
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    images = [(GivenImage(pixels=pixels), detector.item_of(GivenImage(pixels=pixels)))] * args.batch_size
    is_cuda = detector.device.type == "cuda"
    shape = list(images[0][1]["inputs"].shape)
    name = torch.cuda.get_device_name(detector.device) if is_cuda else "CPU"
    say(f"{name}, batches of {args.batch_size} images {shape}, {'bfloat16' if args.amp else 'float32'}")
    for graph in (False, True) if is_cuda else (False,):

        def predict(graph: bool = graph) -> Any:
            return list(detector.detect_items(iter(images), args.batch_size, amp=args.amp, graph=graph))

        for _ in range(3):  # Memory is allocated, and graphs are captured.
            predict()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats(detector.device)
        seconds = []
        for _ in range(args.runs):  # The detections come to the CPU, so that a run ends when it returns.
            begin = time.perf_counter()
            predict()
            seconds.append(time.perf_counter() - begin)
        median, slow = np.percentile(seconds, [50, 99])
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        memory = torch.cuda.max_memory_reserved(detector.device) if is_cuda else process
        say(
            f"{'graphs' if graph else 'eager':<7} p50 {median * 1e3:.2f} ms, p99 {slow * 1e3:.2f} ms, "
            f"{args.batch_size * len(seconds) / sum(seconds):.1f} images/s, "
            f"memory {memory / 2**20:.0f} MiB{'' if is_cuda else ' of the process'}"
        )

"""Time every path of an operator on the shapes of published models: python -m benchmarks.paths.

An operator with several kernels for one task chooses one of its paths by the sizes of a call (``visdet.ops.explain``
names them). This program times each path that serves a shape, which shows the gain of the choice. A path is worth its
code if it is 5 % faster than the next best one on a shape of a model. This needs a GPU.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from visdet.ops import explain
from visdet.ops.explain import choose_only

from .case import Case, dtype_name
from .environment import ROOT, describe
from .ops.deformable_aggregation import CASES as AGGREGATION
from .ops.detection import CASES as DETECTION
from .ops.gaussian_field import CASES as GAUSSIANS
from .ops.ms_deform_attn import CASES as ATTENTION
from .ops.ms_deform_attn import PYRAMID
from .ops.ms_deform_attn import case as attention_case
from .report import options_of, write_report
from .timing import deterministic, time_pass
from .write_docs import write_docs

SOURCES = ROOT / "visdet/ops/csrc/cuda"
FOLDERS = {  # the folders of the operators that have paths; modulated_deform_conv2d calls deform_conv2d
    "ms_deform_attn": "ms_deform_attn",
    "deformable_aggregation": "deformable_aggregation",
    "gaussian_field": "gaussian_field",
    "deform_conv2d": "deform_conv2d",
}
PASSES = {"forward": "forward", "backward": "backward", "deterministic": "backward_deterministic_unfilled"}

FIVE_SCALES = ((200, 268), *PYRAMID)  # DINO with levels of strides 4 to 64
REAL_TIME = ((80, 80), (40, 40), (20, 20))  # 640 x 640 pixels: RT-DETR, D-FINE
BEV_CAMERAS = ((116, 200), (58, 100), (29, 50), (15, 25))  # BEVFormer at 928 x 1600 pixels


def model_cases() -> list[Case]:
    """Return cases with shapes of attention in published models that the operator's own benchmark lacks."""
    local = dict(local=True, graph=True)
    cases = [
        attention_case("dino-5-scales", B=1, levels=FIVE_SCALES, **local),
        attention_case("single-scale", levels=PYRAMID[1:2], **local),
        attention_case("bevformer-temporal", B=2, levels=((200, 200),), **local),
        attention_case("bevformer-cameras", B=6, Q=9600, P=8, levels=BEV_CAMERAS, graph=True),
        # Decoders whose levels have no multiple of four samples: D-FINE-N, and RF-DETR at 560 x 560 pixels.
        attention_case("d-fine-n-b1", B=1, Q=300, C=16, P=6, levels=REAL_TIME[1:], graph=True),
        attention_case("rf-detr-b1", B=1, Q=300, G=16, C=16, P=2, levels=REAL_TIME[1:2], graph=True),
        attention_case("rf-detr-b16", B=16, Q=300, G=16, C=16, P=2, levels=REAL_TIME[1:2], graph=True),
    ]
    for B, Q, levels, name in (
        (1, 300, REAL_TIME, "rt-detr-b1"),
        (16, 300, REAL_TIME, "rt-detr-b16"),
        (1, 300, PYRAMID, "decoder-q300-b1"),
        (8, 300, PYRAMID, "decoder-q300-b8"),
        (1, 900, PYRAMID, "decoder-q900-b1"),
        (8, 900, PYRAMID, "decoder-q900-b8"),
        (2, 1100, PYRAMID, "decoder-q1100-denoising"),
        (2, 1100, FIVE_SCALES, "decoder-q1100-5-scales"),
    ):
        cases.append(attention_case(name, B=B, Q=Q, levels=levels, graph=True))
    return cases


def paths_of(op: str) -> list[str]:
    """Return the paths of an operator in the order of the list in its sources.

    The name of an operator for gradients ends in "_backward". A list without "Forward" or "Backward" in its name serves
    both.
    """
    name = "Backward" if op.endswith("_backward") else "Forward"
    for source in sorted((SOURCES / FOLDERS[op.removesuffix("_backward")]).glob("*.cu*")):
        found = re.search(rf"k(?:{name})?Paths\[\] = \{{(.*?)\n\}};", source.read_text(), re.DOTALL)
        if found:
            return re.findall(r'\{"(\w+)"', found[1])
    raise LookupError(f"no k{name}Paths or kPaths in {SOURCES / FOLDERS[op.removesuffix('_backward')]}")


def chosen_paths(
    function: Callable[..., Any], arguments: Sequence[Any], **options: Any
) -> dict[str, tuple[str, str]]:
    """Return {pass: (operator, its path)} of a call. It has "deterministic" only if that differs from the backward."""
    with deterministic():
        of_deterministic = explain(function, *arguments, **options).paths()
    plain = {op: path for op, path in explain(function, *arguments, **options).paths().items() if path}
    chosen = {"backward" if op.endswith("_backward") else "forward": (op, path) for op, path in plain.items()}
    if "backward" in chosen:
        op, path = chosen["backward"]
        if of_deterministic.get(op) not in (None, path):
            chosen["deterministic"] = op, of_deterministic[op]
    return chosen


def measure_paths(case: Case, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """Return {"op", "case", "sizes", "dtype", "pass", "path", "chosen", "us"} for every path that serves the case."""
    arguments = case.make(dtype, torch.device("cuda"))
    call = case.call(arguments)
    with torch.no_grad():
        output = call.function(*arguments)
    grad_output = torch.randn_like(output)
    rows: list[dict[str, Any]] = []
    for kind, (op, chosen) in chosen_paths(case.function, arguments).items():
        for path in paths_of(op):
            torch.cuda.empty_cache()
            try:
                with choose_only(op, path):
                    timing = time_pass(call, PASSES[kind], grad_output, True, seconds)
            except RuntimeError as error:
                if "does not serve this call" not in str(error):
                    raise
                continue
            row = dict(op=case.op, case=case.name, sizes=case.sizes, dtype=dtype_name(dtype))
            rows.append(row | {"pass": kind, "path": path, "chosen": path == chosen, "us": timing.median_us})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", default=[], metavar="WORD", help="cases whose op/name contains a WORD"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="of repetition for one time (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/bench/paths.json"), help="the table as JSON"
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="put the times into the pages of docs/kernels"
    )
    options = options_of(parser, arguments)
    if not torch.cuda.is_available():
        print("benchmarks.paths: this needs a GPU", file=sys.stderr)
        return 1
    environment, command = describe(torch.device("cuda")), options.command
    report: dict[str, Any] = {"environment": environment, "command": command, "rows": []}
    for case in (*ATTENTION, *model_cases(), *AGGREGATION, *GAUSSIANS, *DETECTION):
        if case.op.removeprefix("modulated_") not in FOLDERS or case.name == "tiny":
            continue
        if options.cases and not any(word in case.title for word in options.cases):
            continue
        for dtype in case.dtypes[:2]:
            rows = measure_paths(case, dtype, options.seconds)
            report["rows"] += rows
            for kind in PASSES:
                times = [f"{'*' * r['chosen']}{r['path']} {r['us']:.1f}" for r in rows if r["pass"] == kind]
                if times:
                    print(f"{case.title} {dtype_name(dtype)} {kind}: {', '.join(times)}", flush=True)
            write_report(report, options.out)
    if options.write_docs:
        write_docs([options.out])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

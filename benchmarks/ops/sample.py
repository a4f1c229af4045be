"""Cases of sample_sum and sample_dot, with random samples as in publications and with samples on epipolar lines."""

from functools import partial
from typing import Any

import torch

from visdet.ops import sample_dot, sample_dot_reference, sample_sum, sample_sum_reference

from ..case import Case, Work, peer_of, seeded

VALUE_TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make_arguments(
    dtype: torch.dtype,
    device: torch.device,
    *,
    op: str,
    B: int,
    C: int,
    H: int,
    W: int,
    Q: int,
    D: int,
    G: int,
    octaves: int,
    epipolar: bool,
    channels_last: bool,
) -> tuple[Any, ...]:
    """Return the operator's arguments. Only images have the dtype ``dtype``.

    Samples are uniform in -1.25..1.25, of which 64 % are in the image, or they are evenly spaced between two random
    points. They keep a tenth of a pixel from pixel centres, where their gradient jumps.
    """
    generator = seeded()
    size = torch.tensor([W, H], dtype=torch.float32)
    if epipolar:
        start, end = (torch.rand(B, Q, 1, 2, generator=generator) for _ in range(2))
        along = torch.linspace(0, 1, D)[:, None]
        pixels = (start + (end - start) * along) * size
    else:
        pixels = (torch.rand(B, Q, D, 2, generator=generator) * 1.25 - 0.125) * size
    pixels = pixels.floor() + (pixels - pixels.floor()).clamp(0.1, 0.9)
    samples = (pixels + 0.5) / size * 2 - 1
    images = torch.randn(B, C, H, W, generator=generator).to(dtype)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)
    images = images.to(device)
    if op == "sample_sum":
        weights = torch.randn(B, G, Q, D, generator=generator).softmax(-1)
        return images, samples.to(device), weights.to(device)
    queries = torch.randn(B, G, Q, C - 2 * octaves, generator=generator)
    depths = torch.rand(B, Q, D, generator=generator)
    return images, samples.to(device), queries.to(device), depths.to(device), octaves


def work_of(
    dtype: torch.dtype, *, B: int, C: int, H: int, W: int, Q: int, D: int, G: int, **_: Any
) -> dict[str, Work]:
    """Return the bytes of forward and backward for the samples that are in the image."""
    element = dtype.itemsize
    samples = int(B * Q * D * 0.64)
    image = B * C * H * W * element
    others = B * Q * D * 8 + B * G * Q * (C + D) * 4
    read = samples * 4 * C * element
    return {
        "forward": Work(
            moved=min(image, read) + others,
            gathered=read,
            rows=read,
            rows_footprint=image // B,
        ),
        "backward": Work(
            moved=2 * image + 2 * others,
            gathered=2 * read,
            rows=read,
            rows_footprint=image // B,
        ),
    }


def _case(op: str, name: str, **changes: Any) -> Case:
    sizes = dict(B=8, C=140, H=128, W=256, Q=256, D=123, G=4, octaves=6, epipolar=False, channels_last=False)
    sizes |= {key: changes.pop(key) for key in list(changes) if key in sizes}
    function, reference = (
        (sample_sum, sample_sum_reference) if op == "sample_sum" else (sample_dot, sample_dot_reference)
    )
    names = (
        ("images", "samples", "weights") if op == "sample_sum" else ("images", "samples", "queries", "depths")
    )
    differentiable = {key: position for position, key in enumerate(names)}
    return Case(
        op=op,
        name=name,
        sizes=" ".join(
            f"{key}{value}" for key, value in sizes.items() if key not in ("epipolar", "channels_last")
        )
        + (", epipolar lines" if sizes["epipolar"] else ", uniform")
        + (", channels last" if sizes["channels_last"] else ", NCHW"),
        make=partial(make_arguments, op=op, **sizes),
        function=function,
        reference=reference,
        differentiable=differentiable,
        work=partial(work_of, **sizes),
        tolerance=lambda dtype: (
            dict.fromkeys(names, 1e-4) | dict.fromkeys(("output", "images"), VALUE_TOLERANCE[dtype])
        ),
        peers=(peer_of("torch", reference, tuple(differentiable.values())),),
        batched=tuple(differentiable.values()),
        checked_batches=(sizes["B"] - 1,),
        **changes,
    )


SMALL = dict(B=1, H=64, W=128, Q=128)
CASES = [
    _case("sample_sum", "tiny", B=1, C=20, H=9, W=12, Q=7, D=5, G=2, octaves=2),
    _case("sample_sum", "small", **SMALL),
    _case("sample_sum", "nchw", heavy=True),
    _case("sample_sum", "channels-last", channels_last=True, heavy=True),
    _case("sample_sum", "epipolar", epipolar=True, heavy=True),
    _case("sample_dot", "tiny", B=1, C=20, H=9, W=12, Q=7, D=5, G=2, octaves=2),
    _case("sample_dot", "small", **SMALL),
    _case("sample_dot", "nchw", heavy=True),
    _case("sample_dot", "channels-last", channels_last=True, heavy=True),
    _case("sample_dot", "epipolar", epipolar=True, heavy=True),
]

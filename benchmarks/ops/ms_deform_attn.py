"""Cases of ms_deform_attn, with shapes of encoders, decoders and many images, and sizes without special kernels."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visdet.ops import ms_deform_attn, ms_deform_attn_reference
from visdet.ops.ms_deform_attn import level_starts_of

from ..case import Call, Case, Peer, Work, peer_of, seeded, tolerances

Levels = tuple[tuple[int, int], ...]  # (height, width)

PYRAMID: Levels = ((100, 134), (50, 67), (25, 34), (13, 17))  # 800 x 1066 pixels at strides 8 to 64
MANY_IMAGES: Levels = ((92, 160), (46, 80), (23, 40), (20, 12))
POWERS_OF_TWO: Levels = ((128, 128), (64, 64), (32, 32))  # 1024 x 1024 pixels at strides 8 to 32
OFFSET_PIXELS = 3.0  # standard deviation of a local sample around its query, in pixels of each level
TEXEL_MARGIN = 1e-3  # distance of positions from texel centres, where the gradient of a location jumps
# The L1 of one SM. If a level's map of one head and image fits into it, it is read at the rate of L1.
L1_BYTES = 228 << 10


def make_arguments(
    dtype: torch.dtype,
    device: torch.device,
    *,
    B: int,
    Q: int,
    G: int,
    C: int,
    P: int,
    levels: Levels,
    local: bool,
) -> tuple[Any, ...]:
    """Return value, level_shapes (on the CPU), level_starts, locations, weights.

    With ``local``, there are Q = S queries at the texel centres, and samples are normally distributed around them with
    a standard deviation of 3 pixels of each level. Otherwise, samples are uniform in 0..1. Weights are a softmax over
    L * P. Only value has the dtype ``dtype``.
    """
    generator = seeded()
    level_shapes = torch.tensor(levels)
    S, L = int(level_shapes.prod(1).sum()), len(levels)
    size = level_shapes.flip(1).float()[:, None]  # [L, 1, 2] (width, height)
    if local:
        centres = torch.cat([_texel_centres(H, W) for H, W in levels])  # [S, 2]
        offsets = torch.randn(B, S, G, L, P, 2, generator=generator) * OFFSET_PIXELS
        locations = centres[:, None, None, None] + offsets / size
    else:
        locations = torch.rand(B, Q, G, L, P, 2, generator=generator)
    pixels = locations * size - 0.5
    fractions = (pixels - pixels.floor()).clamp(TEXEL_MARGIN, 1 - TEXEL_MARGIN)
    locations = (pixels.floor() + fractions + 0.5) / size
    weights = torch.randn(B, Q, G, L * P, generator=generator).softmax(-1).view(B, Q, G, L, P)
    value = torch.randn(B, S, G, C, generator=generator).to(dtype)
    starts = level_starts_of(level_shapes)
    return value.to(device), level_shapes, starts, locations.to(device), weights.to(device)


def _texel_centres(H: int, W: int) -> Tensor:
    y, x = torch.meshgrid((torch.arange(H) + 0.5) / H, (torch.arange(W) + 0.5) / W, indexing="ij")
    return torch.stack([x, y], -1).reshape(-1, 2)


def work_of(
    dtype: torch.dtype, *, B: int, Q: int, G: int, C: int, P: int, levels: Levels, local: bool
) -> dict[str, Work]:
    """Return the bytes of forward and backward.

    Samples read four corners of C values, and the backward adds four corners of C float32 numbers to the gradient.
    Local samples, and uniform samples on levels that fit into L1, are assumed to come from L1. The others come from L2,
    one image at a time. Rows of value that no sample can reach do not count as moved.
    """
    element = dtype.itemsize
    S = sum(H * W for H, W in levels)
    samples = B * Q * G * len(levels) * P
    reached = sum(min(H * W, 4 * Q * P) for H, W in levels) * B * G * C * element
    output = B * Q * G * C * element
    coordinates = samples * 3 * 4  # x, y and weight in float32
    corners = 4 * C * B * Q * G * P  # values read on one level
    read = corners * element * len(levels)
    added = corners * 4 * len(levels)

    def beyond_l1(size: int) -> int:
        return 0 if local else corners * size * sum(H * W * C * size > L1_BYTES for H, W in levels)

    return {
        "forward": Work(
            moved=reached + coordinates + output,
            gathered=read,
            rows=beyond_l1(element),
            rows_footprint=S * G * C * element,
        ),
        "backward": Work(
            moved=output + reached + 2 * coordinates + B * S * G * C * element,
            gathered=read + added,
            rows=beyond_l1(element),
            reductions=beyond_l1(4),
            rows_footprint=S * G * C * element,
            reductions_footprint=S * G * C * 4,
        ),
    }


def grid_sample_path(
    value: Tensor, level_shapes: Tensor, level_starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    """Return the result in plain torch, which is the weighted sum of grid_sample for each level.

    16-bit values are converted to the dtype of the locations first, because grid_sample needs its grid in the same
    dtype, and 16-bit coordinates are too inaccurate.
    """
    B, _, G, C = value.shape
    _, Q, _, L, P, _ = locations.shape
    grids = 2 * locations - 1
    maps = value.to(locations.dtype).split([H * W for H, W in level_shapes.tolist()], dim=1)
    samples = []
    for level, (H, W) in enumerate(level_shapes.tolist()):
        level_map = maps[level].flatten(2).transpose(1, 2).reshape(B * G, C, H, W)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        samples.append(F.grid_sample(level_map, grid, padding_mode="zeros", align_corners=False))
    weights = weights.transpose(1, 2).reshape(B * G, 1, Q, L * P)
    summed = (torch.stack(samples, dim=-2).flatten(-2) * weights).sum(-1).view(B, G * C, Q)
    return summed.transpose(1, 2).contiguous().to(value.dtype)


def _load_deformops(backend: str | None) -> Any:
    """Load deformops 3, which needs Python 3.12.

    Args:
        backend: the name of the backend. With None, deformops chooses, which is Triton on a GPU.
    """
    from deformops.registry import Backend, msda

    if backend is not None and not msda.is_registered(Backend(backend)):
        raise ImportError(msda.unavailable_reason(Backend(backend)))
    function = partial(msda, backend=backend and Backend(backend))

    def adapt(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Call:
        # deformops takes tensors of one dtype only. 16-bit locations are off by pixels, as its output error shows.
        samples = locations.to(value.dtype), weights.to(value.dtype)
        return Call(function, (value, shapes.to(value.device), starts.to(value.device), *samples), (0, 3, 4))

    return adapt


PEERS = (
    peer_of("torch", grid_sample_path, (0, 3, 4)),
    Peer("deformops", partial(_load_deformops, None)),
    Peer("deformops CUDA", partial(_load_deformops, "cuda")),
)


def case(
    name: str,
    B: int = 2,
    Q: int = 0,  # 0: S
    G: int = 8,
    C: int = 32,
    P: int = 4,
    levels: Levels = PYRAMID,
    local: bool = False,
    **others: Any,
) -> Case:
    Q = Q or sum(H * W for H, W in levels)
    numbers = dict(B=B, Q=Q, G=G, C=C, P=P, levels=levels, local=local)
    pyramid = " ".join(f"{H}x{W}" for H, W in levels)
    where = f"N(0, {OFFSET_PIXELS:g} px) around the query" if local else "uniform"
    return Case(
        op="ms_deform_attn",
        name=name,
        sizes=f"B{B} Q{Q} G{G} C{C} L{len(levels)} P{P}, levels {pyramid}, samples {where}",
        make=partial(make_arguments, **numbers),
        function=ms_deform_attn,
        reference=ms_deform_attn_reference,
        differentiable={"value": 0, "locations": 3, "weights": 4},
        work=partial(work_of, **numbers),
        tolerance=partial(tolerances, ("output", "value"), ("locations", "weights")),
        peers=PEERS,
        batched=(0, 3, 4),
        **others,
    )


CASES = [
    case("tiny", Q=13, G=3, C=20, levels=((7, 5), (3, 4))),
    case(
        "encoder",
        local=True,
        checked_batches=(1,),
    ),
    case("encoder-uniform", checked_batches=(1,)),
    case("encoder-p8", P=8, local=True, checked_batches=(1,)),
    case("encoder-l3", levels=PYRAMID[:3], local=True, checked_batches=(1,)),  # 12 samples a row
    case("encoder-c64", C=64, local=True, checked_batches=(1,)),
    case("encoder-c31", C=31, local=True, checked_batches=(1,)),
    case("mask2former-b4", B=4, levels=POWERS_OF_TWO, local=True, checked_batches=(3,)),
    case(
        "decoder-q300",
        Q=300,
        graph=True,
    ),
    case(
        "decoder-q900",
        Q=900,
        graph=True,
    ),
    case("decoder-q300-b16", B=16, Q=300, graph=True),
    case(
        "images-48",
        B=48,
        Q=15422,
        G=1,
        P=8,
        levels=MANY_IMAGES,
        checked_batches=(0, 47),
        heavy=True,
    ),
]

"""Cases of deformable_aggregation_with_depth, with the sizes of SparseDrive's detection head and 64 depths."""

from functools import partial
from typing import Any

import torch

from visdet.ops import deformable_aggregation_with_depth, deformable_aggregation_with_depth_reference

from ..case import Case, seeded, tolerances
from .deformable_aggregation import LEVELS, make_arguments, work_of

DEPTHS = 64


def _make(dtype: torch.dtype, device: torch.device, **sizes: Any) -> tuple[Any, ...]:
    """Return features, depth_probs, level_shapes and level_starts, locations, weights; depths between whole numbers."""
    features, shapes, starts, locations, weights = make_arguments(dtype, device, **sizes)
    generator = seeded(1)
    depth_probs = torch.randn(*features.shape[:2], DEPTHS, generator=generator).softmax(-1).to(features)
    depths = torch.rand(*locations.shape[:-1], 1, generator=generator)
    depths = (depths * (DEPTHS - 1)).floor() + 0.1 + 0.8 * torch.rand(depths.shape, generator=generator)
    return features, depth_probs, shapes, starts, torch.cat([locations, depths.to(locations)], -1), weights


def _case(name: str, **sizes: Any) -> Case:
    sizes = dict(B=1, Q=900, P=13, levels=LEVELS, visible=0.2) | sizes
    return Case(
        op="deformable_aggregation_with_depth",
        name=name,
        sizes=f"B{sizes['B']} Q{sizes['Q']} P{sizes['P']} V6 L{len(sizes['levels'])} G8 C256 D{DEPTHS}",
        make=partial(_make, **sizes),
        function=deformable_aggregation_with_depth,
        reference=deformable_aggregation_with_depth_reference,
        differentiable={"features": 0, "depth_probs": 1, "locations": 4, "weights": 5},
        work=partial(work_of, **sizes),
        tolerance=partial(tolerances, ("output", "features", "depth_probs"), ("locations", "weights")),
        batched=(0, 1, 4, 5),
        checked_batches=(0,),
    )


CASES = [_case("tiny", Q=7, P=3, levels=((8, 16), (4, 8))), _case("det-b1")]

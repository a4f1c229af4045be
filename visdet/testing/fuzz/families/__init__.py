"""The families of problems by the name of their operator."""

from ..problem import Family
from . import (
    aggregation,
    assignments,
    attention,
    boxes,
    convolutions,
    gaussians,
    images,
    linear_layers,
    losses,
    normalizations,
    regions,
)

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (
        attention,
        aggregation,
        boxes,
        images,
        gaussians,
        convolutions,
        regions,
        losses,
        linear_layers,
        normalizations,
        assignments,
    )
    for family in module.FAMILIES
}

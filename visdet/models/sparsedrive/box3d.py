"""The layout of 3-D boxes inside the model, and their encoding.

An anchor is [..., 11]: x, y, z (metres), the logarithms of three sizes (the first along the heading), sin and cos of
the yaw, vx, vy, vz (metres per second). An annotated or decoded box is [..., 7 + velocities]: x, y, z, three sizes in
metres, yaw in radians, velocity.
"""

import torch
from torch import Tensor

from ..layers.precision import at_least_float32

__all__ = [
    "CNS",
    "COS_YAW",
    "MAX_LOG_SIZE",
    "SIN_YAW",
    "VX",
    "VY",
    "VZ",
    "YAW",
    "YNS",
    "H",
    "L",
    "W",
    "X",
    "Y",
    "Z",
    "decode_box",
    "encode_box",
]

X, Y, Z, W, L, H, SIN_YAW, COS_YAW, VX, VY, VZ = range(11)  # of an anchor
YAW = 6  # of an annotated box
CNS, YNS = 0, 1  # centerness and yawness in a quality prediction

_MIN_SIZE_M = 1e-3  # a degenerate annotation stays finite
MAX_LOG_SIZE = 10.0  # 22 km: a diverging size stays finite


def encode_box(box: Tensor) -> Tensor:
    """Return boxes [..., 7 + v] (yaw in radians) as anchors [..., 8 + v]; sizes below 1 mm count as 1 mm, NaN stays."""
    box = at_least_float32(box)
    yaw = box[..., YAW : YAW + 1]
    return torch.cat(
        [
            box[..., :W],
            box[..., W:YAW].clamp(min=_MIN_SIZE_M).log(),
            yaw.sin(),
            yaw.cos(),
            box[..., YAW + 1 :],
        ],
        -1,
    )


def decode_box(anchor: Tensor) -> Tensor:
    """Return anchors [..., 8 + v] as boxes [..., 7 + v], yaw in (-pi, pi]; log sizes above 10 count as 10."""
    anchor = at_least_float32(anchor)
    yaw = torch.atan2(anchor[..., SIN_YAW], anchor[..., COS_YAW])
    return torch.cat(
        [
            anchor[..., :W],
            anchor[..., W:SIN_YAW].clamp(max=MAX_LOG_SIZE).exp(),
            yaw[..., None],
            anchor[..., VX:],
        ],
        -1,
    )

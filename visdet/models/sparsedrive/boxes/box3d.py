"""The layout of 3-D boxes inside the model, and their encoding.

An anchor is [..., 11]: x, y, z in metres, the logarithms of the three sizes, sine and cosine of the yaw, and vx, vy, vz
in metres per second. The first size is the one along the heading. An annotated or decoded box is [..., 7 + velocities]:
x, y, z and the three sizes in metres, the yaw in radians, and the velocity.
"""

import torch
from torch import Tensor

from ...layers.precision import at_least_float32

X, Y, Z, W, L, H, SIN_YAW, COS_YAW, VX, VY, VZ = range(11)  # columns of an anchor
YAW = 6  # column of an annotated box
# Columns of centerness and yawness in a quality prediction.
CNS = 0
YNS = 1

_MIN_SIZE_M = 1e-3  # keeps a degenerate annotation finite
MAX_LOG_SIZE = 10.0  # 22 km, keeps a diverging size finite


def encode_box(box: Tensor) -> Tensor:
    """Return boxes [..., 7 + v] (yaw in radians) as anchors [..., 8 + v].

    Sizes below 1 mm count as 1 mm. NaN stays NaN.
    """
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


def yaw_of(anchor: Tensor) -> Tensor:
    """Return the yaw [...] of anchors [..., 8 + v] in (-pi, pi]."""
    return torch.atan2(anchor[..., SIN_YAW], anchor[..., COS_YAW])


def decode_box(anchor: Tensor) -> Tensor:
    """Return anchors [..., 8 + v] as boxes [..., 7 + v] with yaw in (-pi, pi].

    Logarithms of sizes above 10 count as 10.
    """
    anchor = at_least_float32(anchor)
    yaw = yaw_of(anchor)
    return torch.cat(
        [
            anchor[..., :W],
            anchor[..., W:SIN_YAW].clamp(max=MAX_LOG_SIZE).exp(),
            yaw[..., None],
            anchor[..., VX:],
        ],
        -1,
    )

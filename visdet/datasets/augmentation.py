"""The random sizes, crops, flips and rotations of the images of a frame."""

import math
from typing import Annotated, Any

import numpy as np
import torch

from visdet.checks.arguments import Above0, Positive, Range, Share, checked

_Angle = Annotated[float, Range(-math.pi, math.pi)]
# What a data set in test mode does not read, and need not have.
NOT_RANDOM = {"resize_lim": (1.0, 1.0), "rot_lim": (0.0, 0.0), "rand_flip": False, "rot3d_range": (0.0, 0.0)}


def resized_sides(width: int, height: int, factor: float) -> tuple[int, int]:
    """Return the (width, height) of an image after it has been resized by a factor."""
    return int(width * factor), int(height * factor)


@checked
def data_aug_conf(
    H: Positive,
    W: Positive,
    final_dim: tuple[Positive, Positive],
    bot_pct_lim: tuple[Share, Share],
    resize_lim: tuple[Above0, Above0],
    rot_lim: tuple[float, float],
    rand_flip: bool,
    rot3d_range: tuple[_Angle, _Angle],
) -> None:
    """Do nothing. The arguments are what a ``data_aug_conf`` must have."""


def factor_of_tests(conf: dict[str, Any]) -> float:
    """Return the least factor by which resized images cover ``final_dim``."""
    height, width = conf["final_dim"]
    return max(height / conf["H"], width / conf["W"])


def drawn_augmentation(
    conf: dict[str, Any], test_mode: bool, rng: np.random.Generator | None = None
) -> dict[str, Any]:
    """Return the resize factor, crop, flip and rotations of a frame.

    In test mode, images get the smallest size that covers ``final_dim``, and are cropped to their middle and, by
    ``bot_pct_lim``, their bottom.

    Args:
        conf: the ranges, the ``data_aug_conf`` of :class:`NuScenes3DDetTrackDataset`.
        test_mode: whether nothing is random.
        rng: the generator of the random numbers. The default is one that torch's global generator seeds.
    """
    height, width = conf["H"], conf["W"]
    final_height, final_width = conf["final_dim"]
    if test_mode:
        resize = factor_of_tests(conf)
        bottom, share_left = float(np.mean(conf["bot_pct_lim"])), 0.5
        flip, rotate, rotate_3d = False, 0.0, 0.0
    else:
        rng = rng or np.random.default_rng(int(torch.randint(2**31, ())))
        resize = rng.uniform(*conf["resize_lim"])
        bottom = rng.uniform(*conf["bot_pct_lim"])
        flip = bool(conf["rand_flip"] and rng.integers(2))
        rotate = rng.uniform(*conf["rot_lim"])
        rotate_3d = rng.uniform(*conf["rot3d_range"])
        share_left = rng.random()
    new_width, new_height = resized_sides(width, height, resize)
    top = int((1 - bottom) * new_height) - final_height
    left = int(share_left * max(0, new_width - final_width))
    return {
        "resize": resize,
        "resize_dims": (new_width, new_height),
        "crop": (left, top, left + final_width, top + final_height),
        "flip": flip,
        "rotate": rotate,
        "rotate_3d": rotate_3d,
    }

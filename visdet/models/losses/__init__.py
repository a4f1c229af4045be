"""Losses of classes and boxes."""

from .box_losses import GIoULoss, L1Loss
from .cross_entropy_loss import CrossEntropyLoss
from .focal_loss import FocalLoss
from .gaussian_focal_loss import GaussianFocalLoss

__all__ = [
    "CrossEntropyLoss",
    "FocalLoss",
    "GIoULoss",
    "GaussianFocalLoss",
    "L1Loss",
]

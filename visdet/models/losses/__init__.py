"""Losses of classes and boxes."""

from .box_losses import GIoULoss, L1Loss
from .focal_loss import FocalLoss, sigmoid_focal_loss
from .reduction import reduce_loss

__all__ = ["FocalLoss", "GIoULoss", "L1Loss", "reduce_loss", "sigmoid_focal_loss"]

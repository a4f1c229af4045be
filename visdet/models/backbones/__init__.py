"""Backbones, which compute feature maps from images."""

from .resnet import ResNet
from .swin import SwinTransformer

__all__ = ["ResNet", "SwinTransformer"]

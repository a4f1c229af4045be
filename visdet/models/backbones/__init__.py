"""Backbones, which compute feature maps from images."""

from .resnet import ResNet

__all__ = ["ResNet"]

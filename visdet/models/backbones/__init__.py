"""Backbones: images to feature maps."""

from .resnet import ResNet

__all__ = ["ResNet"]

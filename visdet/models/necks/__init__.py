"""Necks: feature maps to a pyramid of one width."""

from .channel_mapper import ChannelMapper
from .fpn import FPN

__all__ = ["FPN", "ChannelMapper"]

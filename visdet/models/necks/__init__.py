"""Necks, which turn the backbone's feature maps into a pyramid whose levels have equal channels."""

from .channel_mapper import ChannelMapper
from .fpn import FPN

__all__ = ["FPN", "ChannelMapper"]

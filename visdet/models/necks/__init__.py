"""Necks: feature maps to a pyramid of one width."""

from .channel_mapper import ChannelMapper

__all__ = ["ChannelMapper"]

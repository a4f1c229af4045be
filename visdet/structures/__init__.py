"""Containers that cross the borders between data, model and evaluation."""

from .det_data_sample import DetDataSample

__all__ = ["DetDataSample"]

"""Containers that cross the borders between data, model and evaluation."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from .det_data_sample import DetDataSample

__all__ = ["DetDataSample"]

"""Containers that data sets, models and metrics exchange."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from .det_data_sample import DetDataSample
from .driving_data_sample import DrivingDataSample
from .field_data_sample import FieldDataSample
from .two_view_data_sample import TwoViewDataSample

__all__ = ["DetDataSample", "DrivingDataSample", "FieldDataSample", "TwoViewDataSample"]

"""Containers that data sets, models and metrics exchange."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names
from visdet.train_extra import require_train_extra

require_train_extra(__name__)

if TYPE_CHECKING:
    from .data_samples import DetDataSample
    from .driving_data_sample import DrivingDataSample
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "DetDataSample": "data_samples",
            "DrivingDataSample": "driving_data_sample",
        },
    )

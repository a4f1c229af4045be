"""Containers that data sets, models and metrics exchange."""

from typing import TYPE_CHECKING

from visdet.lazy_names import lazy_names
from visdet.train_extra import require_train_extra

require_train_extra(__name__)

if TYPE_CHECKING:
    from .det_data_sample import DetDataSample
    from .driving_data_sample import DrivingDataSample
    from .field_data_sample import FieldDataSample
    from .two_view_data_sample import TwoViewDataSample
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "det_data_sample": ["DetDataSample"],
            "driving_data_sample": ["DrivingDataSample"],
            "field_data_sample": ["FieldDataSample"],
            "two_view_data_sample": ["TwoViewDataSample"],
        },
    )

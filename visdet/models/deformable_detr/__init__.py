"""Deformable DETR."""

from .deformable_detr import DeformableDETR
from .flat_pyramid import FlatPyramid, flatten_pyramid
from .head import DeformableDETRHead
from .transformer import (
    DeformableDetrTransformerDecoder,
    DeformableDetrTransformerDecoderLayer,
    DeformableDetrTransformerEncoder,
    DeformableDetrTransformerEncoderLayer,
)

__all__ = [
    "DeformableDETR",
    "DeformableDETRHead",
    "DeformableDetrTransformerDecoder",
    "DeformableDetrTransformerDecoderLayer",
    "DeformableDetrTransformerEncoder",
    "DeformableDetrTransformerEncoderLayer",
    "FlatPyramid",
    "flatten_pyramid",
]

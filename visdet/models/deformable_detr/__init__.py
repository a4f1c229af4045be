"""Deformable DETR."""

from .base import DeformableDetectionTransformer
from .decoder_start import DecoderStart, DenoisingQueries
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
    "DecoderStart",
    "DeformableDETR",
    "DeformableDETRHead",
    "DeformableDetectionTransformer",
    "DeformableDetrTransformerDecoder",
    "DeformableDetrTransformerDecoderLayer",
    "DeformableDetrTransformerEncoder",
    "DeformableDetrTransformerEncoderLayer",
    "DenoisingQueries",
    "FlatPyramid",
    "flatten_pyramid",
]

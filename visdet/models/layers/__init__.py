"""Layers shared by the detector families."""

from . import detection_ops  # noqa: F401  (registers)
from .builders import build_activation_layer, build_dropout
from .conv_module import ConvModule
from .feed_forward import FFN
from .fused_sample_attention import FusedSampleAttention
from .ms_deform_attn import MultiScaleDeformableAttention
from .multihead_attention import MultiheadAttention
from .normalization import build_norm_layer, norm_abbreviation
from .positional_encoding import SinePositionalEncoding, sine_embedding
from .precision import at_least_float32, in_full_precision
from .root_registration import register_in_root

__all__ = [
    "FFN",
    "ConvModule",
    "FusedSampleAttention",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "SinePositionalEncoding",
    "at_least_float32",
    "build_activation_layer",
    "build_dropout",
    "build_norm_layer",
    "in_full_precision",
    "norm_abbreviation",
    "register_in_root",
    "sine_embedding",
]

"""Operators: tensors in, tensors out, on CPU and CUDA. Needs torch alone."""

from ._library import NotBuiltError, build_info
from .deformable_aggregation import (
    deformable_aggregation,
    deformable_aggregation_function,
    deformable_aggregation_reference,
    feature_maps_format,
)
from .gaussian_field import gaussian_field, gaussian_field_reference
from .mahalanobis_distance import mahalanobis_distance, mahalanobis_distance_reference
from .ms_deform_attn import (
    ms_deform_attn,
    ms_deform_attn_fused,
    ms_deform_attn_fused_reference,
    ms_deform_attn_reference,
)
from .sample_dot import sample_dot, sample_dot_reference
from .sample_sum import sample_sum, sample_sum_reference

__all__ = [
    "NotBuiltError",
    "build_info",
    "deformable_aggregation",
    "deformable_aggregation_function",
    "deformable_aggregation_reference",
    "feature_maps_format",
    "gaussian_field",
    "gaussian_field_reference",
    "mahalanobis_distance",
    "mahalanobis_distance_reference",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "ms_deform_attn_fused_reference",
    "ms_deform_attn_reference",
    "sample_dot",
    "sample_dot_reference",
    "sample_sum",
    "sample_sum_reference",
]

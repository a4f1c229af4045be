"""SparseDrive: detection, tracking, vector map, motion and planning from cameras, and Sparse4D's detector."""

from .attention import MultiheadFlashAttention
from .deformable_feature_aggregation import DeformableFeatureAggregation
from .encoders import SparseBox3DEncoder, SparsePoint3DEncoder
from .ffn import AsymmetricFFN
from .key_points import SparseBox3DKeyPointsGenerator, SparsePoint3DKeyPointsGenerator
from .refinement import SparseBox3DRefinementModule, SparsePoint3DRefinementModule

__all__ = [
    "AsymmetricFFN",
    "DeformableFeatureAggregation",
    "MultiheadFlashAttention",
    "SparseBox3DEncoder",
    "SparseBox3DKeyPointsGenerator",
    "SparseBox3DRefinementModule",
    "SparsePoint3DEncoder",
    "SparsePoint3DKeyPointsGenerator",
    "SparsePoint3DRefinementModule",
]

"""SparseDrive: detection, tracking, vector map, motion and planning from cameras, and Sparse4D's detector."""

from .attention import MultiheadFlashAttention
from .box3d_target import SparseBox3DTarget
from .deformable_feature_aggregation import DeformableFeatureAggregation
from .encoders import SparseBox3DEncoder, SparsePoint3DEncoder
from .ffn import AsymmetricFFN
from .instance_bank import InstanceBank, InstanceBankState
from .key_points import SparseBox3DKeyPointsGenerator, SparsePoint3DKeyPointsGenerator
from .map_assigner import HungarianLinesAssigner, LinesL1Cost, MapQueriesCost
from .map_target import SparsePoint3DTarget
from .refinement import SparseBox3DRefinementModule, SparsePoint3DRefinementModule

__all__ = [
    "AsymmetricFFN",
    "DeformableFeatureAggregation",
    "HungarianLinesAssigner",
    "InstanceBank",
    "InstanceBankState",
    "LinesL1Cost",
    "MapQueriesCost",
    "MultiheadFlashAttention",
    "SparseBox3DEncoder",
    "SparseBox3DKeyPointsGenerator",
    "SparseBox3DRefinementModule",
    "SparseBox3DTarget",
    "SparsePoint3DEncoder",
    "SparsePoint3DKeyPointsGenerator",
    "SparsePoint3DRefinementModule",
    "SparsePoint3DTarget",
]

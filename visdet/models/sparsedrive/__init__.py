"""SparseDrive: detection, tracking, vector map, motion and planning from cameras, and Sparse4D's detector."""

from .attention import MultiheadFlashAttention
from .boxes.box3d_decoder import SparseBox3DDecoder
from .boxes.box3d_losses import SparseBox3DLoss
from .boxes.box3d_target import SparseBox3DTarget
from .deformable_feature_aggregation import DeformableFeatureAggregation
from .depth_net import DenseDepthNet
from .encoders import SparseBox3DEncoder, SparsePoint3DEncoder
from .ffn import AsymmetricFFN
from .grid_mask import GridMask
from .key_points import SparseBox3DKeyPointsGenerator, SparsePoint3DKeyPointsGenerator
from .map.lines_cost import HungarianLinesAssigner, LinesL1Cost, MapQueriesCost
from .map.lines_decoder import SparsePoint3DDecoder
from .map.lines_losses import LinesL1Loss, SparseLineLoss
from .map.lines_target import SparsePoint3DTarget
from .motion.motion_decoder import HierarchicalPlanningDecoder, SparseBox3DMotionDecoder
from .motion.motion_planning_head import MotionPlanningHead
from .motion.motion_target import MotionTarget, PlanningTarget
from .refinement import (
    MotionPlanningRefinementModule,
    SparseBox3DRefinementModule,
    SparsePoint3DRefinementModule,
)
from .sparse4d_head import Sparse4DHead, Sparse4DState
from .sparsedrive import Sparse4D, SparseDrive, TemporalState
from .sparsedrive_head import SparseDriveHead
from .temporal.instance_bank import InstanceBank, InstanceBankState
from .temporal.instance_queue import InstanceQueue, InstanceQueueState
from .temporal.plain_values import temporal_value

__all__ = [
    "AsymmetricFFN",
    "DeformableFeatureAggregation",
    "DenseDepthNet",
    "GridMask",
    "HierarchicalPlanningDecoder",
    "HungarianLinesAssigner",
    "InstanceBank",
    "InstanceBankState",
    "InstanceQueue",
    "InstanceQueueState",
    "LinesL1Cost",
    "LinesL1Loss",
    "MapQueriesCost",
    "MotionPlanningHead",
    "MotionPlanningRefinementModule",
    "MotionTarget",
    "MultiheadFlashAttention",
    "PlanningTarget",
    "Sparse4D",
    "Sparse4DHead",
    "Sparse4DState",
    "SparseBox3DDecoder",
    "SparseBox3DEncoder",
    "SparseBox3DKeyPointsGenerator",
    "SparseBox3DLoss",
    "SparseBox3DMotionDecoder",
    "SparseBox3DRefinementModule",
    "SparseBox3DTarget",
    "SparseDrive",
    "SparseDriveHead",
    "SparseLineLoss",
    "SparsePoint3DDecoder",
    "SparsePoint3DEncoder",
    "SparsePoint3DKeyPointsGenerator",
    "SparsePoint3DRefinementModule",
    "SparsePoint3DTarget",
    "TemporalState",
    "temporal_value",
]

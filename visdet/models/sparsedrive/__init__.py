"""SparseDrive: detection, tracking, vector map, motion and planning from cameras, and Sparse4D's detector."""

from .attention import MultiheadFlashAttention
from .encoders import SparseBox3DEncoder, SparsePoint3DEncoder
from .ffn import AsymmetricFFN
from .refinement import SparseBox3DRefinementModule, SparsePoint3DRefinementModule

__all__ = [
    "AsymmetricFFN",
    "MultiheadFlashAttention",
    "SparseBox3DEncoder",
    "SparseBox3DRefinementModule",
    "SparsePoint3DEncoder",
    "SparsePoint3DRefinementModule",
]

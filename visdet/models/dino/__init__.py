"""DINO."""

from .denoising import CdnQueryGenerator
from .dino import DINO, DINOHead
from .transformer import DinoTransformerDecoder

__all__ = ["DINO", "CdnQueryGenerator", "DINOHead", "DinoTransformerDecoder"]

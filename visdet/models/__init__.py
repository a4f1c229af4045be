"""Detectors and their parts. Importing this package registers them."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from . import sparsedrive
from .backbones import ResNet, SwinTransformer
from .base_detector import BaseDetector
from .data_preprocessor import DetDataPreprocessor, DrivingDataPreprocessor
from .deformable_detr import DeformableDETR, DeformableDETRHead
from .dino import DINO, CdnQueryGenerator, DINOHead, DinoTransformerDecoder
from .layers import FFN, ConvModule, MultiheadAttention, MultiScaleDeformableAttention, SinePositionalEncoding
from .losses import FocalLoss, GIoULoss, L1Loss
from .matching import BBoxL1Cost, ClassificationCost, FocalLossCost, HungarianAssigner, IoUCost
from .necks import ChannelMapper

__all__ = [
    "DINO",
    "FFN",
    "BBoxL1Cost",
    "BaseDetector",
    "CdnQueryGenerator",
    "ChannelMapper",
    "ClassificationCost",
    "ConvModule",
    "DINOHead",
    "DeformableDETR",
    "DeformableDETRHead",
    "DetDataPreprocessor",
    "DinoTransformerDecoder",
    "DrivingDataPreprocessor",
    "FocalLoss",
    "FocalLossCost",
    "GIoULoss",
    "HungarianAssigner",
    "IoUCost",
    "L1Loss",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "ResNet",
    "SinePositionalEncoding",
    "SwinTransformer",
    "sparsedrive",
]

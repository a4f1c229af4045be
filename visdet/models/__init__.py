"""Detectors and their parts. Importing this package registers them."""

from visdet.train_extra import require_train_extra

require_train_extra(__name__)

from . import sparsedrive
from .backbones import ResNet, SwinTransformer
from .base_detector import BaseDetector
from .box_coders import RotatedBoxCoder, UprightBoxCoder
from .data_preprocessor import DetDataPreprocessor, DrivingDataPreprocessor
from .deformable_detr import DeformableDETR, DeformableDETRHead
from .dino import DINO, CdnQueryGenerator, DINOHead, DinoTransformerDecoder
from .layers import FFN, ConvModule, MultiheadAttention, MultiScaleDeformableAttention, SinePositionalEncoding
from .losses import FocalLoss, GDLoss, GIoULoss, L1Loss, RotatedIoULoss, RotatedL1Loss
from .matching import (
    BBoxL1Cost,
    ClassificationCost,
    FocalLossCost,
    HungarianAssigner,
    IoUCost,
    RotatedBoxCost,
)
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
    "GDLoss",
    "GIoULoss",
    "HungarianAssigner",
    "IoUCost",
    "L1Loss",
    "MultiScaleDeformableAttention",
    "MultiheadAttention",
    "ResNet",
    "RotatedBoxCoder",
    "RotatedBoxCost",
    "RotatedIoULoss",
    "RotatedL1Loss",
    "SinePositionalEncoding",
    "SwinTransformer",
    "UprightBoxCoder",
    "sparsedrive",
]

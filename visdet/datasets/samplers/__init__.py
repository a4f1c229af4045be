"""Samplers, which choose the images of each batch."""

from .aspect_ratio_batch_sampler import AspectRatioBatchSampler
from .group_in_batch_sampler import GroupInBatchSampler, SceneSampler

__all__ = ["AspectRatioBatchSampler", "GroupInBatchSampler", "SceneSampler"]

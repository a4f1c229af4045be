"""Samplers, which choose the images of each batch."""

from .aspect_ratio_batch_sampler import AspectRatioBatchSampler
from .group_in_batch_sampler import GroupInBatchSampler, SceneSampler
from .planned_batch_sampler import PlannedBatchSampler

__all__ = ["AspectRatioBatchSampler", "GroupInBatchSampler", "PlannedBatchSampler", "SceneSampler"]

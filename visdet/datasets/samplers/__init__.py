"""Samplers, which choose the images of each batch."""

from .group_in_batch_sampler import GroupInBatchSampler, SceneSampler
from .planned_batch_sampler import AspectRatioBatchSampler, PlannedBatchSampler

__all__ = ["AspectRatioBatchSampler", "GroupInBatchSampler", "PlannedBatchSampler", "SceneSampler"]

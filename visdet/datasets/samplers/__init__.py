"""Which images make a batch."""

from .aspect_ratio_batch_sampler import AspectRatioBatchSampler

__all__ = ["AspectRatioBatchSampler"]

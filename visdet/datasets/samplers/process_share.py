"""Which share of the batches a process has, and the seed that all processes have in common."""

from typing import Any

from mmengine.dist import get_dist_info, sync_random_seed


def process_share(
    sampler: Any, rank: int | None, world_size: int | None, seed: int | None = None
) -> tuple[int, int, int]:
    """Return the rank, the number of processes and the seed of a batch sampler.

    Args:
        sampler: its ``seed`` is the default. If it has none, all processes agree on one.
        rank, world_size: those of the process group by default.
        seed: the seed, if it is given.
    """
    given_rank, given_world_size = get_dist_info()
    rank = given_rank if rank is None else rank
    world_size = given_world_size if world_size is None else world_size
    seed = getattr(sampler, "seed", None) if seed is None else seed
    return rank, world_size, int(sync_random_seed() if seed is None else seed)

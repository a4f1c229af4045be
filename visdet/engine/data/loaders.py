"""Data loaders by config, and what is wrong with their data before training reads them."""

from collections.abc import Sized
from functools import partial
from typing import Any

import torch
from mmengine.dist import all_gather_object
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from visdet.registry import DATASETS

from ..errors import ConfigError
from ..process.console import start_worker
from .data_workers import PATIENCE, explain_collation, report_lost_batches
from .one_block import collated_in_one_block


def build_dataloader(
    dataloader: DataLoader | dict, seed: int | None = None, diff_rank_seed: bool = False
) -> DataLoader:
    """Build a loader, whose workers leave the terminal to the training process.

    A worker that gives no batch within half an hour ends the run, unless the config has another ``timeout`` in seconds.
    If there is a GPU, batches are in pinned memory unless the config says ``pin_memory=False``.
    """
    if isinstance(dataloader, dict):
        given = dataloader.get
        dataset = given("dataset")
        # torch would warn without a GPU.
        pinned = torch.cuda.is_available() and given("pin_memory", True)
        patience = PATIENCE if given("num_workers") else 0
        dataloader = {"timeout": patience, **dataloader, "pin_memory": pinned}
        if isinstance(dataset, dict):
            dataset = DATASETS.build(dataset)  # mmengine's registry would not check its arguments.
            if hasattr(dataset, "full_init"):
                dataset.full_init()
            dataloader["dataset"] = dataset
    loader = Runner.build_dataloader(dataloader, seed, diff_rank_seed)
    loader.worker_init_fn = partial(start_worker, loader.worker_init_fn)
    report_lost_batches(loader)
    explain_collation(loader)
    if loader.pin_memory:
        # Each tensor is then copied to memory of its own. Otherwise, a small one would keep the block.
        loader.collate_fn = partial(collated_in_one_block, loader.collate_fn)
    return loader


def check_training_data(dataloader: Any, by_epoch: bool) -> None:
    """Refuse a training loader without a batch, or whose epochs do not end or are not equal in all processes.

    A loader may have no batch because it drops the only one, which is incomplete. Processes with fewer batches would
    leave the others waiting.

    Raises:
        ConfigError: see above. Every process raises it.
    """
    batches: Any = dataloader.batch_sampler
    endless = batches.endless_part
    dataset = dataloader.dataset
    count = len(batches)
    if by_epoch and endless is not None:
        raise ConfigError(
            f"train_dataloader: {type(endless).__name__} gives batches without end, so that the first epoch would "
            "never end. Use train_cfg=dict(by_epoch=False, max_iters=...), or a sampler whose epochs end, such as "
            "DefaultSampler"
        )
    check_there_are_samples(dataset, "train_dataloader")
    if count == 0:
        raise ConfigError(
            f"train_dataloader gives no batch: its data set has {len(dataset)} samples, "
            f"{type(batches.batch_sampler).__name__} makes batches of {batches.batch_size} and drops incomplete ones. "
            "Set batch_size to at most the number of samples of a process, or set drop_last=False"
        )
    lengths = all_gather_object(count) if by_epoch else []
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"train_dataloader: an epoch has {', '.join(map(str, lengths))} batches in the processes, but they must be "
            "equally many. Set train_dataloader.sampler.round_up=True"
        )


def check_evaluation_data(dataloader: Any, section: str) -> None:
    """Refuse data without a sample, and batches of several frames of a sampler that plays one scene after another.

    Raises:
        ConfigError: see above. Of several frames in a batch, the model would go on from each with frames of its own.
    """
    check_there_are_samples(dataloader.dataset, section)
    batch_size = getattr(dataloader, "batch_size", None)
    if getattr(dataloader.sampler, "batches_have_one", False) and batch_size not in (None, 1):
        raise ConfigError(
            f"{section}.batch_size must be 1 with {type(dataloader.sampler).__name__}, which plays the frames of a "
            f"scene one after another, got {batch_size}"
        )


def check_there_are_samples(dataset: Any, section: str) -> None:
    """Refuse a data set without a sample, such as one whose samples are all filtered out.

    Raises:
        ConfigError: the data set has no sample. The message names it.
    """
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ConfigError(
            f"{section}.dataset ({type(dataset).__name__}) has no samples. Look at its annotation file and at what "
            "leaves samples out (filter_cfg, indices, metainfo.classes)"
        )

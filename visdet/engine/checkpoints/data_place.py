"""The place in the data with which a run that is resumed goes on."""

from typing import Any

from torch.utils.data import BatchSampler


def go_on_in_data(runner: Any, path: str, meta: dict[str, Any]) -> None:
    """Find the batch of this run with which the data go on after the samples that the earlier run has read.

    No sample is left out where the order of the samples does not depend on the batches, as with samplers of torch and
    mmengine. Those that the earlier run read of a batch of this run are read again.
    """
    loop = runner.train_loop
    loader = runner.train_dataloader
    processes = runner.world_size
    held = meta.get
    now = len(loader)
    size = batch_size_of(loader)
    batches_of_run = loader.batch_sampler
    by_epoch = loop.by_epoch
    iteration = loop.iter
    epoch = loop.epoch
    is_endless = batches_of_run.endless_part is not None
    before = held("iterations_per_epoch") or now
    ahead = held("batches_ahead", 0)
    loop.batches_ahead = ahead
    size_before = held("batch_size", size)
    processes_before = held("processes", processes)
    images = size * processes
    images_before = size_before * processes_before
    if before == now and images_before == images:
        return
    drawn = iteration + ahead
    epochs = 0 if is_endless else epoch if by_epoch else drawn // before
    done = drawn - epochs * before
    read = done * images_before
    is_pass_over = done == before and not is_endless
    batches = now if is_pass_over else read // images
    batches = batches if is_endless else min(batches, now)
    again = 0 if is_pass_over else max(read - batches * images, 0)
    place = epochs * now + batches
    if by_epoch:
        loop.iter = place
    else:
        loop.batches_ahead = place - iteration
    is_in_order = isinstance(batches_of_run.batch_sampler, BatchSampler)
    others = (
        "none is left out" if is_in_order else "others may be left out, as batches do not follow their order"
    )
    runner.logger.warning(
        f"{path} comes from a run with {before} iterations per epoch, but this run has {now} (batches of "
        f"{size_before} x {processes_before} processes, now {size} x {processes}). It goes on after {epoch} "
        f"epochs and {batches if by_epoch else iteration} iterations. Of the {read} samples that "
        f"were read in this pass over the data, {again} are read again, and {others}"
    )


def batch_size_of(loader: Any) -> int:
    """Return the samples in a batch of a process, or 1 if the batch sampler does not say it."""
    return getattr(loader.batch_sampler, "batch_size", None) or 1

"""The size that each image of a data set will have, before it is read."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.dist import broadcast_object_list

from visdet.errors import InvalidInputError
from visdet.structures.planned_batch import BatchPlan, PlannedBatch, Size

from ..transforms.base import planned_size

_MOST_DRAWN = 20_000
_DRAWN_OF_EACH = 100  # at most


class PlannedImage(NamedTuple):
    """An image of an epoch.

    Attributes:
        item: its index in the data set. seed: that of its random numbers.
        size: the (height, width) that it will have. is_said: whether all transforms say what they do to the size.
    """

    item: int
    seed: int
    size: Size
    is_said: bool


class PlannedImages:
    """The images of a data set with the sizes that its transforms say.

    Args:
        dataset: its ``get_data_info`` returns ``width`` and ``height``. seed: that of all random numbers.

    Attributes:
        file_sizes: the (height, width) of each file. num_boxes: the number of boxes of each.

    Raises:
        ValueError: a record of the data set has no ``width`` and ``height``.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self.file_sizes: list[Size] = []
        self.num_boxes: list[int] = []
        for index in range(len(dataset)):
            record = dataset.get_data_info(index)
            if not {"height", "width"} <= record.keys():
                raise InvalidInputError(
                    f"PlannedBatchSampler: the records of {type(dataset).__name__} must have height and width, "
                    f"got {sorted(record)}"
                )
            self.file_sizes.append((int(record["height"]), int(record["width"])))
            self.num_boxes.append(len(record.get("instances", ())))

    def image(self, index: int, position: int, epoch: int) -> PlannedImage:
        """Return the image that comes at a position of the order of an epoch."""
        seed = (self._seed << 80) + ((epoch + 1) << 48) + position
        rng = random.Random(seed)
        size = self.file_sizes[index]
        is_said = True
        pipeline = _pipeline_of(self._dataset, index)
        for step in getattr(pipeline, "transforms", [pipeline]):
            planned = planned_size(step, size, rng)
            is_said &= planned is not None
            size = planned or size
        return PlannedImage(index, seed, size, is_said)

    def drawn(self) -> list[PlannedImage]:
        """Return images that stand for those of a run: a part of the data set, and each size of a file once."""
        count = len(self.file_sizes)
        indices = list(range(count))
        if count > _MOST_DRAWN:
            rng = random.Random(0)
            indices = [rng.randrange(count) for _ in range(_MOST_DRAWN)]
        rounds = -(-min(_MOST_DRAWN, _DRAWN_OF_EACH * count) // max(len(indices), 1))
        last_of_size = {size: index for index, size in enumerate(self.file_sizes)}
        indices = [*indices * rounds, *last_of_size.values()]
        return [self.image(index, position, epoch=-1) for position, index in enumerate(indices)]

    def read_sizes(self, images: Sequence[PlannedImage]) -> list[Size]:
        """Return the sizes of images that are read for this, which are those of the first process in every process."""
        sizes: list[Any] = [copy_context().run(self._read_sizes, images)]
        # What a transform of the user's draws may differ between processes.
        broadcast_object_list(sizes)
        return sizes[0]

    def _read_sizes(self, images: Sequence[PlannedImage]) -> list[Size]:
        batch = PlannedBatch([it.item for it in images], [it.seed for it in images], BatchPlan(None, ()))
        with _random_state_of_its_own():
            return [tuple(self._dataset[index]["inputs"].shape[-2:]) for index in batch]


def _pipeline_of(dataset: Any, index: int) -> Any:
    """Return the pipeline of an image, whose data set may stand in wrappers of mmengine's."""
    while not hasattr(dataset, "pipeline") and hasattr(dataset, "_get_ori_dataset_idx"):
        within = dataset._get_ori_dataset_idx(index)
        if isinstance(within, tuple):
            part, index = within
            dataset = dataset.datasets[part]
        else:
            index, dataset = within, dataset.dataset
    return getattr(dataset, "pipeline", None)


@contextmanager
def _random_state_of_its_own() -> Iterator[None]:
    """Let the block draw the same random numbers in every process, and no others afterwards."""
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002 (transforms may use it)
    with torch.random.fork_rng(devices=[]):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002

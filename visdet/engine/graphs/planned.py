"""What a run does before its first step: it tries the largest batch, and captures a step of each size."""

import copy
import logging
from time import perf_counter
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from visdet.errors import UserError
from visdet.structures.planned_batch import BatchPlan, Size, largest

from ..process.random_state import preserved_random_state
from .methods import GraphedLoss
from .steps import nothing_changes

_LOOKED_AT = 64  # images of which one with a box is imitated


class MemoryNotEnoughError(UserError):
    """The largest batch of a run does not fit into the memory of the GPU."""


def prepare_sizes(
    model: nn.Module,
    optim_wrapper: OptimWrapper,
    dataloader: Any,
    steps: GraphedLoss | None,
    logger: logging.Logger,
) -> None:
    """Try a training step of the largest batch, and capture one of each size, so that no later step needs more memory.

    The batches are imagined. Weights, buffers, gradients and random numbers stay as they are. Nothing is done without a
    GPU, or if the batch sampler does not know the sizes.

    Args:
        model: the model without its wrapper, in training mode.
        optim_wrapper: the optimizer's wrapper, under whose autocast steps run.
        dataloader: the loader of the training data.
        steps: what replays the training steps, or None.
        logger: gets a line about the sizes.

    Raises:
        MemoryNotEnoughError: the largest batch does not fit.
    """
    batches: Any = getattr(dataloader.batch_sampler, "batch_sampler", None)
    plan = getattr(batches, "plan", None)
    if plan is None or not plan.sizes or not next(model.parameters()).is_cuda:
        return
    begin = perf_counter()
    with preserved_random_state(), nothing_changes(model):
        dataset = dataloader.dataset
        samples = (dataset[index] for index in range(min(_LOOKED_AT, len(dataset))))
        # Without a box among the first images, nothing is imagined.
        example = next((s for s in samples if len(s["data_samples"].get("gt_instances", ()))), None)
        if example is None:
            return
        imagined = ImaginedBatches(model, optim_wrapper, dataloader.collate_fn, example, plan)
        imagined.try_largest(batches.batch_size)
        captured = 0
        if steps is not None:
            for number, size, boxes in shapes_of(batches, plan):
                with optim_wrapper.optim_context(steps.wrapper or model):
                    captured += steps.capture(**imagined.batch(number, size, boxes))
    sizes = ", ".join(f"{height} x {width}" for height, width in reversed(plan.sizes))
    logger.info(
        f"batches have {len(plan.sizes)} sizes (height x width): {sizes}. {captured} shapes of training steps were "
        f"captured in {perf_counter() - begin:.1f} s; {torch.cuda.memory_reserved() / 2**30:.1f} GiB of the GPU "
        "are reserved"
    )


def shapes_of(batches: Any, plan: BatchPlan) -> list[tuple[int, Size, tuple[int, ...]]]:
    """Return (number of images, size, numbers of boxes) of the batches of a run, the largest first."""
    full = batches.batch_size
    rest = batches.rest
    sizes = plan.sizes
    boxes = plan.boxes
    usual = boxes[:1]
    shapes = [(full, size, usual) for size in reversed(sizes)]
    if len(boxes) > 1:
        shapes.insert(0, (full, sizes[-1], boxes[1:]))
    if rest:
        shapes += [(rest, size, usual) for size in largest(sizes)]
    return shapes


class ImaginedBatches:
    """Batches of any size, whose images are black and have one box each.

    Args:
        model, optim_wrapper, plan: see ``prepare_sizes``. collate: joins samples. example: a sample with a box.
    """

    def __init__(
        self, model: Any, optim_wrapper: Any, collate: Any, example: dict[str, Any], plan: BatchPlan
    ) -> None:
        self.model = model
        self.optim_wrapper = optim_wrapper
        self.collate = collate
        self.plan = plan
        self.image: Tensor = example["inputs"]
        self.sample = sample = copy.deepcopy(example["data_samples"])
        truth = sample.gt_instances[:1]
        box_dim = truth.bboxes.shape[-1]
        truth.bboxes = torch.tensor([[1.0, 1.0, 9.0, 9.0, 0.0]])[:, :box_dim]
        sample.gt_instances = truth

    def batch(self, number: int, size: Size, boxes: tuple[int, ...]) -> dict[str, Any]:
        """Return the arguments of the model's ``loss`` for a batch.

        Args:
            number: the number of images. size: their (height, width). boxes: see ``BatchPlan``.
        """
        image = self.image
        plan = self.plan
        samples = []
        for _ in range(number):
            sample = copy.deepcopy(self.sample)
            sample.set_metainfo({"img_shape": size})
            samples.append({"inputs": image.new_zeros(*image.shape[:-2], *size), "data_samples": sample})
        data = self.collate(samples)
        BatchPlan(size, plan.sizes, plan.filled, boxes).write(data["data_samples"], size)
        return self.model.data_preprocessor(data, training=True)

    def fits(self, number: int, size: Size) -> bool:
        """Return whether the memory suffices for an eager training step of a batch, which changes nothing."""
        model = self.model
        try:
            data = self.batch(number, size, self.plan.boxes[-1:])
            with self.optim_wrapper.optim_context(model):
                total, _ = model.parse_losses(model(**data, mode="loss"))
            learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(total, learning, allow_unused=True)
        except torch.OutOfMemoryError:
            return False
        return True

    def try_largest(self, number: int) -> None:
        """Raise MemoryNotEnoughError if the memory does not suffice for the largest batch."""
        height, width = self.plan.sizes[-1]
        if self.fits(number, (height, width)):
            return
        held = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30
        raise MemoryNotEnoughError(
            f"a training step of {number} images of {height} x {width} (height x width), the largest of the run, does "
            f"not fit into the {held:.0f} GiB of the GPU. Lower train_dataloader.batch_size or the scales of the "
            "pipeline's Resize, or set with_cp=True in parts of the model, which takes less memory and more time"
        )

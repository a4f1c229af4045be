"""The contract between mmengine's loops and a detector."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement
from torch import Tensor

from visdet.errors import InvalidInputError, InvalidTypeError, check_choice
from visdet.registry import MODELS, built
from visdet.structures import DetDataSample


def image_sizes(inputs: Tensor, data_samples: Sequence[DetDataSample] | None) -> list[tuple[int, int]]:
    """Return the (height, width) in pixels of each image without its padding.

    It is the ``img_shape`` of the sample, or the size of the batch if there is none.

    Args:
        inputs: [B, ..., H, W].
        data_samples: the samples of the B images, or None.

    Raises:
        ValueError: there are more or fewer samples than images, or an ``img_shape`` does not fit into the batch.
    """
    count = len(inputs)
    batch_height, batch_width = inputs.shape[-2:]
    if data_samples is None:
        return [(batch_height, batch_width)] * count
    if len(data_samples) != count:
        raise ValueError(f"data_samples must be one per image: got {len(data_samples)} for {count} images")
    sizes = []
    for index, sample in enumerate(data_samples):
        height, width = (int(n) for n in sample.metainfo.get("img_shape", (batch_height, batch_width))[:2])
        if not (0 < height <= batch_height and 0 < width <= batch_width):
            raise InvalidInputError(
                f"data_samples[{index}].img_shape must be a (height, width) within the batch's "
                f"({batch_height}, {batch_width}), got ({height}, {width})"
            )
        sizes.append((height, width))
    return sizes


def scale_factors(data_samples: Sequence[DetDataSample]) -> list[tuple[float, float]]:
    """Return the factors by which the (width, height) of each image was multiplied, 1 if its sample does not say."""
    return [tuple(sample.metainfo.get("scale_factor", (1.0, 1.0))[:2]) for sample in data_samples]


class BaseDetector(BaseModel, ABC):
    """The base class of all detectors, which mmengine's Runner can train, validate and test.

    docs/contract.md describes the contract. A subclass sets the shape of its inputs and the class of its samples, and
    implements each of the three modes as a method.

    Args:
        data_preprocessor: config or module that turns collated samples into a batch.
        init_cfg: mmengine's initialisation.
    """

    input_shape: ClassVar[tuple[str, ...]] = ("B", "3", "H", "W")
    sample_type: ClassVar[type[BaseDataElement]] = DetDataSample

    def __init__(
        self,
        data_preprocessor: dict[str, Any] | torch.nn.Module | None = None,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        # It is built from this scope, whatever the default is.
        data_preprocessor = built(data_preprocessor, MODELS)
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)

    def forward(
        self,
        inputs: Tensor,
        data_samples: Sequence[BaseDataElement] | None = None,
        mode: str | Callable[[Tensor, Sequence[Any]], Any] = "tensor",
    ) -> Any:
        """Run the model on a batch that ``data_preprocessor`` has prepared.

        Args:
            inputs: a tensor of ``input_shape``. By default that is [B, 3, H, W], normalised images that are padded at
                the bottom and on the right.
            data_samples: one ``sample_type`` per input, with the meta information that the model needs. Mode 'loss'
                also needs the ground truth.
            mode: 'loss' returns {name: scalar}, 'predict' returns the samples with the predictions filled in, and
                'tensor' returns the raw outputs. It may also be a function of the inputs and the samples, which is
                called instead, so that a wrapper such as DistributedDataParallel sees a call of the stages.

        Raises:
            TypeError: the inputs are not a tensor with the axes of ``input_shape``.
            ValueError: the mode is unknown, or it is 'loss' and there are no samples.
        """
        name = type(self).__name__
        if not isinstance(inputs, Tensor) or inputs.dim() != len(self.input_shape):
            got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            raise InvalidTypeError(
                f"{name}: inputs must be a [{', '.join(self.input_shape)}] tensor, got {got}. "
                "Call model.data_preprocessor on raw samples first"
            )
        if callable(mode):
            return mode(inputs, data_samples or [])
        if mode == "tensor":
            return self.raw_outputs(inputs, data_samples)
        if mode == "predict":
            return self.predict(inputs, data_samples or [self.sample_type() for _ in inputs])
        check_choice(f"{name}: mode", mode, ("tensor", "predict", "loss"))
        if data_samples is None:
            raise ValueError(f"{name}: mode 'loss' needs data_samples with the ground truth")
        return self.loss(inputs, data_samples)

    def parse_losses(self, losses: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses, and a dict for the log with that sum followed by all losses.

        Only losses with 'loss' in their names are summed, as in mmengine. If all losses are scalars, this takes three
        kernels in total, where mmengine launches several for each loss.
        """
        if not all(isinstance(loss, Tensor) and loss.dim() == 0 for loss in losses.values()):
            return super().parse_losses(losses)
        values = torch.stack(list(losses.values()))
        parts = [loss for name, loss in losses.items() if "loss" in name]
        total = (values if len(parts) == len(losses) else torch.stack(parts)).sum()
        # The log keeps detached tensors, so that it does not keep the autograd graph of the step.
        return total, {"loss": total.detach(), **dict(zip(losses, values.detach().unbind(), strict=True))}

    def _dump_init_info(self) -> None:
        """Keep mmengine from logging two lines for every parameter it initialises."""

    @abstractmethod
    def loss(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the losses by name."""

    @abstractmethod
    def predict(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with predictions filled in."""

    @abstractmethod
    def raw_outputs(self, inputs: Tensor, data_samples: Sequence[Any] | None) -> Any:
        """Return what the model computes, before any post-processing."""

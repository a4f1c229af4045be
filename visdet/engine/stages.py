"""A model run by its stages, eager or by graphs, and what it remembers from one batch to the next."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from visdet.execution.staged_detector import has_stages

from .optim.optim_wrapper import OptimWrapper
from .optim.wrappers import unwrapped

Run = Callable[[Tensor, Sequence[Any], Any], tuple[Any, Any]]


class StagedModel:
    """A model run by its stages. It keeps what a temporal model remembers from one batch to the next.

    A model without stages is run by its own ``train_step``, ``val_step`` and ``test_step``, as mmengine does.

    Args:
        model: the model or its wrapper.
        graphs: functions of a batch and the state that replace the stages of 'loss' and 'predict', such as
            :class:`GraphedLoss` and :class:`GraphedPrediction`.

    Attributes:
        state: what the model remembers of the batches so far. It is None at first, and for a model without memory.
    """

    def __init__(self, model: nn.Module, graphs: Mapping[str, Run] | None = None) -> None:
        self.model: Any = model
        self.graphs = dict(graphs or {})
        self.state: Any = None

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Update the weights by a collated batch, and return the losses, and the norm of the gradients, for the log."""
        model = self.model
        module = unwrapped(model)
        if not has_stages(module, "loss"):
            log = model.train_step(data, optim_wrapper=optim_wrapper)
        else:
            with optim_wrapper.optim_context(model):
                # A wrapper, such as DistributedDataParallel, must see the call.
                losses = model(**module.data_preprocessor(data, True), mode=self.losses)
            total, log = module.parse_losses(losses)
            optim_wrapper.update_params(total)
        return log | optim_wrapper.take_grad_norm() if isinstance(optim_wrapper, OptimWrapper) else log

    def test_step(self, data: Any, step: str = "test_step") -> list[Any]:
        """Return the predictions for a collated batch. ``step`` is what a model without stages is asked."""
        module = unwrapped(self.model)
        if not has_stages(module, "predict"):
            return getattr(self.model, step)(data)
        return module(**module.data_preprocessor(data, False), mode=self.predictions)

    def losses(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the losses of a prepared batch by name."""
        run = self.graphs.get("loss") or unwrapped(self.model).losses_and_state
        losses, self.state = run(inputs, data_samples, self.state)
        return losses

    def predictions(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples of a prepared batch with predictions filled in."""
        run = self.graphs.get("predict") or unwrapped(self.model).predictions_and_state
        samples, self.state = run(inputs, data_samples, self.state)
        return samples

"""A model run by its stages, eager or by graphs, and what it remembers from one batch to the next."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .optim.optim_wrapper import OptimWrapper
from .optim.wrappers import unwrapped, wrappers_of

TRAINING = ("training_batch", "predictions_and_costs", "assign", "losses")
PREDICTION = ("prediction_batch", "detections", "with_detections")
# The methods by which mmengine calls a model, from the inside to the outside.
_CALLERS = {
    "loss": ("loss", "forward", "train_step"),
    "predict": ("predict", "forward", "val_step", "test_step"),
}

Run = Callable[[Tensor, Sequence[Any], Any], tuple[Any, Any]]


def losses_by_stages(
    model: Any, inputs: Tensor, data_samples: Sequence[Any], state: Any
) -> tuple[dict[str, Tensor], Any]:
    """Return the losses of a batch, and what the model remembers after it, given what it remembered before."""
    batch = model.training_batch(inputs, data_samples, *memory_for(model, state))
    predictions, outputs = model.predictions_and_costs(batch)
    losses = model.losses(predictions, batch, model.assign(outputs, batch))
    return losses, state_after(model, outputs, batch)


def predictions_by_stages(
    model: Any, inputs: Tensor, data_samples: Sequence[Any], state: Any
) -> tuple[list[Any], Any]:
    """Return the samples with predictions, and what the model remembers after them."""
    batch = model.prediction_batch(inputs, data_samples, *memory_for(model, state))
    detections = model.detections(batch)
    return model.with_detections(detections, data_samples), state_after(model, detections, batch)


def memory_for(model: Any, state: Any) -> tuple[Any, ...]:
    """Return the further arguments of the first stage, which a temporal model has."""
    return (state,) if hasattr(model, "state_after") else ()


def state_after(model: Any, outputs: Any, batch: Any) -> Any:
    """Return what a temporal model remembers after a batch, and None for any other model."""
    return model.state_after(outputs, batch) if hasattr(model, "state_after") else None


def has_stages(model: Any, method: str) -> bool:
    """Return whether the stages compute what a method of a model does.

    They may not if a subclass of the model that defines them, or the model itself, has a method of its own, or if it
    has another ``forward`` or ``train_step``.

    Args:
        model: the model. method: 'loss' or 'predict'.
    """
    kind: Any = type(model)
    return _is_class_of_stages(kind, method) and not vars(model).keys() & set(_CALLERS[method])


@functools.cache
def _is_class_of_stages(kind: Any, method: str) -> bool:
    places = {name: n for n, owner in reversed(list(enumerate(kind.__mro__))) for name in vars(owner)}
    stages = TRAINING if method == "loss" else PREDICTION
    if not places.keys() >= {method, *stages}:
        return False
    order = [
        max(places[name] for name in stages),
        *(places[name] for name in _CALLERS[method] if name in places),
    ]
    return order == sorted(order)


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
        module = unwrapped(self.model)
        if not has_stages(module, "loss"):
            log = self.model.train_step(data, optim_wrapper=optim_wrapper)
        else:
            with optim_wrapper.optim_context(self.model):
                # A wrapper, such as DistributedDataParallel, must see the call.
                losses = self.model(**module.data_preprocessor(data, True), mode=self.losses)
            total, log = module.parse_losses(losses)
            optim_wrapper.update_params(total)
        own = [
            wrapper for wrapper in wrappers_of(optim_wrapper).values() if isinstance(wrapper, OptimWrapper)
        ]
        return {**log, **{name: norm for wrapper in own for name, norm in wrapper.take_grad_norm().items()}}

    def test_step(self, data: Any, step: str = "test_step") -> list[Any]:
        """Return the predictions for a collated batch. ``step`` is what a model without stages is asked."""
        module = unwrapped(self.model)
        if not has_stages(module, "predict"):
            return getattr(self.model, step)(data)
        return module(**module.data_preprocessor(data, False), mode=self.predictions)

    def losses(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the losses of a prepared batch by name."""
        run = self.graphs.get("loss") or functools.partial(losses_by_stages, unwrapped(self.model))
        losses, self.state = run(inputs, data_samples, self.state)
        return losses

    def predictions(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples of a prepared batch with predictions filled in."""
        run = self.graphs.get("predict") or functools.partial(predictions_by_stages, unwrapped(self.model))
        samples, self.state = run(inputs, data_samples, self.state)
        return samples

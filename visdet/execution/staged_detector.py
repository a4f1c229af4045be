"""Detectors whose training step and prediction consist of stages, which the engine may replay as CUDA graphs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

Losses = dict[str, Tensor]

# The methods by which mmengine asks a model for its losses and for its predictions.
_CALLERS = {
    "loss": {"loss", "forward", "train_step"},
    "predict": {"predict", "forward", "val_step", "test_step"},
}


class StagedDetector(ABC):
    """A detector that computes its losses and its predictions in stages.

    A class derives from this one first and from ``BaseDetector`` second, and defines the stages. Their order is written
    here alone. Only ``training_batch``, ``prediction_batch``, ``check`` and ``with_detections`` may work on
    the host. ``assign`` may, too, but then a training step takes the host longer. A subclass with a ``loss``, a
    ``predict`` or a ``forward`` of its own is run by that, without graphs.
    """

    methods_of_its_own: ClassVar[frozenset[str]] = frozenset()  # of 'loss' and 'predict'

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = {method for method, callers in _CALLERS.items() if callers & vars(cls).keys()}
        cls.methods_of_its_own = cls.methods_of_its_own | own

    # ------------------------------------------------------------------ the stages of a training step

    @abstractmethod
    def training_batch(self, inputs: Tensor, data_samples: Sequence[Any]) -> Any:
        """Return inputs and ground truth as a tree of tensors. What the device does not read is ``ON_HOST``."""

    @abstractmethod
    def predictions_and_costs(self, batch: Any) -> tuple[Any, Any]:
        """Return the arguments of ``losses`` and of ``assign``. All work runs on the device."""

    @abstractmethod
    def assign(self, outputs: Any, batch: Any) -> Any:
        """Return what each prediction has to learn, as a tree of tensors. It may exchange numbers with processes."""

    @abstractmethod
    def losses(self, predictions: Any, batch: Any, assignment: Any) -> Losses:
        """Return the losses by name. All work runs on the device."""

    def check(self, batch: Any) -> None:  # noqa: B027
        """Raise an error if the batch cannot be trained on. The device computes the losses meanwhile."""

    # ------------------------------------------------------------------ the stages of a prediction

    @abstractmethod
    def prediction_batch(self, inputs: Tensor, data_samples: Sequence[Any]) -> Any:
        """Return the inputs and what is known of them as a tree of tensors."""

    @abstractmethod
    def detections(self, batch: Any) -> Any:
        """Return the results as a tree of tensors. All work runs on the device."""

    @abstractmethod
    def with_detections(self, detections: Any, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples with the results filled in."""

    # ------------------------------------------------------------------ what a temporal detector has besides

    def next_training_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> Any:
        """Return the training batch, given what the detector remembers of the batches before."""
        return self.training_batch(inputs, data_samples)

    def next_prediction_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> Any:
        """Return the prediction batch, given what the detector remembers of the batches before."""
        return self.prediction_batch(inputs, data_samples)

    def state_after(self, outputs: Any, batch: Any) -> Any:
        """Return what the detector remembers, given what ``assign`` is given or what ``detections`` returned."""
        return None

    def unlinked(self, samples: list[Any]) -> list[Any]:
        """Return the samples of a batch that follows on none, without what links them to other batches."""
        return samples

    # ------------------------------------------------------------------ the order of the stages

    def loss(self, inputs: Tensor, data_samples: Sequence[Any]) -> Losses:
        """Return the losses of a batch that follows on none by name."""
        return self.losses_and_state(inputs, data_samples, None)[0]

    def predict(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        """Return the samples of a batch that follows on none, with predictions filled in."""
        return self.unlinked(self.predictions_and_state(inputs, data_samples, None)[0])

    def losses_and_state(
        self,
        inputs: Tensor,
        data_samples: Sequence[Any],
        state: Any,
        compute: Callable[[Any], tuple[Losses, Any]] | None = None,
    ) -> tuple[Losses, Any]:
        """Return the losses of a batch by name, and what the detector remembers after it.

        Args:
            inputs, data_samples: the batch, which ``data_preprocessor`` has prepared.
            state: what the detector remembers of the batches before, or None.
            compute: does what ``computed_losses`` and ``state_after`` do, such as by replaying graphs.
        """
        batch = self.next_training_batch(inputs, data_samples, state)
        if compute is None:
            losses, outputs = self.computed_losses(batch)
            state = self.state_after(outputs, batch)
        else:
            losses, state = compute(batch)
        self.check(batch)
        return losses, state

    def computed_losses(
        self, batch: Any, assign: Callable[[Any, Any], Any] | None = None
    ) -> tuple[Losses, Any]:
        """Return the losses of a training batch by name, and the outputs of which ``state_after`` makes the state.

        Args:
            batch: the result of ``training_batch``. assign: a function that takes the place of ``assign``.
        """
        predictions, outputs = self.predictions_and_costs(batch)
        assignment = (assign or self.assign)(outputs, batch)
        return self.losses(predictions, batch, assignment), outputs

    def predictions_and_state(
        self, inputs: Tensor, data_samples: Sequence[Any], state: Any
    ) -> tuple[list[Any], Any]:
        """Return the samples with predictions, and what the detector remembers after them."""
        batch = self.next_prediction_batch(inputs, data_samples, state)
        detections = self.detections(batch)
        return self.with_detections(detections, data_samples), self.state_after(detections, batch)


class TemporalDetector(StagedDetector):
    """A detector that remembers something from one batch to the next.

    The state is an argument of the first stages and the result of ``state_after``. The detector itself keeps nothing.
    """

    @abstractmethod
    def training_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any = None) -> Any:
        """Return inputs, ground truth and state as a tree of tensors."""

    @abstractmethod
    def prediction_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any = None) -> Any:
        """Return inputs and state as a tree of tensors."""

    @abstractmethod
    def state_after(self, outputs: Any, batch: Any) -> Any:
        """Return what the detector remembers, given what ``assign`` is given or what ``detections`` returned."""

    @abstractmethod
    def plain_state(self, state: Any) -> Any:
        """Return a state as plain types, for a checkpoint."""

    @abstractmethod
    def state_of_plain(self, plain: Any) -> Any:
        """Return the state that ``plain_state`` was given."""

    def next_training_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> Any:
        return self.training_batch(inputs, data_samples, state)

    def next_prediction_batch(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> Any:
        return self.prediction_batch(inputs, data_samples, state)


def has_stages(model: Any, method: str) -> bool:
    """Return whether the stages compute what a method of a model does, so that they may be run instead of it.

    Args:
        model: the model. method: 'loss' or 'predict'.
    """
    if not isinstance(model, StagedDetector):
        return False
    return method not in model.methods_of_its_own and not vars(model).keys() & _CALLERS[method]

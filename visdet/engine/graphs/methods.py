"""Training steps and predictions replayed as CUDA graphs, so that the GPU does not wait for Python."""

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from visdet.execution.staged_detector import has_stages
from visdet.execution.tensor_tree import layout_of, map_tensors

from ..first_hook import first_hook
from ..optim.averages import ExponentialMovingAverage
from ..optim.gradients import Gradients
from ..optim.optim_wrapper import OptimWrapper
from ..optim.wrappers import unwrapped
from .averages import GraphedAverage
from .memory import GraphMemory, counts_in_words, note_owner, why_not_captured
from .steps import GraphedDetections, GraphedFeatures, GraphedStep
from .updates import GraphedUpdate

_LEARNS = attrgetter("requires_grad")


def graphs_for(config: Mapping[str, Any], model: nn.Module, logger: logging.Logger) -> dict[str, Any]:
    """Return what CUDA graphs replay of a model, by the names of its methods. Without a GPU, that is nothing.

    If training steps are replayed, ``update`` replays the updates and ``average`` an average of the weights (see
    :func:`share_gradients` and :func:`replay_average`).

    In a run of several processes, each process replays its own graphs. The processes exchange gradients outside the
    graphs, as ``DistributedDataParallel`` does. With another wrapper of models or ``SyncBatchNorm``, training is eager.

    Args:
        config: the config of the run.
        model: the model or its wrapper.
        logger: the logger that gets a line about each capture, and about what cannot be replayed.
    """
    if not config.get("graph", True) or not torch.cuda.is_available():
        return {}
    say = logger.info
    module = unwrapped(model)
    graphs: dict[str, Any] = {}
    if has_stages(module, "loss"):
        if obstacle := _obstacle_to_steps(model):
            say(f"graph: training steps run eagerly, because {obstacle}")
        else:
            graphs["loss"] = losses = GraphedLoss(module, say=say)
            losses.wrapper = None if model is module else model
            graphs["update"] = GraphedUpdate(say=say)
            graphs["average"] = GraphedAverage(say=say)
    if has_stages(module, "predict"):
        graphs["predict"] = GraphedPrediction(module, say=say)
    return graphs


def _obstacle_to_steps(model: nn.Module) -> str:
    """Return why the training steps of a model or its wrapper cannot be graphs, or "" if nothing speaks against it."""
    if not is_model_wrapper(model):
        return ""
    if not isinstance(model, DistributedDataParallel):
        return f"graphs need the whole model in each process, but {type(model).__name__} may split it"
    if any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
        return "SyncBatchNorm exchanges statistics within the forward pass"
    return ""


def share_gradients(graphs: Mapping[str, Any], optim_wrapper: Any) -> None:
    """Let graphs write gradients where an optimizer's wrapper of visdet expects them, and replay its updates."""
    if isinstance(optim_wrapper, OptimWrapper) and "update" in graphs:
        graphs["loss"].gradients = optim_wrapper.gradients
        optim_wrapper.replay = graphs["update"]


def replay_average(graphs: Mapping[str, Any], hooks: Iterable[Hook]) -> None:
    """Let a graph replay visdet's average of the weights, which the first ``EMAHook`` keeps."""
    replay = graphs.get("average")
    hook = first_hook(hooks, EMAHook)
    if replay is None or hook is None:
        return
    average = hook.ema_model
    if type(average) is ExponentialMovingAverage:
        average.replay = replay
    else:
        replay.tell(f"{type(average).__name__} may do more than visdet's average")


class GraphedMethod(ABC):
    """A method of a detector that is computed by CUDA graphs for batches of captured shapes.

    A shape runs eagerly the first time and is captured the second time, unless ``capture`` has done so before. If as
    many shapes as are kept have been captured, further ones run eagerly, except that graphs of a model in another
    state, such as with other weights that learn, are replaced. After a capture that fails, all batches run eagerly.
    ``report`` counts the batches.

    Args:
        model: the detector, which is a ``StagedDetector``. Its parameters and buffers may change
            their values and places, but must stay the same objects, because a search takes milliseconds.
        max_shapes: number of shapes whose graphs are kept. All graphs share one pool of memory.
        say: a function that is called with a text about each capture or failure.
    """

    method: ClassVar[str]  # the name of the method whose stages are replayed
    eager: ClassVar[str]  # the name of the method by which the model itself runs the stages
    learns: ClassVar[bool]  # whether it serves calls with gradients or those without

    def __init__(self, model: Any, max_shapes: int, say: Callable[[str], Any]) -> None:
        self.model = model
        self.max_shapes = max_shapes
        self._say = say
        self._graphs: dict[Any, Any] = {}
        self._examples: dict[Hashable, Any] = {}  # the examples of the shapes that have run eagerly
        self._has_failed = False
        self._has_met_shape = False  # whether the batch of a new shape has run eagerly since the last replay
        self._memory: GraphMemory | None = None
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self.counts: Counter[str] = Counter()
        note_owner(self)

    def __call__(self, inputs: Tensor, data_samples: Sequence[Any], state: Any = None) -> tuple[Any, Any]:
        """Return the result of the stages, and what the model remembers, given what it remembered before."""
        if inputs.is_cuda and torch.is_grad_enabled() == self.learns:
            with torch.cuda.device(inputs.device):
                return self._run(inputs, data_samples, state)
        self.counts["without a GPU"] += 1
        return getattr(self.model, self.eager)(inputs, data_samples, state)

    def report(self) -> str:
        """Return how many batches were replayed, how many were not and why, and the memory of the graphs."""
        memory = self._memory
        graphs = self._graphs
        held = 0 if memory is None else memory.reserved_bytes()
        shapes = f"{len(graphs)} shapes hold {held / 2**20:.0f} MiB"
        if any(getattr(graph, "keeps_activations", False) for graph in graphs.values()):
            shapes += ", activations included that the config would compute again (with_cp, num_cp)"
        return f"graphs of {self.method}: {counts_in_words(self.counts, 'batches')}; {shapes}"

    @abstractmethod
    def _run(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> tuple[Any, Any]:
        """Return the result and the state, which ``_compute`` computes."""

    @abstractmethod
    def _compute_eagerly(self, batch: Any) -> tuple[Any, Any]:
        """Return what the graphs compute, and the example of it that ``_new_step`` needs."""

    @abstractmethod
    def _new_step(self, batch: Any, example: Any, memory: Any) -> Any:
        """Return a step for one shape. Its ``capture`` records the graphs, and a call replays them."""

    def _compute(self, batch: Any, key: Hashable, *begun: Any) -> Any:
        """Return the first result of ``_compute_eagerly``, by graphs if the shape was captured or can be captured.

        Args:
            batch: the batch. key: its layout and the result of ``_key_of_model``.
            begun: what the step of a captured shape gets besides the batch.
        """
        graphs = self._graphs
        counts = self.counts
        if key in graphs:
            counts["replayed"] += 1
            if self._has_met_shape and self.learns:
                # What the eager step reserved is not needed again, and may be as much as the graphs hold.
                torch.cuda.empty_cache()
                self._has_met_shape = False
            return graphs[key](batch, *begun)
        if self._has_failed:
            reason = "after a failed capture"
        elif key not in self._examples:
            reason = "of a new shape"
            self._has_met_shape = True
        elif not self._has_room(key):
            reason = "of more shapes than are kept"
        elif self._capture(key, batch):
            counts["replayed"] += 1
            self._say(f"{self.report()}; captured batches of {_shape_of(batch)}")
            return graphs[key](batch)  # The capture may have overwritten what has begun.
        else:
            reason = "after a failed capture"
        counts[reason] += 1
        result, self._examples[key] = self._compute_eagerly(batch)
        return result

    def _has_room(self, key: Any) -> bool:
        """Return whether another shape may be captured. One of a model in another state is forgotten for it."""
        graphs = self._graphs
        if len(graphs) < self.max_shapes:
            return True
        other = next((kept for kept in graphs if kept[1:] != key[1:]), None)
        if other is None:
            return False
        del graphs[other], self._examples[other]
        return True

    def _capture(self, key: Hashable, batch: Any) -> bool:
        """Return whether the graphs for a batch could be captured. Otherwise, all that was computed is freed."""
        self._memory = self._memory or GraphMemory()
        torch.cuda.empty_cache()  # Its trial reserves memory on another stream.
        try:
            step = self._new_step(batch, self._examples[key], self._memory)
        except RuntimeError as error:  # The memory does not suffice.
            reason: str | None = str(error)  # The error itself holds all that the step has computed.
        else:
            reason = why_not_captured(step.capture)
            if reason is None:
                self._graphs[key] = step
                return True
            del step
        self.forget_graphs()
        self._has_failed = True
        self._say(
            f"graphs of {self.method}: a batch of {_shape_of(batch)} cannot be captured, so that all batches run "
            f"eagerly: {reason}"
        )
        return False

    def forget_graphs(self) -> None:
        """Forget the graphs and their pool."""
        self._graphs.clear()
        self._memory = None

    def _key_of_model(self) -> tuple[Hashable, ...]:
        """Return all that a captured graph depends on besides the batch: modes, and the addresses of the weights."""
        places = hash((*map(Tensor.data_ptr, self._parameters), *map(Tensor.data_ptr, self._buffers)))
        learning = hash(tuple(map(_LEARNS, self._parameters))) if torch.is_grad_enabled() else None
        return places, learning, self._modes()

    def _modes(self) -> Hashable:
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        return autocast, self.model.training, deterministic, torch.is_inference_mode_enabled()


class GraphedLoss(GraphedMethod):
    """The losses of a detector, computed by CUDA graphs.

    A step has two graphs: one for the losses, which ``computed_losses`` returns, and in ``backward`` one for all
    gradients. If ``assign`` waits for the device, reads the host or exchanges numbers with other processes, it is
    called between two graphs for the losses.
    The losses are an ordinary node of the autograd graph, whose backward pass adds the gradients of all parameters to
    ``parameter.grad``. Gradient accumulation, loss scaling, clipping and the optimizer therefore work as without
    graphs. Parameters with hooks, and those that ``DistributedDataParallel`` averages, get theirs from autograd. Random
    numbers, including dropout's, are the same as in eager steps.

    Attributes:
        gradients: where the gradients lie. wrapper: the wrapper of the model, or None.
    """

    method = "loss"
    eager = "losses_and_state"
    learns = True

    # The shapes are those that are captured when a run of planned batches begins, and some others.
    def __init__(self, model: Any, max_shapes: int = 24, say: Callable[[str], Any] = print) -> None:
        super().__init__(model, max_shapes, say)
        self.gradients = Gradients()
        self.wrapper: Any = None

    def _run(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> tuple[dict[str, Tensor], Any]:
        return self.model.losses_and_state(inputs, data_samples, state, self._losses_and_state)

    def _losses_and_state(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        return self._compute(batch, (layout_of(batch), self._key_of_model()))

    def capture(self, inputs: Tensor, data_samples: Sequence[Any]) -> bool:
        """Capture the graphs for batches of this shape, and return whether there are some. Nothing else changes.

        All processes must call this for the same shapes in the same order.
        """
        with torch.cuda.device(inputs.device):
            batch = self.model.next_training_batch(inputs, data_samples, None)
            key = layout_of(batch), self._key_of_model()
            if key not in self._graphs and not self._has_failed and self._has_room(key):
                self._examples[key] = None
                self._capture(key, batch)
        return key in self._graphs

    def _compute_eagerly(self, batch: Any) -> tuple[tuple[dict[str, Tensor], Any], Any]:
        model = self.model
        example: list[Any] = []

        def assign(outputs: Any, batch: Any) -> Any:
            assignment = model.assign(outputs, batch)
            example.append(map_tensors(_on_meta_device, assignment))
            return assignment

        losses, outputs = model.computed_losses(batch, assign)
        return (losses, model.state_after(outputs, batch)), example[0]

    def _new_step(self, batch: Any, example: Any, memory: Any) -> GraphedStep:
        return GraphedStep(self.model, batch, example, memory, self.gradients, self._handed_on())

    def _handed_on(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients must come from autograd, because hooks wait for them."""
        wrapper = self.wrapper
        parameters = self._parameters
        if wrapper is not None and wrapper.require_backward_grad_sync:
            return parameters
        return [
            parameter
            for parameter in parameters
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        ]

    def _key_of_model(self) -> tuple[Hashable, ...]:
        return *super()._key_of_model(), tuple(map(id, self._handed_on()))


def _shape_of(batch: Any) -> str:
    return " x ".join(map(str, batch.images.shape))


def _on_meta_device(part: Tensor) -> Tensor:
    return torch.empty_like(part, device="meta")


class GraphedPrediction(GraphedMethod):
    """The predictions of a detector, computed by CUDA graphs.

    A call is the graph of ``detections``, and ``with_detections`` outside it (see ``DeformableDETR``). The graphs read
    the weights where they lie, so that they see training go on. What a call returns is a copy that no later one
    changes.

    A model whose ``prediction_batch`` takes the host time may have ``image_features``, a function of the images, whose
    result ``detections`` then takes as its second argument (see ``SparseDrive``). It is a graph of its own, which the
    GPU computes meanwhile. ``image_feature_parts`` names the parts of the model whose weights it reads, which are those
    of the whole model by default.
    """

    method = "predict"
    eager = "predictions_and_state"
    learns = False

    # Validation sees more shapes than training, and keeps no activations of them.
    def __init__(self, model: Any, max_shapes: int = 64, say: Callable[[str], Any] = print) -> None:
        super().__init__(model, max_shapes, say)
        self._features: OrderedDict[Hashable, GraphedFeatures] = OrderedDict()
        # The graphs that the last call replayed, and what they gave.
        self._last_features: GraphedFeatures | None = None
        self._last_key: tuple[Hashable, Hashable] | None = None
        self._last_detections: Any = None
        self._last_modes: Hashable = None
        names = getattr(model, "image_feature_parts", None)
        parts = [model] if names is None else [getattr(model, name) for name in names]
        self._read_by_features = [
            tensor
            for part in parts
            if part is not None
            for tensor in chain(part.parameters(), part.buffers())
        ]

    def _run(self, inputs: Tensor, data_samples: Sequence[Any], state: Any) -> tuple[list[Any], Any]:
        model = self.model
        modes = self._modes()
        if modes != self._last_modes:  # In training mode, a graph changes the statistics of normalisations.
            self._last_features = self._last_key = None
            self._last_modes = modes
        features = self._begun_features(inputs)
        self._last_detections = None
        batch = model.next_prediction_batch(inputs, data_samples, state)
        detections = self._replayed_at_once(batch, features)
        if detections is None:
            key = layout_of(batch), self._key_of_model()
            detections = self._compute(batch, key, features)
            self._last_key = key if key in self._graphs else None
        state = model.state_after(detections, batch)
        # To free all tensors takes the host a tenth of a millisecond. It is done while the GPU has work.
        del batch
        self._last_detections = detections
        return model.with_detections(detections, data_samples), state

    def _begun_features(self, images: Tensor) -> GraphedFeatures | None:
        """Start the graph of the features of the images and return it, or return None if there is none.

        The GPU is idle until then, and to look at the places of all weights takes the host a tenth of a millisecond.
        Therefore the graph of the call before is started first. If it is not the right one, nobody reads what it
        writes.
        """
        guess = self._last_features
        if guess is not None and guess.is_of(images):
            guess(images)
        else:
            guess = None
        features = self._features.get(self._key_of_features(images))
        if features is not None and features is not guess:
            features(images)
        self._last_features = features
        return features

    def _replayed_at_once(self, batch: Any, features: GraphedFeatures | None) -> Any:
        """Return the detections by the graph of the call before, or None if it is not the right one.

        Whether the weights are still where they were is looked at while the GPU computes.
        """
        key = self._last_key
        if key is None or layout_of(batch) != key[0]:
            return None
        graph = self._graphs.get(key)
        if graph is None or graph.features is not features:  # Another graph would overwrite the features.
            return None
        detections = graph(batch, features)
        if self._key_of_model() != key[1]:
            return None
        self.counts["replayed"] += 1
        return detections

    def _compute_eagerly(self, batch: Any) -> tuple[Any, Any]:
        return self.model.detections(batch), None

    def _new_step(self, batch: Any, example: Any, memory: GraphMemory) -> GraphedDetections:
        model = self.model
        if not hasattr(model, "image_features"):
            return GraphedDetections(model, batch, memory)
        images = batch.images
        kept = self._features
        key = self._key_of_features(images)
        if key not in kept:
            while len(kept) >= self.max_shapes:
                kept.popitem(last=False)
            kept[key] = GraphedFeatures(model, images, memory, self._read_by_features)
        return GraphedDetections(model, batch, memory, kept[key])

    def _key_of_features(self, images: Tensor) -> Hashable:
        """Return all that a captured graph of features depends on."""
        return layout_of(images), hash((*map(Tensor.data_ptr, self._read_by_features),)), self._modes()

    def forget_graphs(self) -> None:
        super().forget_graphs()
        self._features.clear()
        self._last_features = self._last_key = None

"""Training steps and predictions replayed as CUDA graphs, so that the GPU does not wait for Python."""

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from mmengine.model import is_model_wrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from visdet.structures.kept_tables import tables_read
from visdet.structures.side_stream import side_stream
from visdet.structures.tensor_tree import layout_of, map_tensors, tensors_of

from .weight_casts import WeightCasts

__all__ = ["GraphedLoss", "GraphedPrediction", "graphs_for"]

_LEARNS = attrgetter("requires_grad")


def graphs_for(config: Mapping[str, Any], model: nn.Module, logger: logging.Logger) -> "list[GraphedMethod]":
    """Return the methods of a model that CUDA graphs replay. The list is empty without ``graph=True`` or without a GPU.

    In a run of several processes, each process replays its own graphs. The processes exchange gradients outside the
    graphs, as ``DistributedDataParallel`` does. With another wrapper of models or ``SyncBatchNorm``, training is eager.

    Args:
        config: the config of the run.
        model: the model or its wrapper.
        logger: the logger that gets a warning if something cannot be replayed.
    """
    if not config.get("graph", False):
        return []
    if not torch.cuda.is_available():
        logger.warning("graph: CUDA graphs need a GPU, so that the model runs eagerly")
        return []
    obstacle = ""
    if is_model_wrapper(model):
        if not isinstance(model, DistributedDataParallel):
            obstacle = f"graphs need the whole model in each process, but {type(model).__name__} may split it"
        elif any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
            obstacle = "SyncBatchNorm exchanges statistics within the forward pass"
    module = model.module if is_model_wrapper(model) else model
    prediction = GraphedPrediction(module, say=logger.info)
    if obstacle:
        logger.warning(f"graph: training steps run eagerly, because {obstacle}")
        return [prediction]
    return [GraphedLoss(module, say=logger.info), prediction]


class GraphedMethod(ABC):
    """A method of a detector that is computed by CUDA graphs for batches of captured shapes.

    A shape runs eagerly the first time and is captured the second time. After a capture that fails, all batches run
    eagerly. ``report`` counts the batches.

    Args:
        model: the detector. Without the methods named in ``stages`` it runs eagerly. Its parameters and buffers may
            change their values and places, but must stay the same objects, because a search takes milliseconds.
        max_shapes: number of shapes whose graphs are kept. A new shape replaces the least recently used one. All graphs
            share one pool of memory.
        say: a function that is called with a text about each capture or failure.
    """

    method: ClassVar[str]  # the name of the replaced method
    stages: ClassVar[tuple[str, ...]]  # the names of the methods that the model must have
    default_max_shapes: ClassVar[int]

    def __init__(self, model: Any, max_shapes: int | None = None, say: Callable[[str], Any] = print) -> None:
        self.model = model
        self.max_shapes = self.default_max_shapes if max_shapes is None else max_shapes
        self._say = say
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._examples: dict[Hashable, Any] = {}  # the examples of the shapes that have run eagerly
        self._has_failed = False
        self._memory: _SharedMemory | None = None
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        self.counts: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the method of the model by this object within the block."""
        setattr(self.model, self.method, self)
        try:
            yield
        finally:
            delattr(self.model, self.method)

    def __call__(self, inputs: Tensor, data_samples: Sequence[Any]) -> Any:
        """Return the result of the model's method."""
        if inputs.is_cuda and self._serves() and all(hasattr(self.model, name) for name in self.stages):
            return self._run(inputs, data_samples)
        self.counts["without a GPU or stages"] += 1
        return getattr(type(self.model), self.method)(self.model, inputs, data_samples)

    def report(self) -> str:
        """Return how many batches were replayed, how many were not and why, and the memory of the graphs."""
        total = sum(self.counts.values())
        parts = [f"{count} {kind}" for kind, count in self.counts.most_common()]
        held = 0 if self._memory is None else self._memory.reserved_bytes()
        shapes = f"{len(self._graphs)} shapes hold {held / 2**20:.0f} MiB"
        return f"graphs of {self.method}: {total} batches, {', '.join(parts)}; {shapes}"

    @abstractmethod
    def _serves(self) -> bool:
        """Return whether graphs may serve a call under torch's current settings."""

    @abstractmethod
    def _run(self, inputs: Tensor, data_samples: Sequence[Any]) -> Any:
        """Return the result of the model's method, which is computed by ``_compute``."""

    @abstractmethod
    def _compute_eagerly(self, batch: Any) -> tuple[Any, Any]:
        """Return what the graphs compute, and the example of it that ``_new_step`` needs."""

    @abstractmethod
    def _new_step(self, batch: Any, example: Any, memory: "_SharedMemory") -> Any:
        """Return a step for one shape. Its ``capture`` records the graphs, and a call replays them."""

    def _compute(self, batch: Any) -> Any:
        """Return the first result of ``_compute_eagerly``, by graphs if the shape was captured or can be captured."""
        key = self._key(batch)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            self.counts["replayed"] += 1
            return self._graphs[key](batch)
        if key in self._examples and not self._has_failed:
            return self._first_replay(key, batch)
        self.counts["after a failed capture" if self._has_failed else "of a new shape"] += 1
        result, self._examples[key] = self._compute_eagerly(batch)
        return result

    def _first_replay(self, key: Hashable, batch: Any) -> Any:
        """Capture the graphs for a batch and return their result, or compute it eagerly if the capture fails."""
        while len(self._graphs) >= self.max_shapes:
            self._graphs.popitem(last=False)
        if self._memory is None:
            self._memory = _SharedMemory()
        shape = " x ".join(str(size) for size in batch.images.shape)
        step = self._new_step(batch, self._examples[key], self._memory)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        try:
            step.capture()
        except RuntimeError as error:  # Something cannot be captured, or the memory does not suffice.
            # The generator's current state regards the capture as unfinished.
            generator.graphsafe_set_state(random_state)
            self._graphs.clear()
            self._has_failed = True
            self.counts["after a failed capture"] += 1
            self._say(
                f"graphs of {self.method}: a batch of {shape} cannot be captured, so that all batches run eagerly: "
                f"{error}"
            )
            return self._compute_eagerly(batch)[0]
        self._graphs[key] = step
        self.counts["replayed"] += 1
        self._say(f"{self.report()}; captured batches of {shape}")
        return step(batch)

    def _key(self, batch: Any) -> Hashable:
        """Return everything that a captured graph depends on: shapes, modes, and the addresses of the weights."""
        places = hash((*map(Tensor.data_ptr, self._parameters), *map(Tensor.data_ptr, self._buffers)))
        learning = hash(tuple(map(_LEARNS, self._parameters))) if torch.is_grad_enabled() else None
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        modes = (torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())
        return layout_of(batch), places, learning, autocast, self.model.training, modes


class GraphedLoss(GraphedMethod):
    """The losses of a detector, computed by CUDA graphs.

    A step of a detector with stages is the graph of ``predictions_and_costs``, one copy of the costs to the host,
    ``assign`` there, the graph of ``losses``, and in ``backward`` the graph of all gradients (see ``DeformableDETR``).
    ``assign`` is called once in each step and may exchange numbers with other processes. The graphs may not.
    The losses are ordinary nodes of the autograd graph, from which the parameters get their gradients. Gradient
    accumulation, loss scaling, clipping and the optimizer therefore work as without graphs. Random numbers, including
    those of dropout, are those of eager steps.
    """

    method = "loss"
    stages = ("training_batch", "predictions_and_costs", "assign", "losses")
    # Deformable DETR's multi-scale pipeline makes batches of so many shapes with pad_size_divisor=128.
    default_max_shapes = 24

    def _serves(self) -> bool:
        return torch.is_grad_enabled()

    def _run(self, inputs: Tensor, data_samples: Sequence[Any]) -> dict[str, Tensor]:
        return self._compute(self.model.training_batch(inputs, data_samples))

    def _compute_eagerly(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        predictions, costs = self.model.predictions_and_costs(batch)
        assignment = self.model.assign(costs, batch)
        return self.model.losses(predictions, batch, assignment), map_tensors(_shape_alone, assignment)

    def _new_step(self, batch: Any, example: Any, memory: "_SharedMemory") -> "_GraphedStep":
        return _GraphedStep(self.model, batch, example, memory)


class GraphedPrediction(GraphedMethod):
    """The predictions of a detector, computed by CUDA graphs.

    A call is the graph of ``detections``, and ``with_detections`` outside it (see ``DeformableDETR``). The graphs read
    the weights where they lie, so that they see training go on. What a call returns is a copy that no later one
    changes.
    """

    method = "predict"
    stages = ("prediction_batch", "detections", "with_detections")
    default_max_shapes = 64  # validation sees more shapes than training, and keeps no activations of them

    def _serves(self) -> bool:
        return not torch.is_grad_enabled()

    def _run(self, inputs: Tensor, data_samples: Sequence[Any]) -> list[Any]:
        detections = self._compute(self.model.prediction_batch(inputs, data_samples))
        return self.model.with_detections(detections, data_samples)

    def _compute_eagerly(self, batch: Any) -> tuple[Any, Any]:
        return self.model.detections(batch), None

    def _new_step(self, batch: Any, example: Any, memory: "_SharedMemory") -> "_GraphedDetections":
        return _GraphedDetections(self.model, batch, memory)


class _SharedMemory:
    """What the graphs of all shapes share: a pool, two streams to capture on, gradients, and 16-bit weights.

    Graphs run one after another on one stream, so that what one of them left in the pool may be overwritten by the
    next. Gradients are copied out of it. Each graph that reads 16-bit weights begins by writing them.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.side = torch.cuda.Stream()
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self._copies: dict[tuple[Tensor, torch.dtype], Tensor] = {}

    @contextmanager
    def captures(self) -> Iterator[None]:
        """Run the block on the streams, after all earlier work and before all later work on the current stream.

        Backward passes in the block run in this thread.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with (
            torch.cuda.stream(self.stream),
            side_stream(self.side),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the tensor to which graphs write the gradient of a parameter."""
        if parameter not in self.gradients:
            self.gradients[parameter] = torch.empty_like(parameter)
        return self.gradients[parameter]

    def copy_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor to which graphs write a weight in another dtype."""
        if (weight, dtype) not in self._copies:
            with torch.inference_mode(False):
                self._copies[weight, dtype] = torch.empty_like(weight, dtype=dtype)
        return self._copies[weight, dtype]

    def reserved_bytes(self) -> int:
        """Return the size of the pool, the gradients, and the 16-bit weights."""
        segments = torch.cuda.memory_snapshot()
        pool = sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self.pool)
        return pool + sum(held.nbytes for held in (*self.gradients.values(), *self._copies.values()))


class _GraphedStep:
    """The three graphs of one shape, and the tensors that they read and write.

    The constructor runs the step of ``batch`` once without effect, so that libraries have made their plans.
    ``capture`` makes the graphs.

    The graphs are those of other leaves at the same places in memory. The parameters' own nodes may be held by an
    autograd graph of an earlier step, or by ``DistributedDataParallel``. Then they belong to the stream of that step,
    which a capture may not touch.
    """

    def __init__(self, model: Any, batch: Any, example: Any, memory: _SharedMemory) -> None:
        self.model = model
        self.memory = memory
        self.batch = map_tensors(Tensor.clone, batch)
        self.assignment = map_tensors(
            lambda shape: torch.ones_like(shape, device=memory.stream.device), example
        )
        self.leaves = _leaves_in_place_of(model)
        parameter_of = {leaf: parameter for parameter, leaf in self.leaves.items()}
        self.casts = WeightCasts(
            parameter_of, "cuda", lambda leaf, dtype: memory.copy_of(parameter_of[leaf], dtype)
        )

        def run() -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
            predictions, _ = model.predictions_and_costs(self.batch)
            losses = model.losses(predictions, self.batch, self.assignment)
            total = torch.stack(list(losses.values())).sum()
            with _no_autocast():
                return losses, torch.autograd.grad(total, self._learning(), allow_unused=True)

        with memory.captures(), _casts_of_its_own(), _nothing_changes(model), self.casts:
            losses, gradients = _with_leaves(model, self.leaves, run)
        self.names = list(losses)
        parameter_of |= {copy: parameter_of[leaf] for leaf, copy in self.casts.copies.items()}
        self.used_leaves = [
            leaf for leaf, grad in zip(self._learning(), gradients, strict=True) if grad is not None
        ]
        self.parameters_of_leaves = [parameter_of[leaf] for leaf in self.used_leaves]
        self.parameters = list(dict.fromkeys(self.parameters_of_leaves))
        self.static_gradients = [memory.gradient_of(parameter) for parameter in self.parameters]
        self.grad_of_losses = torch.empty_like(torch.stack(list(losses.values())).detach())

    def _learning(self) -> list[Tensor]:
        """Return the leaves that get gradients: those in place of parameters, and 16-bit copies of weights."""
        return [leaf for leaf in (*self.leaves.values(), *self.casts.copies.values()) if leaf.requires_grad]

    def capture(self) -> None:
        """Record the three graphs.

        Raises:
            RuntimeError: something in them cannot be captured.
        """
        self.graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        with self.memory.captures(), _casts_of_its_own(), tables_read() as self.tables, self.casts:
            _with_leaves(self.model, self.leaves, self._capture)

    def _capture(self) -> None:
        forward, losses, backward = (
            torch.cuda.graph(graph, self.memory.pool, self.memory.stream, capture_error_mode="thread_local")
            for graph in self.graphs
        )
        with forward:
            self.casts.write()
            predictions, self.costs = self.model.predictions_and_costs(self.batch)
        with losses:
            by_name = self.model.losses(predictions, self.batch, self.assignment)
            values = torch.stack(list(by_name.values()))
        with _no_autocast(), backward:
            gradients = torch.autograd.grad(values, self.used_leaves, self.grad_of_losses)
            self._write_gradients(gradients)
        self.values = values.detach()

    def _write_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Write the sum of the gradients of each parameter's leaves. All tensors of a dtype are one operation."""
        first: dict[torch.dtype, dict[Tensor, Tensor]] = {}
        added: dict[torch.dtype, dict[Tensor, Tensor]] = {}
        seen = set()
        for parameter, gradient in zip(self.parameters_of_leaves, gradients, strict=True):
            groups = added if parameter in seen else first
            groups.setdefault(gradient.dtype, {})[self.memory.gradient_of(parameter)] = gradient
            seen.add(parameter)
        for pairs in first.values():
            torch._foreach_copy_(list(pairs), list(pairs.values()))
        for pairs in added.values():
            torch._foreach_add_(list(pairs), list(pairs.values()))

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the losses of a batch of this shape, by name."""
        _copy(self.batch, batch)
        self.graphs[0].replay()
        _copy(self.assignment, self.model.assign(self.costs, batch))
        self.graphs[1].replay()
        return dict(zip(self.names, _Replay.apply(self, *self.parameters).unbind(), strict=True))

    def gradients(self, grad_of_losses: Tensor) -> list[Tensor]:
        """Return the gradients of the parameters, in memory of their own."""
        self.grad_of_losses.copy_(grad_of_losses)
        self.graphs[2].replay()
        copies = [torch.empty_like(gradient) for gradient in self.static_gradients]
        torch._foreach_copy_(copies, self.static_gradients)
        return copies


class _GraphedDetections:
    """The graph of the detections of one shape, and the tensors that it reads and writes.

    The constructor runs ``batch`` once, so that libraries have made their plans and tables are cached.
    """

    def __init__(self, model: Any, batch: Any, memory: _SharedMemory) -> None:
        self.model = model
        self.memory = memory
        self.batch = map_tensors(Tensor.clone, batch)
        self.casts = WeightCasts(model.parameters(), "cuda", memory.copy_of)
        with memory.captures(), _casts_of_its_own(), _nothing_changes(model), self.casts:
            model.detections(self.batch)

    def capture(self) -> None:
        """Record the graph.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        self.graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            self.graph, self.memory.pool, self.memory.stream, capture_error_mode="thread_local"
        )
        with self.memory.captures(), _casts_of_its_own(), tables_read() as self.tables, capture:
            self.casts.write()
            with self.casts:
                self.detections = self.model.detections(self.batch)

    def __call__(self, batch: Any) -> Any:
        """Return the detections of a batch of this shape."""
        _copy(self.batch, batch)
        self.graph.replay()
        return _copied(self.detections)


class _Replay(torch.autograd.Function):
    """The losses that a graph has computed, as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, step: _GraphedStep, *parameters: Tensor) -> Tensor:
        ctx.step = step
        return step.values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_of_losses: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.step.gradients(grad_of_losses)


@contextmanager
def _casts_of_its_own() -> Iterator[None]:
    """Run the block under the current autocast with an empty cache, so that it shares no casts of weights."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.clear_autocast_cache()
    try:
        with torch.autocast("cuda", dtype=dtype, enabled=enabled):
            yield
    finally:
        torch.clear_autocast_cache()


def _no_autocast() -> torch.autocast:
    """Return a context without autocast for a backward pass, which computes in the dtypes of the forward pass."""
    return torch.autocast("cuda", enabled=False)


@contextmanager
def _nothing_changes(model: nn.Module) -> Iterator[None]:
    """Restore the GPU's random state and the model's buffers after the block."""
    random_state = torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        torch.cuda.set_rng_state(random_state)
        for buffer, value in buffers:
            buffer.copy_(value)


class _Call(nn.Module):
    """A module whose call runs a given function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def _leaves_in_place_of(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Return new leaf tensors that share the memory of the parameters."""
    return {
        parameter: parameter.detach().requires_grad_(parameter.requires_grad)
        for parameter in model.parameters()
    }


def _with_leaves(model: nn.Module, leaves: Mapping[nn.Parameter, Tensor], function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs while the leaves replace the model's parameters."""
    # Each attribute is named only once, and ``functional_call`` must not look for further names of a shared module.
    # Otherwise it would take the leaf for the original parameter and put the leaf back after the call.
    attributes = {
        f"{prefix}.{name}": leaves[parameter]
        for prefix, module in _Call(model).named_modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    return torch.func.functional_call(_Call(model), attributes, (function,), tie_weights=False)


def _shape_alone(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _copy(into: Any, values: Any) -> None:
    torch._foreach_copy_(tensors_of(into), tensors_of(values), non_blocking=True)


def _copied(tree: Any) -> Any:
    copies = map_tensors(torch.empty_like, tree)
    _copy(copies, tree)
    return copies

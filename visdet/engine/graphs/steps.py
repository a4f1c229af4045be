"""The CUDA graphs of a training step and of a prediction, for batches of one shape."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from visdet.execution.tensor_tree import layout_of, map_tensors, tensors_of

from ..stages import state_after
from .leaves import leaves_in_place_of, with_leaves
from .memory import GraphMemory


class GraphedStep:
    """A training step of one shape of batches: three CUDA graphs, and the tensors that they read and write.

    The constructor runs the step of ``batch`` once without effect, so that libraries have made their plans.
    ``capture`` makes the graphs. ``example`` has the layout of an assignment. Without it, the constructor makes one,
    for which processes may exchange numbers.

    The graphs are captured with leaf tensors that share the memory of the parameters, and not with the parameters
    themselves. An earlier step or ``DistributedDataParallel`` may hold the autograd nodes of the parameters. Such nodes
    belong to the stream of that step, which a capture must not use.
    """

    def __init__(self, model: Any, batch: Any, example: Any, memory: GraphMemory) -> None:
        self.model = model
        self.memory = memory
        self.batch = map_tensors(Tensor.clone, batch)
        self.assignment = self._ones_like(example)
        self.leaves = leaves_in_place_of(model)
        learning = [leaf for leaf in self.leaves.values() if leaf.requires_grad]

        def run() -> tuple[dict[str, Tensor], Sequence[Tensor | None]]:
            predictions, costs = model.predictions_and_costs(self.batch)
            if example is None:
                self.assignment = self._ones_like(model.assign(costs, self.batch))
            losses = model.losses(predictions, self.batch, self.assignment)
            total = torch.stack(list(losses.values())).sum()
            with torch.autocast("cuda", enabled=False):  # It computes in the dtypes of the forward pass.
                return losses, torch.autograd.grad(total, learning, allow_unused=True)

        with memory.captures(), _casts_of_its_own(), nothing_changes(model):
            losses, gradients = with_leaves(model, self.leaves, run)
        self.names = list(losses)
        used = {leaf for leaf, grad in zip(learning, gradients, strict=True) if grad is not None}
        self.parameters = [parameter for parameter, leaf in self.leaves.items() if leaf in used]
        self.static_gradients = [memory.gradient_of(parameter) for parameter in self.parameters]
        self.grad_of_losses = torch.empty_like(torch.stack(list(losses.values())).detach())

    def _ones_like(self, assignment: Any) -> Any:
        return map_tensors(lambda part: torch.ones_like(part, device=self.memory.stream.device), assignment)

    def capture(self) -> None:
        """Record the three graphs.

        Raises:
            RuntimeError: something in them cannot be captured.
        """
        self.graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        with self.memory.captures() as capture, _casts_of_its_own():
            with_leaves(self.model, self.leaves, self._capture)
        self.tables = capture.tables

    def _capture(self) -> None:
        forward, losses, backward = (
            torch.cuda.graph(graph, self.memory.pool, self.memory.stream, capture_error_mode="thread_local")
            for graph in self.graphs
        )
        with forward:
            predictions, self.outputs = self.model.predictions_and_costs(self.batch)
        with losses:
            by_name = self.model.losses(predictions, self.batch, self.assignment)
            values = torch.stack(list(by_name.values()))
        with torch.autocast("cuda", enabled=False), backward:
            leaves = [self.leaves[parameter] for parameter in self.parameters]
            gradients = torch.autograd.grad(values, leaves, self.grad_of_losses)
            _copy(self.static_gradients, gradients)
        self.values = values.detach()

    def __call__(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        """Return the losses of a batch of this shape by name, and what the model remembers, which no replay changes."""
        self.memory.replays += 1
        _copy(self.batch, batch)
        self.graphs[0].replay()
        state = map_tensors(Tensor.clone, state_after(self.model, self.outputs, batch))
        _copy(self.assignment, self.model.assign(self.outputs, batch))
        self.graphs[1].replay()
        losses = _Replay.apply(self, *self.parameters).unbind()
        return dict(zip(self.names, losses, strict=True)), state

    def gradients(self, grad_of_losses: Tensor) -> list[Tensor]:
        """Return the gradients of the parameters, in memory of their own."""
        self.grad_of_losses.copy_(grad_of_losses)
        self.graphs[2].replay()
        copies = [torch.empty_like(gradient) for gradient in self.static_gradients]
        torch._foreach_copy_(copies, self.static_gradients)
        return copies


class GraphedFeatures:
    """The graph of the features of images of one shape, and the tensors that it reads and writes.

    The constructor runs the images once, so that libraries have made their plans. ``capture`` makes the graph.

    Args:
        model: the detector. images: the images. memory: what all graphs share.
        weights: the parameters and buffers of the model that the graph reads.
    """

    def __init__(self, model: Any, images: Tensor, memory: GraphMemory, weights: Sequence[Tensor]) -> None:
        self.model = model
        self.images = images.clone()
        self.recorded = _Recorded(model, memory, weights)
        self.features = self.recorded.try_out(lambda: model.image_features(self.images))
        self.is_captured = False

    def capture(self) -> None:
        """Record the graph.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        self.features = self.recorded.capture(lambda: self.model.image_features(self.images))
        self.is_captured = True

    def is_of(self, images: Tensor) -> bool:
        """Return whether the graph is there, and one of images of this shape."""
        return self.is_captured and layout_of(images) == layout_of(self.images)

    def __call__(self, images: Tensor) -> None:
        """Write the features of images of this shape to ``features``."""
        self.images.copy_(images, non_blocking=True)
        self.recorded.graph.replay()


class GraphedDetections:
    """The graph of the detections of one shape, and the tensors that it reads and writes.

    The constructor runs ``batch`` once, so that libraries have made their plans and tables are cached.

    Args:
        model: the detector. batch: a batch of this shape. memory: what all graphs share.
        features: the graph of the features that ``detections`` takes, or None if it takes the batch alone.
    """

    def __init__(
        self, model: Any, batch: Any, memory: GraphMemory, features: GraphedFeatures | None = None
    ) -> None:
        self.model = model
        self.features = features
        self.batch = map_tensors(Tensor.clone, batch)
        self.recorded = _Recorded(model, memory, [*model.parameters(), *model.buffers()])
        self.recorded.try_out(self._detections)

    def _detections(self) -> Any:
        if self.features is None:
            return self.model.detections(self.batch)
        return self.model.detections(self.batch, self.features.features)

    def capture(self) -> None:
        """Record the graph, and the graph of the features unless another shape has it.

        Raises:
            RuntimeError: something in them cannot be captured.
        """
        if self.features is not None and not self.features.is_captured:
            self.features.capture()
        self.detections = self.recorded.capture(self._detections)

    def __call__(self, batch: Any, begun: GraphedFeatures | None = None) -> Any:
        """Return the detections of a batch of this shape.

        Args:
            batch: the batch. begun: the graph that has computed its features, or None.
        """
        if self.features is None:
            _copy(self.batch, batch)
        else:
            if begun is not self.features:
                self.features(batch.images)
            _copy(replace(self.batch, images=None), replace(batch, images=None))
        self.recorded.graph.replay()
        copies = map_tensors(torch.empty_like, self.detections)
        _copy(copies, self.detections)
        return copies


class _Recorded:
    """A graph of a function of a model in evaluation.

    The memory of the weights that it reads is kept. A replay is therefore safe even if the weights have moved since,
    though its result is then out of date.
    """

    def __init__(self, model: Any, memory: GraphMemory, weights: Sequence[Tensor]) -> None:
        self.model = model
        self.kept = [weight.detach() for weight in weights]
        self.memory = memory

    def try_out(self, function: Callable[[], Any]) -> Any:
        """Return the result of the function without a graph."""
        with self.memory.captures(), _casts_of_its_own(), nothing_changes(self.model):
            return function()

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record the graph, and return the result of the function, which each replay writes anew."""
        self.graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(
            self.graph, self.memory.pool, self.memory.stream, capture_error_mode="thread_local"
        )
        with self.memory.captures() as capture, _casts_of_its_own(), recording:
            result = function()
        self.tables = capture.tables
        return result


class _Replay(torch.autograd.Function):
    """The losses that a graph has computed, as a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, step: GraphedStep, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.replays = step, step.memory.replays
        return step.values.clone()

    @staticmethod
    def backward(ctx: Any, grad_of_losses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of a training step by CUDA graphs cannot be differentiated (create_graph=True): train with "
                "--no-graph"
            )
        memory = ctx.step.memory
        if ctx.replays != memory.replays:
            raise RuntimeError(
                "the backward pass of a training step by CUDA graphs must run once, and before the next step: what it "
                "needs has been overwritten. Add the losses up and call backward once, or train with --no-graph"
            )
        memory.replays += 1
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


@contextmanager
def nothing_changes(model: nn.Module) -> Iterator[None]:
    """Restore the GPU's random state and the model's buffers after the block."""
    random_state = torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        torch.cuda.set_rng_state(random_state)
        for buffer, value in buffers:
            buffer.copy_(value)


def _copy(into: Any, values: Any) -> None:
    """Copy the tensors of a tree into another tree. All dense tensors of a dtype are one kernel."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in zip(tensors_of(into), tensors_of(values), strict=True):
        is_dense = target.is_contiguous() and value.is_contiguous()
        key = (target.dtype, value.dtype, value.device) if is_dense else id(target)
        targets, sources = groups.setdefault(key, ([], []))
        targets.append(target)
        sources.append(value)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)

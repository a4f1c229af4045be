"""The CUDA graphs of a training step and of a prediction, for batches of one shape."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from mmengine.dist import get_world_size
from torch import Tensor, nn

from visdet.execution.later_gradients import LaterGradients
from visdet.execution.tensor_tree import NotOnDevice, layout_of, map_tensors, tensors_of

from ..optim.gradients import Gradients
from .half_leaves import CastsNoted, HalfLeaves
from .leaves import leaves_in_place_of, with_leaves
from .memory import GraphMemory, host_waits

_LEAST_FREE = 0.5  # the part of the GPU's memory that must stay free if activations are kept


class GraphedStep:
    """A training step of one shape of batches: its CUDA graphs, and the tensors that they read and write.

    One graph computes the losses, and another one the gradients, which it adds to those of the parameters. If the
    assignment needs the host or other processes, two graphs compute the losses, and ``assign`` is called between them.

    The constructor runs the step of ``batch`` once without effect, so that libraries have made their plans, and sees
    what ``assign`` needs, which parameters autocast casts, and whether the memory suffices to keep activations that the
    model computes again in the backward pass (``with_cp``, ``num_cp``). ``capture`` makes the graphs.

    The graphs are captured with leaf tensors that share the memory of the parameters, and not with the parameters
    themselves. An earlier step or ``DistributedDataParallel`` may hold the autograd nodes of the parameters. Such nodes
    belong to the stream of that step, which a capture must not use.

    Args:
        model: the detector. batch: a batch of this shape.
        example: a tree of the layout of an assignment. Without it, the constructor calls ``assign`` once, for which
            processes may exchange numbers.
        memory: what all graphs share.
        gradients: where the gradients lie.
        handed_on: parameters that get their gradients from autograd, because hooks of theirs must see them.
    """

    def __init__(
        self,
        model: Any,
        batch: Any,
        example: Any,
        memory: GraphMemory,
        gradients: Gradients,
        handed_on: Sequence[nn.Parameter],
    ) -> None:
        self.model = model
        self.memory = memory
        self.gradients = gradients
        self.batch = map_tensors(Tensor.clone, batch, NotOnDevice)
        self.assignment: Any = None
        self.assigns_in_graph = get_world_size() == 1

        def assign(outputs: Any, _: Any) -> Any:
            found = example
            if self.assigns_in_graph:
                found = self._assigned_on_device(outputs)
            if found is None:
                found = model.assign(outputs, batch)
            self.assignment = map_tensors(self._ones_like, found)
            return self.assignment

        plain = leaves_in_place_of(model)
        dtype = torch.get_autocast_dtype("cuda")
        casts = CastsNoted(plain.values() if torch.is_autocast_enabled("cuda") else (), dtype)
        copies = memory.half_copies
        self.half = HalfLeaves(plain, set(), dtype, copies)
        self.hooked = hooked = set(handed_on)
        self.keeps_activations = recomputes(model)
        with casts:
            try:
                values, used = self._tried_out(assign)
            except torch.OutOfMemoryError:
                if not self.keeps_activations:
                    raise
                self.keeps_activations = False
                values, used = self._tried_out(assign)
        free, total = torch.cuda.mem_get_info()
        self.keeps_activations = self.keeps_activations and free >= _LEAST_FREE * total
        only_cast = casts.only_cast()
        if only_cast:
            whole = self.half
            self.half = HalfLeaves(plain, only_cast, dtype, copies)
            others, used_then = self._tried_out(assign)
            is_equal = used_then == used and torch.equal(values, others)
            self.half = self.half if is_equal else whole
        self.block = block = gradients.block_of(used)
        parameters: list[Any] = block.parameters
        self.parameters = parameters
        self.handed_on = handed = [parameter for parameter in parameters if parameter in hooked]
        self.handed_gradients = list(map(torch.empty_like, handed))
        self.grad_of_losses = torch.empty_like(values)
        # The losses are a function of it for autograd.
        self.anchor = torch.zeros((), device=memory.stream.device, requires_grad=True)

    def _tried_out(self, assign: Callable[[Any, Any], Any]) -> tuple[Tensor, list[nn.Parameter]]:
        """Return the losses, and the parameters that get gradients, of a step without effect."""
        model = self.model
        half = self.half
        leaves = half.leaves
        learning = {parameter: leaf for parameter, leaf in leaves.items() if leaf.requires_grad}

        def run() -> tuple[Tensor, Sequence[Tensor | None]]:
            half.refresh()
            losses, _ = model.computed_losses(self.batch, assign)
            self.names = list(losses)
            values = _stacked(losses)
            with torch.autocast("cuda", enabled=False):  # It computes in the dtypes of the forward pass.
                found = torch.autograd.grad(values.sum(), list(learning.values()), allow_unused=True)
            return values.detach(), found

        later = self._later()
        captures = self.memory.captures(self.keeps_activations)
        with captures, nothing_changes(model), later.taking():
            values, found = with_leaves(model, leaves, run)
            later.join()
        used = [
            parameter
            for (parameter, leaf), grad in zip(learning.items(), found, strict=True)
            if grad is not None or later.has_found(leaf)
        ]
        return values, used

    def _later(self) -> LaterGradients:
        """Return what computes gradients beside the backward pass. Those that are handed on are left to autograd."""
        leaves = [leaf for parameter, leaf in self.half.leaves.items() if parameter not in self.hooked]
        return LaterGradients(leaves, self.memory.beside)

    def _ones_like(self, part: Tensor) -> Tensor:
        return torch.ones_like(part, device=self.memory.stream.device)

    def _assigned_on_device(self, outputs: Any) -> Any:
        """Return the assignment if no work on the host is needed for it, and None otherwise."""
        try:
            with host_waits("error"):
                return self.model.assign(outputs, self.batch)
        except RuntimeError:
            self.assigns_in_graph = False
            return None

    def capture(self) -> None:
        """Record the graphs.

        Raises:
            RuntimeError: something in them cannot be captured.
        """
        self.graphs: list[Any] = []
        later = self._later()
        captures = self.memory.captures(self.keeps_activations)
        with captures as capture, later.taking():
            with_leaves(self.model, self.half.leaves, lambda: self._capture(later))
        self.tables = capture.tables

    def _recording(self) -> Any:
        self.graphs.append(torch.cuda.CUDAGraph())
        return self.memory.recording(self.graphs[-1])

    def _capture(self, later: LaterGradients) -> None:
        half = self.half
        with ExitStack() as recording:

            def assign(outputs: Any, _: Any) -> Any:
                recording.close()
                recording.enter_context(self._recording())
                return self.assignment

            recording.enter_context(self._recording())
            half.refresh()
            by_name, self.outputs = self.model.computed_losses(
                self.batch, None if self.assigns_in_graph else assign
            )
            values = _stacked(by_name)
        with torch.autocast("cuda", enabled=False), self._recording():
            hooked = self.hooked
            parameters = self.parameters
            views = self.block.views
            leaves = [half.leaves[parameter] for parameter in parameters]
            found = torch.autograd.grad(values, leaves, self.grad_of_losses, allow_unused=True)
            later.join()
            gradients = [
                (parameter, view, gradient)
                for parameter, view, gradient in zip(parameters, views, found, strict=True)
                if gradient is not None
            ]
            added = [(view, new) for parameter, view, new in gradients if parameter not in hooked]
            halves = [(view, new) for view, new in added if new.dtype != view.dtype]
            widened = [(view, torch.empty_like(view)) for view, _ in halves]
            _copy([wide for _, wide in widened], [new for _, new in halves])
            full = [(view, new) for view, new in added if new.dtype == view.dtype]
            beside = later.rounds(zip(leaves, views, strict=True))
            for pairs in (widened, full, *beside):
                _add(pairs)
            handed = [new for parameter, _, new in gradients if parameter in hooked]
            _copy(self.handed_gradients, handed)
        self.values = values.detach()

    def __call__(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        """Return the losses of a batch of this shape by name, and what the model remembers, which no replay changes."""
        model = self.model
        outputs = self.outputs
        self.memory.replays += 1
        _copy(self.batch, batch)
        self.graphs[0].replay()
        if not self.assigns_in_graph:
            _copy(self.assignment, model.assign(outputs, batch))
            self.graphs[1].replay()
        kept = _copied(model.state_after(outputs, batch))
        losses = _Replay.apply(self, self.anchor, *self.handed_on).unbind()
        return dict(zip(self.names, losses, strict=True)), kept

    def add_gradients(self, grad_of_losses: Tensor) -> list[Tensor]:
        """Add the gradients to those of the parameters, and return the ones that are handed on."""
        self.gradients.attach(self.block)
        self.grad_of_losses.copy_(grad_of_losses)
        self.graphs[-1].replay()
        return _copied(self.handed_gradients)


def recomputes(model: nn.Module) -> bool:
    """Return whether a part of a model computes activations again in the backward pass."""
    return any(getattr(part, "with_cp", False) or getattr(part, "num_cp", 0) > 0 for part in model.modules())


class _GraphOfPrediction(ABC):
    """The graph of a part of a prediction for one shape, and the tensors that it reads and writes.

    The constructor computes the part once, so that libraries have made their plans and tables are cached. ``capture``
    makes the graph. The memory of the weights that it reads is kept. A replay is therefore safe even if the weights
    have moved since, though its result is then out of date.

    Args:
        model: the detector. memory: what all graphs share.
        weights: the parameters and buffers of the model that the graph reads.

    Attributes:
        graph: the graph, which is None before the capture.
        result: what the part has returned, which each replay writes anew.
    """

    graph: Any = None

    def __init__(self, model: Any, memory: GraphMemory, weights: Iterable[Tensor]) -> None:
        self.model = model
        self.memory = memory
        self.kept = [weight.detach() for weight in weights]
        with memory.captures(), nothing_changes(model):
            self.result = self.compute()

    @abstractmethod
    def compute(self) -> Any:
        """Return what the graph computes."""

    def capture(self) -> None:
        """Record the graph.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        memory = self.memory
        graph = torch.cuda.CUDAGraph()
        with memory.captures() as capture, memory.recording(graph):
            self.result = self.compute()
        self.graph = graph
        self.tables = capture.tables


class GraphedFeatures(_GraphOfPrediction):
    """The graph of the features of images of one shape.

    Args:
        model, memory, weights: see the base class. images: the images.
    """

    def __init__(self, model: Any, images: Tensor, memory: GraphMemory, weights: Sequence[Tensor]) -> None:
        self.images = images.clone()
        super().__init__(model, memory, weights)

    def compute(self) -> Any:
        return self.model.image_features(self.images)

    def is_of(self, images: Tensor) -> bool:
        """Return whether the graph is there, and one of images of this shape."""
        return self.graph is not None and layout_of(images) == layout_of(self.images)

    def __call__(self, images: Tensor) -> None:
        """Compute the features of images of this shape."""
        self.images.copy_(images, non_blocking=True)
        self.graph.replay()


class GraphedDetections(_GraphOfPrediction):
    """The graph of the detections of one shape.

    Args:
        model, memory: see the base class. batch: a batch of this shape.
        features: the graph of the features that ``detections`` takes, or None if it takes the batch alone.
    """

    def __init__(
        self, model: Any, batch: Any, memory: GraphMemory, features: GraphedFeatures | None = None
    ) -> None:
        self.features = features
        self.batch = map_tensors(Tensor.clone, batch)
        super().__init__(model, memory, chain(model.parameters(), model.buffers()))

    def compute(self) -> Any:
        features = self.features
        parts = () if features is None else (features.result,)
        return self.model.detections(self.batch, *parts)

    def capture(self) -> None:
        """Record the graph, and the graph of the features unless another shape has it."""
        features = self.features
        if features is not None and features.graph is None:
            features.capture()
        super().capture()

    def __call__(self, batch: Any, begun: GraphedFeatures | None = None) -> Any:
        """Return the detections of a batch of this shape.

        Args:
            batch: the batch. begun: the graph that has computed its features, or None.
        """
        features = self.features
        own = self.batch
        if features is None:
            _copy(own, batch)
        else:
            if begun is not features:
                features(batch.images)
            _copy(replace(own, images=None), replace(batch, images=None))
        self.graph.replay()
        return _copied(self.result)


class _Replay(torch.autograd.Function):
    """The losses that a graph has computed. Its backward pass adds the gradients of the parameters to their sums."""

    @staticmethod
    def forward(ctx: Any, step: GraphedStep, anchor: Tensor, *handed_on: Tensor) -> Tensor:
        ctx.step = step
        ctx.replays = step.memory.replays
        return step.values.clone()

    @staticmethod
    def backward(ctx: Any, grad_of_losses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of a training step by CUDA graphs cannot be differentiated (create_graph=True): train with "
                "--no-graph"
            )
        step = ctx.step
        memory = step.memory
        if ctx.replays != memory.replays:
            raise RuntimeError(
                "the backward pass of a training step by CUDA graphs must run once, and before the next step: what it "
                "needs has been overwritten. Add the losses up and call backward once, or train with --no-graph"
            )
        memory.replays += 1
        return None, None, *step.add_gradients(grad_of_losses)


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


def _stacked(losses: Mapping[str, Tensor]) -> Tensor:
    """Return losses as a vector."""
    return torch.stack(list(losses.values()))


def _copied(tree: Any) -> Any:
    """Return a tree with copies of the tensors of another."""
    copies = map_tensors(torch.empty_like, tree)
    _copy(copies, tree)
    return copies


def _copy(into: Any, values: Any) -> None:
    """Copy the tensors of a tree into another tree. All dense tensors of a dtype are one kernel."""
    for targets, sources in _alike(zip(tensors_of(into), tensors_of(values), strict=True)):
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _add(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add the second tensor of each pair to the first. Those whose numbers lie in the same order are one kernel."""
    for targets, sources in _alike(pairs):
        torch._foreach_add_(targets, sources)


def _alike(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Return pairs of lists that one kernel can serve: dense tensors of a dtype, and each other tensor by itself."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, value in pairs:
        strides = target.stride()
        if _strides_of(target) == _strides_of(value):
            value = value.as_strided(value.shape, strides)
        is_dense = strides == value.stride() and (
            target.is_contiguous() or target.is_contiguous(memory_format=torch.channels_last)
        )
        key = (target.dtype, value.dtype, value.device) if is_dense else id(target)
        members, sources = groups.setdefault(key, ([], []))
        members.append(target)
        sources.append(value)
    return groups.values()


def _strides_of(tensor: Tensor) -> list[int]:
    """Return the strides between numbers. Dimensions of one number have none that means anything."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]

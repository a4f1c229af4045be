"""A step on a GPU that does not exist, which shows what it would copy there from the host."""

import traceback
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from visdet.execution.tensor_tree import NotOnDevice, map_tensors, tensors_of

# What these make is kept from the trial run before a capture.
_KEPT = ("tables_of", "to_device")


class CopiesNoted(TorchDispatchMode):
    """Notes the lines of visdet in which a tensor of the host meets one of the GPU, as no graph can record."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs))
        from_host = [tensor for tensor in given if tensor.device.type == "cpu" and tensor.dim() > 0]
        on_gpu = [tensor for tensor in (*given, *tensors_of(result)) if tensor.is_cuda]
        # Operators read small tables where they lie.
        if from_host and on_gpu and function.namespace != "visdet":
            frames = [frame for frame in traceback.extract_stack() if "/visdet/" in frame.filename]
            if not any(frame.name in _KEPT for frame in frames):
                self.places.add(f"{frames[-1].filename.partition('/visdet/')[2]}: {frames[-1].line}")
        return result


def copies_of_losses(model: nn.Module, images: Tensor, samples: list[Any], state: Any = None) -> set[str]:
    """Return the places at which the losses of a batch would copy from the host in a graph."""
    batch = model.next_training_batch(images, samples, state)

    def run() -> set[str]:
        with CopiesNoted() as copies:
            model.computed_losses(moved_batch, lambda *_: assignment)
        return copies.places

    kept: list[Any] = []

    def assign(outputs: Any, batch: Any) -> Any:
        kept.append(model.assign(outputs, batch))
        return kept[0]

    model.computed_losses(batch, assign)  # first: it makes the tables that are kept
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        patch.object(Tensor, "pin_memory", lambda tensor: tensor),
    ):

        def moved(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cuda").requires_grad_(tensor.requires_grad)

        def on_gpu(tree: Any) -> Any:
            return map_tensors(moved, tree, NotOnDevice)

        moved_batch, assignment = on_gpu(batch), on_gpu(kept[0])
        state = {name: moved(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        return torch.func.functional_call(
            _Runs(model, run), {f"model.{name}": value for name, value in state.items()}
        )


class _Runs(nn.Module):
    """A module whose call runs a function while the model's parameters are replaced."""

    def __init__(self, model: nn.Module, run: Any) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Any:
        return self.run()

"""Optimizer wrappers that do not wait for the device and that train with mixed precision on any device."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from mmengine.dist import all_reduce
from mmengine.optim import OptimWrapper as _OptimWrapper
from torch import Tensor, nn
from torch.optim import Optimizer

from visdet.errors import InvalidInputError, UserError
from visdet.registry import OPTIM_WRAPPERS

from .gradients import Gradients, parameters_in
from .options import clip_grad as check_clip_grad


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(_OptimWrapper):
    """mmengine's optimizer wrapper without some of its costs on a GPU.

    * With ``paramwise_cfg``, mmengine makes a parameter group of each parameter, and torch's optimizers launch their
      kernels once for each group. Here, groups with the same options become one.
    * mmengine reads the norm of the gradients for the log before it launches the update, so that the GPU is idle in
      between. Here, the norm is kept for ``take_grad_norm``, and goes to the log with the losses.
    * Gradients that a graph writes lie in one block, and ``replay`` computes the update of all parameters as a graph.

    Args: see :class:`mmengine.optim.OptimWrapper`.

    Raises:
        UserError: an option of ``clip_grad`` is unknown, a limit is not above 0, or a learning rate is infinite.

    Attributes:
        averages_gradients: whether ``step`` averages the gradients over the processes, all at once, so that a wrapper
            of the model need not. ``DistributedDataParallel`` launches several kernels for each parameter.
        spoils_gradients_of_bad_losses: whether the gradients of a loss that is NaN or infinite become NaN. After the
            gradients have been averaged, every process then sees that the loss of one of them is bad.
        gradients: the block of memory in which the gradients lie, if a graph or the average has put them there.
        replay: a function of this wrapper that does what ``update`` does, such as a :class:`GraphedUpdate`.
        grad_norm: the norm of the gradients of the last update before they were clipped, or None.
    """

    averages_gradients: bool = False
    spoils_gradients_of_bad_losses: bool = False
    replay: "Callable[[OptimWrapper], None] | None" = None
    grad_norm: Tensor | None = None

    def __init__(
        self, optimizer: Optimizer, accumulative_counts: int = 1, clip_grad: dict | None = None
    ) -> None:
        self.groups_as_built = groups = optimizer.param_groups
        optimizer.param_groups = _merged(groups)
        check_clip_grad(**(clip_grad or {}))
        super().__init__(optimizer, accumulative_counts=accumulative_counts, clip_grad=clip_grad)
        for group in groups:
            if group.get("lr") == math.inf:
                raise InvalidInputError("lr of the optimizer must be a finite number, got inf")
        self.gradients = Gradients(parameters_in(groups))

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Say which iterations are counted. Unlike mmengine's, this does not say that a resumed run loses gradients."""
        super().initialize_count_status(model, 0, max_counts)
        self._inner_count = init_counts

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this wrapper or of mmengine's.

        A state of mmengine's wrapper has the parameter groups with which the optimizer was built. The optimizer then
        goes back to those groups, because the saved schedules have a value for each of them.
        """
        saved = len(state_dict["param_groups"])
        as_built = self.groups_as_built
        optimizer = self.optimizer
        if saved == len(as_built) != len(optimizer.param_groups):
            optimizer.param_groups = as_built
        super().load_state_dict(state_dict)

    def backward(self, loss: Tensor, **backward_args: Any) -> None:
        """Accumulate the gradients of ``loss``."""
        if self.spoils_gradients_of_bad_losses:
            loss = loss * torch.where(loss.isfinite(), 1.0, torch.nan)
        super().backward(loss, **backward_args)

    def should_sync(self) -> bool:
        """Return whether a wrapper of the model averages the gradients of this iteration."""
        return not self.averages_gradients and super().should_sync()

    def step(self, **step_args: Any) -> None:
        """Average the gradients over the processes if that is due, clip them and update the parameters."""
        if self.averages_gradients:
            self._average_gradients()
        replay = self.replay
        if replay is None or step_args:
            self.update(**step_args)
        else:
            replay(self)

    def update(self, **step_args: Any) -> None:
        """Clip the gradients and update the parameters."""
        super().step(**step_args)

    def zero_grad(self, **options: Any) -> None:
        """Forget the gradients. Those in a block of memory become zeros and stay where they are."""
        if not self.gradients.zero():
            super().zero_grad(**options)

    def _learning(self) -> list[Tensor]:
        parameters = parameters_in(self.optimizer.param_groups)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _average_gradients(self) -> None:
        learning = self._learning()
        without = sum(parameter.grad is None for parameter in learning)
        if without:
            raise UserError(
                f"{without} parameters of the model had no part in a loss, so the processes "
                "cannot average their gradients. Freeze them, or set find_unused_parameters=True in the config"
            )
        gradients = self.gradients
        gradients.attach(gradients.block_of(learning))
        for block in gradients.flat():
            all_reduce(block, "mean")

    def _clip_grad(self) -> None:
        parameters = [parameter for parameter in self._learning() if parameter.grad is not None]
        # torch's clipping by value returns None instead of a norm.
        self.grad_norm = self.clip_func(parameters, **self.clip_grad_kwargs) if parameters else None

    def take_grad_norm(self) -> dict[str, Tensor]:
        """Return the norm of the gradients of an update by its name in the log, once after the update."""
        norm = self.grad_norm
        self.grad_norm = None
        return {} if norm is None else {self.grad_name: norm}


def _merged(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups after joining those with the same options, in the order of their first parameters."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        options = {**group, "params": None}
        for other in merged:
            if options == {**other, "params": None}:
                other["params"] = [*other["params"], *group["params"]]
                break
        else:
            merged.append(dict(group))
    return merged


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(OptimWrapper):
    """Runs the forward pass under ``torch.autocast`` on the device of the parameters, which may be a CPU or a GPU.

    Parameters, gradients and optimizer state stay float32. The default, bfloat16, has the range of float32 and needs
    no loss scaling. float16 is meant for GPUs without bfloat16. With it, a ``GradScaler`` scales the loss and skips
    updates whose gradients are not finite. Gradients are unscaled before they are clipped.

    Args:
        optimizer: the optimizer, whose first parameter determines the device.
        dtype: 'bfloat16', 'float16' or the torch dtype. None means 'bfloat16'.
        loss_scale: 'dynamic', a fixed factor, or the keywords of ``torch.amp.GradScaler``. Only float16 uses it.
        accumulative_counts: the number of iterations whose gradients are accumulated for one update.
        clip_grad: the keywords of ``torch.nn.utils.clip_grad_norm_``, or those of ``clip_grad_value_`` together with
            ``type='value'``.

    Raises:
        ValueError: the dtype or loss_scale is not one of the above.

    Source: the name and the keywords are those of mmengine's ``AmpOptimWrapper``, which works on accelerators only
    and uses float16 by default.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dtype: str | torch.dtype | None = None,
        loss_scale: Literal["dynamic"] | float | dict = "dynamic",
        accumulative_counts: int = 1,
        clip_grad: dict | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts=accumulative_counts, clip_grad=clip_grad)
        self.device_type = next(parameters_in(optimizer.param_groups)).device.type
        name = str(dtype or "bfloat16").removeprefix("torch.")
        if name not in ("bfloat16", "float16"):
            raise InvalidInputError(f"AmpOptimWrapper: dtype must be 'bfloat16' or 'float16', got {dtype!r}")
        self.cast_dtype = getattr(torch, name)
        options = loss_scale if isinstance(loss_scale, dict) else {}
        self._fixed_scale = None
        if isinstance(loss_scale, int | float):
            self._fixed_scale = options["init_scale"] = float(loss_scale)
        # For bfloat16, it does nothing.
        scales = name == "float16" and options.get("enabled", True)
        self.loss_scaler = torch.amp.GradScaler(self.device_type, **{**options, "enabled": scales})

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the block under autocast. Gradients are not synchronised in iterations that only accumulate them."""
        with super().optim_context(model), torch.autocast(self.device_type, dtype=self.cast_dtype):
            yield

    def backward(self, loss: Tensor, **backward_args: Any) -> None:
        """Accumulate the gradients of ``loss``. If the dtype is float16, the loss is scaled first."""
        super().backward(self.loss_scaler.scale(loss), **backward_args)

    def update(self, **step_args: Any) -> None:
        """Clip the gradients and update the parameters, unless a float16 gradient is not finite."""
        scaler = self.loss_scaler
        optimizer = self.optimizer
        if self.clip_grad_kwargs:
            scaler.unscale_(optimizer)
            self._clip_grad()
        scaler.step(optimizer, **step_args)
        scaler.update(self._fixed_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and, for float16, the state of the scaler under 'loss_scaler'."""
        state = super().state_dict()
        if scaler_state := self.loss_scaler.state_dict():
            state["loss_scaler"] = scaler_state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, which may come from a wrapper without a scaler."""
        state = dict(state_dict)
        if scaler_state := state.pop("loss_scaler", None):
            self.loss_scaler.load_state_dict(scaler_state)
        super().load_state_dict(state)

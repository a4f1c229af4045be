"""What heads of one task and of several share: the ground truth, costs and losses of each task are its criterion's."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mmengine.model import BaseModule
from torch import Tensor

from visdet.execution.capture import in_parallel

from ..transfer import device_of
from .base_target import Assignment, PaddedInstances, PairCosts
from .sparse4d_loss import Sparse4DLoss


class HeadOfTasks(BaseModule):
    """A head that learns boxes, lines or both. Results of its methods are dicts by the ``task_prefix`` of each task."""

    def criteria(self) -> dict[str, Sparse4DLoss]:
        """Return the criterion of each task that is matched with ground truth."""
        raise NotImplementedError

    def outputs_by_task(self, model_outs: Any) -> dict[str, dict[str, Any]]:
        """Return what ``forward`` has returned for each of these tasks."""
        raise NotImplementedError

    def ground_truth(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the instances of the batch, padded and on the device.

        Args:
            data: the ground truth of all tasks, lists of one tensor per sample.
        """
        device = device_of(self)
        return {task: criterion.ground_truth(data, device) for task, criterion in self.criteria().items()}

    def pair_costs(self, model_outs: Any, truth: Mapping[str, PaddedInstances]) -> dict[str, PairCosts]:
        """Return what it costs to assign instances to predictions. All work runs on the device.

        Args:
            model_outs: the outputs of ``forward``. truth: the result of ``ground_truth``.
        """
        calls = {
            task: partial(_of_task, task, criterion.pair_costs) for task, criterion in self.criteria().items()
        }
        return side_by_side(calls, self.outputs_by_task(model_outs), truth)

    def losses(
        self,
        model_outs: Any,
        data: dict[str, Any],
        truth: Mapping[str, Any],
        costs: Mapping[str, PairCosts],
        assigned: Mapping[str, Assignment],
    ) -> dict[str, Tensor]:
        """Return the losses of all tasks by their names. All work runs on the device.

        Args:
            model_outs: the outputs of ``forward``. data: the ground truth of the ego vehicle.
            truth: the result of ``ground_truth``. costs: the result of ``pair_costs``.
            assigned: the result of ``assigned_instances``.
        """
        calls = {
            task: partial(_of_task, task, criterion.losses) for task, criterion in self.criteria().items()
        }
        losses: dict[str, Tensor] = {}
        for of_task in side_by_side(calls, self.outputs_by_task(model_outs), truth, costs, assigned).values():
            losses |= of_task
        return losses


def side_by_side(calls: Mapping[str, Any], *reads: Any) -> dict[str, Any]:
    """Return the results of one or two functions by their names; see :func:`in_parallel`.

    Args:
        calls: the functions, which do not read each other's results.
        reads: their arguments.
    """
    functions = list(calls.values())
    if len(functions) == 1:
        return {name: call(*reads) for name, call in calls.items()}
    first, second = functions
    return dict(zip(calls, in_parallel(first, second, reads), strict=True))


def _of_task(task: str, function: Callable[..., Any], *by_task: Mapping[str, Any]) -> Any:
    """Return the result of a function for what belongs to one task."""
    return function(*(part[task] for part in by_task))

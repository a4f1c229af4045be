"""What heads of one task and of several share: the ground truth, costs and losses of each task are its criterion's."""

from abc import abstractmethod
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

    @abstractmethod
    def criteria(self) -> dict[str, Sparse4DLoss]:
        """Return the criterion of each task that is matched with ground truth."""

    @abstractmethod
    def outputs_by_task(self, model_outs: Any) -> dict[str, dict[str, Any]]:
        """Return what ``forward`` has returned for each of these tasks."""

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
        functions = {task: criterion.pair_costs for task, criterion in self.criteria().items()}
        return side_by_side(functions, self.outputs_by_task(model_outs), truth)

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
        functions = {task: criterion.losses for task, criterion in self.criteria().items()}
        by_task = self.outputs_by_task(model_outs), truth, costs, assigned
        losses: dict[str, Tensor] = {}
        for of_task in side_by_side(functions, *by_task).values():
            losses |= of_task
        return losses


def side_by_side(functions: Mapping[str, Callable[..., Any]], *by_task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of the functions of one or two tasks by the tasks; see :func:`in_parallel`.

    Args:
        functions: the functions, which do not read each other's results.
        by_task: their arguments, each a dict with what every task gets.
    """
    first, *others = (partial(_of_task, task, function) for task, function in functions.items())
    results = in_parallel(first, others[0], by_task) if others else (first(*by_task),)
    return dict(zip(functions, results, strict=True))


def _of_task(task: str, function: Callable[..., Any], *by_task: Mapping[str, Any]) -> Any:
    """Return the result of a function for what belongs to one task."""
    return function(*(part[task] for part in by_task))

"""The functions of ``local_aggregate._C`` (GaussianFormer), computed by ``visdet.ops.mmcv.local_aggregate``."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from visdet.ops.mmcv import local_aggregate as operators

from ._gradients import gradients_of

__all__ = ["local_aggregate", "local_aggregate_backward"]


def local_aggregate(*arguments: Any) -> tuple[int, Tensor, Tensor, Tensor, Tensor]:
    """Return 0, the semantics, and three tensors that the wrapper keeps for the backward function.

    The arguments are those of ``visdet.ops.local_aggregate``. The tensors hold the voxels and the reach of the
    Gaussians, which the backward function is not given otherwise.
    """
    return 0, operators.local_aggregate(*arguments), *kept(arguments)


def local_aggregate_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of the means, the opacities, the semantics and the inverse covariances.

    The arguments are those of ``gradients_of_gaussians`` and the gradient of the semantics.
    """
    return gradients_of_gaussians(operators.local_aggregate, arguments[:13], arguments[13])


def kept(arguments: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the voxels and the reach of the Gaussians of a forward call, and an empty tensor."""
    return arguments[3], arguments[6], arguments[0].new_empty(0)


def gradients_of_gaussians(
    aggregate: Callable[..., Tensor], arguments: Sequence[Any], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of the means, the opacities, the semantics and the inverse covariances.

    Args:
        aggregate: a function of the arguments of ``visdet.ops.local_aggregate``.
        arguments: the three tensors of ``kept``, the three sizes of the grid, the first result of the forward call, the
            means, the points, their voxels, the inverse covariances, the opacities and the semantics.
        grad_output: the gradient of what ``aggregate`` returns.
    """
    voxels, radii, _, H, W, D, _, means, points, cells, covariances, opacities, semantics = arguments

    def sum_around(means: Tensor, opacities: Tensor, semantics: Tensor, covariances: Tensor) -> Tensor:
        return aggregate(points, cells, means, voxels, opacities, semantics, radii, covariances, H, W, D)

    inputs = [means, opacities, semantics, covariances]
    return tuple(gradients_of("local_aggregate_backward", sum_around, inputs, grad_output))

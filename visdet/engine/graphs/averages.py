"""The average of the weights, replayed as a CUDA graph."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.averages import ExponentialMovingAverage, Pairs
from .calls import GraphedCall


class GraphedAverage(GraphedCall):
    """What ``ExponentialMovingAverage.average`` does, replayed as a graph.

    The tensors of an average and its model are paired again when one of them lies elsewhere than before. A search by
    their names takes milliseconds.

    Args:
        say: see :class:`GraphedCall`.
    """

    name = "average"
    what = "the average of the weights"

    _modules: tuple[Any, Any] = (None, None)
    _stores: list[Mapping[str, Tensor | None]]  # where the parts of both modules keep their tensors
    _places: tuple[int, ...] = ()  # the addresses of these tensors
    _pairs: tuple[Pairs, Pairs]

    def __call__(self, average: ExponentialMovingAverage, model: nn.Module) -> None:
        """Move the averages towards the weights of a model."""
        modules = average, model
        if modules != self._modules:
            self._modules = modules
            self._stores = [*_stores_of(average), *_stores_of(model)]
            self._places = ()
        values = itertools.chain.from_iterable(store.values() for store in self._stores)
        places = tuple(tensor.data_ptr() for tensor in values if tensor is not None)
        if places != self._places:
            self._places = places
            self._pairs = average.pairs_with(model)
        pairs, buffers = self._pairs
        work = partial(average.average, pairs, buffers)
        on_devices = itertools.chain.from_iterable([*pairs, *buffers])
        if not all(tensor.is_cuda for tensor in on_devices):
            self._run_without_graph("a weight or its average is not on a GPU", work)
            return
        key = average.momentum, places
        with torch.cuda.device(pairs[0][0].device):
            self._run(lambda: key, work)


def _stores_of(model: nn.Module) -> list[Mapping[str, Tensor | None]]:
    stores: list[Mapping[str, Tensor | None]] = []
    for part in model.modules():
        stores += part._parameters, part._buffers
    return [store for store in stores if store]

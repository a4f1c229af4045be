"""Kernels for the training of visdet's models, which compute several of torch's operators at once.

They are not part of the public list of operators. Elsewhere than on CUDA, torch's operators compute the same.
"""

from .._registration import differentiable_once
from .autocast_copy import give_rows, in_autocast_type, sum_in_autocast_type
from .autocast_linear import autocast_linear, suits_autocast_linear
from .batch_norm_add_relu import batch_norm_add_relu
from .dropout_add_layer_norm import dropout_add_layer_norm
from .linear_sum_assignment import linear_sum_assignment, solves_assignments_on
from .parameter_gradients import parameter_gradients, parameter_gradients_go_to

__all__ = [
    "autocast_linear",
    "batch_norm_add_relu",
    "differentiable_once",
    "dropout_add_layer_norm",
    "give_rows",
    "in_autocast_type",
    "linear_sum_assignment",
    "parameter_gradients",
    "parameter_gradients_go_to",
    "solves_assignments_on",
    "suits_autocast_linear",
    "sum_in_autocast_type",
]

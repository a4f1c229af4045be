"""Calls of operators: with their gradients, as CUDA graphs, in a process of their own, and the error of a result."""

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from programs import ROOT, run_python
from torch import Tensor

from tests.fuzz.problem import generator_of
from visdet.execution.tensor_tree import map_tensors

__all__ = [
    "assert_matches",
    "assert_near",
    "captured",
    "changed_calls",
    "exact",
    "gradients",
    "in_a_process",
    "in_order",
    "kept_for_backward",
    "refusals",
    "relative_error",
    "without_synchronisation",
]

HERE = Path(__file__).resolve().parent


def gradients(function, case, grad_output=None, of=None):
    """Return the output of a call and its gradients.

    Args:
        grad_output: the gradient of the output. The default is random eighths, which every type holds.
        of: the indices of the arguments to differentiate by. The default is all floating-point tensors.
    """
    if of is None:
        of = [i for i, one in enumerate(case) if isinstance(one, Tensor) and one.is_floating_point()]
    arguments = list(case)
    for index in of:
        arguments[index] = case[index].detach().clone().requires_grad_()
    output = function(*arguments)
    if grad_output is None:
        grad_output = torch.randint(-16, 17, output.shape, generator=generator_of(1)) / 8
    leaves = [arguments[index] for index in of]
    return output, torch.autograd.grad(output, leaves, grad_output.to(output).expand_as(output))


def exact(case, device="cpu"):
    """Return the arguments of a call on a device, floating-point numbers in float64."""
    return map_tensors(lambda one: one.to(device, torch.float64 if one.is_floating_point() else None), case)


def assert_matches(function, reference, case, *tolerances, of=None):
    """Compare output and gradients of a call with those in float64 on the CPU.

    Args:
        tolerances: the relative errors of the output and of each gradient, or one for all.
    """
    output, grads = gradients(function, case, of=of)
    expected, expected_grads = gradients(reference, exact(case), of=of)
    assert output.dtype == case[0].dtype and output.device == case[0].device
    assert_near((output, *grads), (expected, *expected_grads), *tolerances)
    sources = [one for one in case if isinstance(one, Tensor) and one.is_floating_point()]
    chosen = sources if of is None else [case[index] for index in of]
    assert [grad.dtype for grad in grads] == [one.dtype for one in chosen]


def assert_near(found, expected, *tolerances):
    """Compare tensors by their relative errors, with a tolerance for each, or one for all."""
    tolerances = tolerances * len(expected) if len(tolerances) == 1 else tolerances
    errors = [relative_error(one, other) for one, other in zip(found, expected, strict=True)]
    assert all(error < most for error, most in zip(errors, tolerances, strict=True)), errors


def changed_calls(function, sound, rows):
    """Return calls with some arguments other than in a sound one, and what their errors say, as ``REFUSED`` holds them.

    Args:
        rows: the other arguments by name, and the message.
    """
    name = function.__name__
    return [(partial(function, **sound | change), f"^{name}: .*{message}") for change, message in rows]


def refusals(function, sound, *rows):
    """Return calls with one argument other than in a sound one, and what their errors say, as ``REFUSED`` holds them.

    Args:
        rows: the index of the argument, what it is instead, and the message.
    """
    return [
        (partial(function, *sound[:index], wrong, *sound[index + 1 :]), message)
        for index, wrong, message in rows
    ]


def relative_error(actual, expected):
    """Return the largest difference, divided by the largest expected number."""
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


@contextmanager
def in_order(is_wanted=True):
    """Let torch use deterministic algorithms alone within the block."""
    torch.use_deterministic_algorithms(is_wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def kept_for_backward():
    """Give a list of the tensors that the calls within the block keep for their backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        yield kept


@contextmanager
def without_synchronisation():
    """Let whatever waits for the GPU raise an error within the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step):
    """Return the graph of a step, which runs once on a stream of its own before, and the results that it writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def in_a_process(script, **environment):
    """Run Python text in a process of its own, from the folder of the repository; a crash fails the test."""
    folders = (ROOT, HERE, HERE.parent, os.environ.get("PYTHONPATH", ""))
    paths = os.pathsep.join(map(str, folders))
    return run_python("-X", "faulthandler", "-c", script, PYTHONPATH=paths, **environment)[0]
